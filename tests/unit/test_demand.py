"""What preferences are chosen by: means that follow a load, and bursts that are told from changes of rate."""

from __future__ import annotations

import random

import pytest

from gateway.routing.preference import (
    BELIEVED_S,
    COUNTS,
    ENOUGH,
    WRONG,
    ArrivalDispersion,
    DemandMeter,
    FadingMean,
    TargetMemory,
)


def arrivals(rng: random.Random, rate: float, seconds: float, together: int = 1) -> list[float]:
    """Poisson groups of `together` requests; `rate`: of requests."""
    at_s, found = 0.0, []
    while (at_s := at_s + rng.expovariate(rate / together)) < seconds:
        found += [at_s] * together
    return found


def burst(times: list[float]) -> float:
    evenness = ArrivalDispersion(0.0)
    for at_s in times:
        evenness.count(at_s)
    return evenness.burst


@pytest.mark.parametrize("rate", [0.5, 4.0, 40.0])
def test_poisson_is_even_at_every_rate_and_groups_are_not(rate: float) -> None:
    rng = random.Random(1)
    even = [burst(arrivals(rng, rate, 100.0)) for _ in range(20)]
    assert 0.9 < sum(even) / len(even) < 1.5
    groups = [burst(arrivals(rng, rate, 100.0, together=8)) for _ in range(20)]
    assert 4.0 < sum(groups) / len(groups) < 10.0


def test_a_rate_that_changes_is_no_burst() -> None:
    rng = random.Random(2)
    slow, fast = arrivals(rng, 3.0, 30.0), arrivals(rng, 60.0, 30.0)
    assert burst(slow + [30.0 + at_s for at_s in fast]) < 3.0


def test_a_few_counts_say_nothing() -> None:
    evenness = ArrivalDispersion(0.0)
    for at_s in (0.1, 0.1, 0.1, 0.1, 2.5, 2.5, 2.5):
        evenness.count(at_s)
    assert evenness.burst == 1.0
    for second in range(4, 4 + int(COUNTS) + 2, 2):
        for _ in range(8):
            evenness.count(float(second))
    assert evenness.burst > 4.0


def test_a_mean_becomes_that_of_another_load_at_once() -> None:
    mean = FadingMean()
    assert not any(mean.add(1000) for _ in range(200))
    others = [mean.add(8000) for _ in range(ENOUGH)]
    assert sum(others) >= 1
    assert mean.mean > 5000
    assert not any(mean.add(8000) for _ in range(3 * ENOUGH))
    assert mean.mean == pytest.approx(8000, rel=0.1)
    assert mean.spread < 1.1


def test_lengths_that_vary_are_one_load() -> None:
    rng, mean = random.Random(3), FadingMean()
    changes = sum(mean.add(rng.expovariate(1 / 1000)) for _ in range(5000))
    assert changes < 50
    assert 1.6 < mean.spread < 2.5


def test_a_new_load_is_not_thought_to_come_as_the_old_one_did() -> None:
    meter, rng = DemandMeter(), random.Random(4)
    for at_s in arrivals(rng, 40.0, 30.0, together=16):
        meter.add_request(at_s, 1000, 1000)
        meter.answered(256)
    bursts = meter.mix()
    assert bursts is not None and bursts.burst > 4.0
    for at_s in arrivals(rng, 4.0, 30.0):
        meter.add_request(30.0 + at_s, 8000, 8000)
        meter.answered(256)
    even = meter.mix()
    assert even is not None and even.burst < 2.5
    assert even.prompt == pytest.approx(8000, rel=0.1)
    assert even.spread < 1.1


def watched(memory: TargetMemory, since_s: float, share: float, seconds: float = 60.0) -> float:
    """Lets ten answers per second end, of which `share` keep their targets; says until when."""
    for number in range(round(10 * seconds)):
        at_s = since_s + number / 10
        memory.ended(at_s, at_s, (number + 1) * share // 1 > number * share // 1)
    return since_s + seconds


@pytest.mark.parametrize(("share", "wanted"), [(1.0, 20.0), (0.89, 20.0), (0.8, 20.0 / WRONG)])
def test_an_estimate_is_less_where_requests_miss_their_targets(share: float, wanted: float) -> None:
    memory = TargetMemory(0.0)
    memory.corrected(0.0, [9.0, 20.0], 1)
    soon_s = watched(memory, 0.0, share, seconds=10.0)
    assert memory.corrected(soon_s, [9.0, 20.0], 1) == [9.0, 20.0], "a few seconds say nothing"
    now_s = watched(memory, soon_s, share)
    assert memory.corrected(now_s, [9.0, 20.0], 1) == [9.0, wanted]
    assert memory.missed == (wanted < 20.0)
    assert memory.corrected(now_s, [9.0, 20.0], 0) == [9.0, wanted], "it is remembered"
    assert memory.corrected(now_s + BELIEVED_S, [9.0, 20.0], 0) == [9.0, 20.0], "not for ever"


def test_what_misses_no_targets_any_more_is_believed_again() -> None:
    memory = TargetMemory(0.0)
    now_s = watched(memory, 0.0, 0.5)
    assert memory.corrected(now_s, [20.0], 0) == [20.0 / WRONG]
    assert memory.corrected(watched(memory, now_s, 1.0, seconds=200.0), [20.0], 0) == [20.0]


def test_a_request_that_began_before_a_change_says_nothing_of_what_came_after() -> None:
    memory = TargetMemory(0.0)
    now_s = watched(memory, 0.0, 0.5)
    assert memory.missed
    memory.corrected(now_s, [20.0, 20.0], 1)
    for _ in range(2 * ENOUGH):
        memory.ended(now_s + 30.0, now_s - 1.0, False)
    assert not memory.missed
    assert memory.corrected(now_s + 30.0, [20.0, 20.0], 1)[1] == 20.0


def test_a_cluster_that_misses_its_targets_changes_for_any_gain() -> None:
    demand = DemandMeter()
    assert demand.best_split(0.0, [20.0, 20.9], 0) == 0
    now_s = watched(demand.targets, 0.0, 0.5)
    assert demand.best_split(now_s, [20.0, 19.5], 0) == 1
    assert demand.best_split(now_s, [20.0, 18.5], 0) == 0
