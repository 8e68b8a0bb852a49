"""`make demo`: starts a cluster, asks it one question, and shows the streamed answer and its figures."""

from __future__ import annotations

import time

from eyas.client import AsyncClient, Message
from eyas.client.terminal import PlainProse, tell
from eyas.cluster.screen import run_on_screen
from eyas.cluster.serve import LocalCluster
from eyas.common.config import ServeConfig

WARM_UP = "Hello!"
QUESTION = "Tom has 12 apples and buys 7 more. How many apples does Tom have?"
WARM_UP_S = 5.0
MAX_TOKENS = 128


def demo(config: ServeConfig) -> int:
    """Runs the demo; returns the exit code: 0 if the answer has text, else 1."""

    async def ask(cluster: LocalCluster) -> int:
        async with AsyncClient(cluster.grpc_address) as client:
            await _warm_up(client, drafts=config.engine.draft is not None)
            print(f"\n> {QUESTION}", flush=True)
            question = [Message(role="user", content=QUESTION)]
            answer = await tell(client, question, PlainProse(), temperature=0.0, max_tokens=MAX_TOKENS)
        print(f"\n{answer}")
        return 0 if answer.text else 1

    return run_on_screen(config, ask, quiet=True)


async def _warm_up(client: AsyncClient, *, drafts: bool) -> None:
    """Sends other requests until drafts arrive, because services connect to each other on first use."""
    deadline = time.monotonic() + WARM_UP_S
    while time.monotonic() < deadline:
        greeting = [Message(role="user", content=WARM_UP)]
        answer = await client.chat(greeting, temperature=0.0, max_tokens=MAX_TOKENS)
        if answer.usage.verify_steps or not drafts:
            return
