"""Plans of experts' replicas: even loads, nothing moved for nothing, no expert twice on a rank."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from eyas.engine.parallel import expert_plan
from eyas.engine.parallel.expert_plan import NONE, ExpertSlots, planned, rank_loads, unevenness

SIZES = [ExpertSlots(8, 2, 1), ExpertSlots(16, 4, 2), ExpertSlots(256, 8, 8), ExpertSlots(128, 4, 4)]


def skewed(slots: ExpertSlots, seed: int) -> np.ndarray:
    """Loads as of a router with favourites, which lie together as experts of one domain may."""
    rng = np.random.default_rng(seed)
    loads = rng.zipf(1.5, slots.experts).clip(max=200) * 10.0
    loads[: slots.homes] *= 2
    return loads


@pytest.mark.parametrize("slots", SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_is_lawful_and_makes_ranks_more_even(slots: ExpertSlots, seed: int) -> None:
    loads = skewed(slots, seed)
    replicas = planned(loads, slots, slots.empty)
    assert len(replicas) == slots.ranks * slots.spares
    for rank in range(slots.ranks):
        mine = [e for e in replicas[slots.spares * rank : slots.spares * (rank + 1)] if e != NONE]
        assert len(set(mine)) == len(mine) and all(expert // slots.homes != rank for expert in mine)
    before, after = (unevenness(loads, slots, each) for each in (slots.empty, replicas))
    assert after < before
    assert rank_loads(loads, slots, replicas).sum() == pytest.approx(loads.sum())
    if slots.ranks >= 4 and slots.spares >= 4:
        assert after < 1.15, "so many spare slots bring ranks near the mean"


def test_few_slots_find_the_best_that_there_is() -> None:
    """Two ranks with a spare slot each, by trying everything: greed is not far from it."""
    slots, rng = ExpertSlots(6, 2, 1), np.random.default_rng(4)
    for _ in range(20):
        loads = rng.random(6) * np.array([4, 1, 1, 1, 1, 1])
        every = itertools.product([NONE, 3, 4, 5], [NONE, 0, 1, 2])
        best = min(unevenness(loads, slots, each) for each in every)
        assert unevenness(loads, slots, planned(loads, slots, slots.empty)) <= 1.2 * best


def test_replicas_that_stay_keep_their_slots() -> None:
    slots = SIZES[2]
    loads = skewed(slots, 1)
    first = planned(loads, slots, slots.empty)
    assert planned(loads, slots, first) == first
    swapped = (*first[:8][::-1], *first[8:])
    assert planned(loads, slots, swapped) == swapped
    drifted = loads.copy()
    drifted[200] += 4 * loads.max()
    second = planned(drifted, slots, first)
    stayed = sum(a == b for a, b in zip(first, second, strict=True) if a != NONE)
    gone = sum(a not in second[i // 8 * 8 : i // 8 * 8 + 8] for i, a in enumerate(first) if a != NONE)
    assert 200 in second and stayed + gone == sum(expert != NONE for expert in first)


def test_even_loads_and_no_loads_need_no_replica() -> None:
    slots = SIZES[1]
    for loads in (np.ones(16), np.zeros(16)):
        assert planned(loads, slots, slots.empty) == slots.empty
        assert unevenness(loads, slots, slots.empty) == 1.0


def test_the_table_has_every_copy_once() -> None:
    slots = ExpertSlots(8, 2, 2)
    table = slots.table((5, NONE, 0, 1))
    assert table[:, 0].tolist() == [2, 2, 1, 1, 1, 2, 1, 1]
    assert table[5].tolist() == [2, 7, 4]  # its home is the second rank's; the copy stands behind four homes
    assert table[0].tolist() == [2, 0, 10] and table[1].tolist() == [2, 1, 11]
    assert sorted({int(s) for row in table for s in row[1 : 1 + row[0]]}) == [
        0,
        1,
        2,
        3,
        4,
        6,
        7,
        8,
        9,
        10,
        11,
    ]


def test_without_the_gain_it_must_have_a_plan_moves_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the limit is for: nearly even loads would be copied about."""
    slots, loads = SIZES[1], np.ones(16)
    loads[3] = 1.001
    assert planned(loads, slots, slots.empty) == slots.empty
    monkeypatch.setattr(expert_plan, "GAIN", -1.0)
    assert planned(loads, slots, slots.empty) != slots.empty
