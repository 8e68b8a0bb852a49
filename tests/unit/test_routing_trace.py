"""Conversations over 4 prefill and 4 decode workers, simulated: the gateway's router against round robin.

Run as a program, this file prints the table that docs/gateways.md shows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import pytest

from eyas.common.types import WorkerBacklog
from eyas.simulator.cluster import ClusterLayout, ClusterShape, Policy, play
from eyas.simulator.goodput import outcome
from eyas.simulator.hardware import example
from eyas.simulator.workload import BLOCK_TOKENS, ChatTraffic, SimulatedRequest, chats
from gateway.routing.placement import LatencyTargets, RequestPlacement, WorkerPlace
from gateway.routing.router import RouterCandidate, route
from tests.unit.routed_workers import DECODE, PREFILL, worker

PREFILLS, WORKERS = 4, 8
TARGETS = LatencyTargets(1.0, 0.05)
CHATS = ChatTraffic(turns=8, message=1024, output_len=200, pause_s=20.0)
Known = Callable[
    [SimulatedRequest, WorkerPlace], int
]  # how many tokens a gateway believes to be cached there


@dataclass(frozen=True)
class Figures:
    """`hit`: the part of all prompt tokens that was cached where the prompt was computed."""

    hit: float
    ttft_p50_ms: float
    ttft_p99_ms: float


def round_robin() -> Policy:
    turns = itertools.count()

    def choose(arrival: SimulatedRequest, places: Sequence[WorkerPlace]) -> RequestPlacement:
        turn = next(turns)
        decode = str(PREFILLS + turn % (WORKERS - PREFILLS))
        return RequestPlacement(decode, str(turn % PREFILLS), 0.0, 0.0)

    return choose


def candidate(place: WorkerPlace, cached: int) -> RouterCandidate:
    """The place as the router sees a worker: its report is never late."""
    roles = PREFILL if int(place.worker) < PREFILLS else DECODE
    backlog = WorkerBacklog(queued=place.queued)
    seen = worker(place.worker, roles, running=place.sequences, backlog=backlog)
    return RouterCandidate(msgspec.structs.replace(seen.info), cached=cached)


class Routed:
    """The gateway's router, by what it knows of the caches."""

    def __init__(self, gateways: int, events: bool) -> None:
        self._sent: list[set[tuple[str, int]]] = [set() for _ in range(gateways)]
        self._events = events
        self._rng = random.Random(1)

    def __call__(self, arrival: SimulatedRequest, places: Sequence[WorkerPlace]) -> RequestPlacement:
        sent = self._rng.choice(self._sent)  # connections meet the gateways by chance
        found = route([candidate(place, self._known(arrival, place, sent)) for place in places])
        assert found is not None and found.prefill is not None
        for block, name in itertools.product(arrival.blocks, (found.decode, found.prefill)):
            sent.add((name, block))
        return RequestPlacement(found.decode, found.prefill, 0.0, 0.0)

    def _known(self, arrival: SimulatedRequest, place: WorkerPlace, sent: set[tuple[str, int]]) -> int:
        if self._events:
            return place.cached
        known = itertools.takewhile(lambda block: (place.worker, block) in sent, arrival.blocks)
        return min(BLOCK_TOKENS * sum(1 for _ in known), arrival.prompt - 1)


def figures(policy: Policy, rate: float, count: int, pool_tokens: int | None = None) -> Figures:
    """`rate`: turns per second. `pool_tokens`: KV per worker; None: as the example has."""
    hardware = example()
    if pool_tokens is not None:
        hardware = type(hardware)(**{**vars(hardware), "pool_tokens": pool_tokens})
    shape = ClusterShape(hardware, WORKERS, ClusterLayout.SPLIT, TARGETS, PREFILLS)
    cached = asked = 0

    def counted(arrival: SimulatedRequest, places: Sequence[WorkerPlace]) -> RequestPlacement | None:
        nonlocal cached, asked
        found = policy(arrival, places)
        assert found is not None
        cached += places[int(found.prefill or found.decode)].cached
        asked += arrival.prompt
        return found

    load = chats(CHATS, rate, count, seed=1)
    played = play(shape, load, counted)
    got = outcome(played, TARGETS, warm_up_s=load[count // 5].at_s)
    return Figures(cached / asked, 1e3 * got.ttft_p50_s, 1e3 * got.ttft_p99_s)


POLICIES: dict[str, Callable[[], Policy]] = {
    "round robin": round_robin,
    "router, what it sent, one gateway": lambda: Routed(1, events=False),
    "router, what it sent, four gateways": lambda: Routed(4, events=False),
    "router, cache events, one gateway": lambda: Routed(1, events=True),
    "router, cache events, four gateways": lambda: Routed(4, events=True),
}


@pytest.mark.slow
def test_conversations_find_their_caches_and_answer_sooner() -> None:
    got = {name: figures(make(), 20.0, 800) for name, make in POLICIES.items()}
    plain, events = got["round robin"], got["router, cache events, four gateways"]
    guesses = got["router, what it sent, four gateways"]
    assert events.hit > plain.hit + 0.15 and events.hit > guesses.hit + 0.05
    assert events.ttft_p50_ms < 0.7 * plain.ttft_p50_ms
    assert events.ttft_p99_ms < plain.ttft_p99_ms and events.ttft_p99_ms < guesses.ttft_p99_ms
    # Gateways that hear the same events are as good as one.
    assert abs(events.hit - got["router, cache events, one gateway"].hit) < 0.01


if __name__ == "__main__":
    for pool, rate in ((None, 10.0), (None, 30.0), (150_000, 20.0)):
        print(f"| {rate:g} turns per second, {pool or example().pool_tokens} tokens of KV per worker | | | |")
        for name, make in POLICIES.items():
            one = figures(make(), rate, 6000, pool)
            print(f"| {name} | {100 * one.hit:.1f} % | {one.ttft_p50_ms:.0f} ms | {one.ttft_p99_ms:.0f} ms |")
