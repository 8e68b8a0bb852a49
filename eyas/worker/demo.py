"""`make demo`: one question to a cluster of our own, answered as it comes, with what it cost."""

from __future__ import annotations

from eyas.client import AsyncClient, Message
from eyas.client.terminal import tell
from eyas.common.config import ServeConfig
from eyas.worker.screen import run_on_screen
from eyas.worker.serve import Cluster

QUESTION = "Tom has 12 apples and buys 7 more. How many apples does Tom have?"


def demo(config: ServeConfig) -> int:
    """0 if an answer came."""
    return run_on_screen(config, _ask, quiet=True)


async def _ask(cluster: Cluster) -> int:
    print(f"\n> {QUESTION}", flush=True)
    async with AsyncClient(cluster.grpc_address) as client:
        question = [Message(role="user", content=QUESTION)]
        told = await tell(client, question, temperature=0.0, max_tokens=128)
    print(f"\n{told}")
    return 0 if told.text else 1
