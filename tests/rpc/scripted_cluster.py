"""A gateway's backend over scripted workers: its requests, and what their streams gave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from scripted_backend import each
from scripted_worker import ScriptedWorker

from eyas.common.cluster.discovery import registry
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice, Role, TokenEntry
from gateway.backends.generate import ClusterBackend, ClusterGeneration
from gateway.routing.cluster import Cluster

PREFILL, DECODE, DRAFT = (Role.PREFILL,), (Role.DECODE,), (Role.DRAFT,)
UNIFIED = (Role.PREFILL, Role.DECODE, Role.DRAFT)


async def until(condition: Callable[[], object], within_s: float = 30.0) -> None:
    """Waits until `condition()` is true. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def gateway(started: list[ScriptedWorker]) -> AsyncIterator[tuple[ClusterBackend, Cluster]]:
    """A backend connected to every decode worker of `started`."""
    cluster = Cluster(registry("static:" + ",".join(w.address for w in started)))
    await cluster.start()
    try:
        decodes = [w for w in started if Role.DECODE in w.roles and w.fingerprint == started[0].fingerprint]
        await until(lambda: all(cluster.session(w.address).connected for w in decodes))
        yield ClusterBackend(cluster), cluster
    finally:
        await cluster.aclose()


def make_request(name: str = "r", tokens: int = 12, n: int = 1, timeout_s: float = 10.0) -> GenerationRequest:
    choices = tuple(RequestChoice(i) for i in range(n))
    return GenerationRequest(name, (1, 2, 3), SamplingParams(max_tokens=tokens), choices, timeout_s)


async def collect(stream: ClusterGeneration) -> dict[int, list[int]]:
    """The ids of each choice, after checking that every index came once and in order."""
    outputs: dict[int, list[int]] = {}
    async for entry in each(stream):
        ids = outputs.setdefault(entry.choice, [])
        assert entry.index == len(ids)
        ids.extend(entry.tokens)
    return outputs


def nothing_in_flight(cluster: Cluster) -> bool:
    return all(candidate.in_flight == 0 for candidate in cluster.candidates())


async def collect_after(got: list[TokenEntry], stream: ClusterGeneration) -> dict[int, list[int]]:
    """Like `collect`, with the entries already read in front."""
    outputs: dict[int, list[int]] = {}
    for entry in [*got, *[entry async for entry in each(stream)]]:
        assert entry.index == len(outputs.setdefault(entry.choice, []))
        outputs[entry.choice].extend(entry.tokens)
    return outputs
