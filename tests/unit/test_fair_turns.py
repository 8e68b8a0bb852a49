"""Fair queueing as a value:

a server that is always busy, callers that flood, priorities, and no caller that starves.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from gateway.limits.queues import FairQueue, QueueClaim

Served = list[tuple[float, str, int]]  # when, caller, number


class ByArrival(FairQueue[int]):
    """What fairness is not: first come, first served."""

    def first(self) -> int:
        return min(self._claims, key=lambda item: self._claims[item][0].arrived)


def simulate(
    make: Callable[[], FairQueue[int]], arrivals: list[QueueClaim], service_s: Callable[[QueueClaim], float]
) -> tuple[Served, dict[int, float]]:
    """One server: (what it began when, and how long each claim waited)."""
    turns, claims = make(), dict(enumerate(sorted(arrivals, key=lambda claim: claim.arrived)))
    coming, now = list(claims), 0.0
    served: Served = []
    waited: dict[int, float] = {}
    while coming or len(turns):
        if not len(turns):
            now = max(now, claims[coming[0]].arrived)
        while coming and claims[coming[0]].arrived <= now:
            number = coming.pop(0)
            turns.add(number, claims[number])
        number = turns.first()
        turns.serve(number)
        claim = claims[number]
        served.append((now, claim.caller, number))
        waited[number] = now - claim.arrived
        now += service_s(claim)
    return served, waited


def by_cost(claim: QueueClaim) -> float:
    return claim.cost


def worst(waited: dict[int, float], arrivals: list[QueueClaim], caller: str) -> float:
    ordered = sorted(arrivals, key=lambda claim: claim.arrived)
    return max(waited[number] for number, claim in enumerate(ordered) if claim.caller == caller)


def flood(seed: int) -> list[QueueClaim]:
    """A asks for a thousand at once; B now and then, for less than half of the server."""
    rng = random.Random(seed)
    ours = [QueueClaim("b", rng.uniform(0.5, 1.5), arrived=3.0 * i + rng.random()) for i in range(200)]
    return [QueueClaim("a", rng.uniform(0.5, 2.0), arrived=0.0) for _ in range(1000)] + ours


@pytest.mark.parametrize("seed", range(5))
def test_who_floods_waits_behind_himself_alone(seed: int) -> None:
    arrivals = flood(seed)
    _, waited = simulate(FairQueue, arrivals, by_cost)
    # One of A's that runs, one that was before, and B's own before: never A's thousand.
    assert worst(waited, arrivals, "b") <= 3 * 2.0
    _, unfair = simulate(ByArrival, arrivals, by_cost)
    assert worst(unfair, arrivals, "b") > 500.0


@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 1.0), (5.0, 1.0)])
def test_a_full_server_is_shared_by_weight(weights: tuple[float, float]) -> None:
    rng = random.Random(1)
    arrivals = [
        QueueClaim(caller, rng.uniform(0.2, 3.0) * size, weight)
        for caller, weight, size in (("a", weights[0], 1.0), ("b", weights[1], 4.0))
        for _ in range(2000)
    ]
    served, _ = simulate(FairQueue, arrivals, by_cost)
    got: Counter[str] = Counter()
    for _, caller, number in served:
        got[caller] += arrivals[number].cost  # type: ignore[assignment]
        if sum(got.values()) > 1000:
            break
    assert got["a"] / got["b"] == pytest.approx(weights[0] / weights[1], rel=0.05)


def test_an_idle_caller_saves_nothing_up() -> None:
    busy = [QueueClaim("a", 1.0, arrived=0.0) for _ in range(300)]
    late = [QueueClaim("b", 1.0, arrived=100.0) for _ in range(100)]
    served, _ = simulate(FairQueue, busy + late, by_cost)
    after = Counter(caller for at, caller, _ in served if 100.0 <= at < 140.0)
    assert abs(after["a"] - after["b"]) <= 1


def test_priorities_order_the_requests_of_one_caller() -> None:
    arrivals = [QueueClaim("a", priority=p, arrived=0.0) for p in (5, -3, 0, 9, -3)]
    served, _ = simulate(FairQueue, arrivals, by_cost)
    assert [number for _, _, number in served] == [1, 4, 2, 0, 3]
    beside = [QueueClaim("b", arrived=0.0), *(QueueClaim("a", priority=-100, arrived=0.0) for _ in range(9))]
    served, _ = simulate(FairQueue, beside, by_cost)
    assert 0 in [number for _, _, number in served[:2]]  # no priority of one caller moves another's


def test_no_request_starves_behind_urgent_ones() -> None:
    urgent = [QueueClaim("a", 1.0, priority=-20, arrived=0.9 * i) for i in range(1000)]  # more than is served
    patient = QueueClaim("a", 1.0, priority=20, arrived=10.0)
    arrivals = sorted([*urgent, patient], key=lambda claim: claim.arrived)
    _, waited = simulate(FairQueue, arrivals, by_cost)
    number = next(i for i, claim in enumerate(arrivals) if claim is patient)
    overtakers = (40 + 10) / 0.9  # those that came up to 40 s after it, and those before
    assert 40 < waited[number] <= overtakers + 1
    assert waited[number] < max(waited.values())  # that of the last ones, long after it was served


def test_what_leaves_is_forgotten() -> None:
    turns: FairQueue[int] = FairQueue()
    for number in range(1000):
        turns.add(number, QueueClaim(f"caller {number}", arrived=float(number)))
        turns.serve(turns.first())
    turns.add(-1, QueueClaim("one"))
    turns.remove(-1)
    turns.remove(-1)
    assert turns._lines == turns._claims == turns._times == {}
