"""When replicas are planned: on loads that say something, where it pays, a layer at a time."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import pytest

from eyas.engine.loop.expert_balance import LEAST, ExpertBalance
from eyas.engine.parallel.expert_plan import ExpertSlots, Replicas, unevenness

SLOTS = ExpertSlots(8, 2, 2)
HOT = np.array([40, 30, 2, 2, 2, 2, 2, 2], np.uint32)
EVEN = np.full(8, 20, np.uint32)


@dataclass
class PlayedRanks:
    """Ranks of two layers, whose loads a test adds to; each takes a look until it is known."""

    counted: np.ndarray = field(default_factory=lambda: np.zeros((2, 8), np.uint32))
    replicas: list[Replicas] = field(default_factory=lambda: [SLOTS.empty] * 2)
    moved: list[int] = field(default_factory=list)
    slots: ExpertSlots = SLOTS
    _looks: int = 0

    def begin_loads(self) -> None:
        self._looks = 0

    def loads(self) -> np.ndarray | None:
        self._looks += 1
        return self.counted if self._looks > 1 else None

    def replicate(self, layer: int, replicas: Replicas) -> None:
        self.replicas[layer] = replicas
        self.moved.append(layer)


def looked(ranks: PlayedRanks, *added: np.ndarray) -> ExpertBalance:
    """Looks before the first of `added` loads of both layers, and after each of them."""
    balance, now = ExpertBalance(ranks, 10.0), 100.0
    for more in (np.zeros((2, 8), np.uint32), *added):
        ranks.counted = ranks.counted + more
        for _ in range(6):
            balance.poll(now)
        now += 11
    return balance


def test_busy_experts_get_replicas_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    ranks = PlayedRanks()
    with caplog.at_level(logging.INFO):
        looked(ranks, np.stack([HOT, EVEN]))
    assert ranks.moved == [0] and ranks.replicas[1] == SLOTS.empty
    assert unevenness(HOT.astype(float), SLOTS, ranks.replicas[0]) < 1.05
    (record,) = caplog.records
    assert "3 replicas moved in 1 of 2 layers" in record.getMessage() and "1.80" in record.getMessage()


def test_counts_may_wrap() -> None:
    ranks = PlayedRanks(np.full((2, 8), 2**32 - 25, np.uint32))
    looked(ranks, np.stack([HOT, EVEN]))
    assert ranks.moved == [0]


def test_the_start_few_choices_and_no_choices_say_nothing() -> None:
    ranks = PlayedRanks(np.stack([HOT, HOT]) * 1000)  # of made-up steps, before the first look
    few = np.stack([HOT, HOT]) // 4
    assert few.sum() < 2 * LEAST * 8
    looked(ranks, np.zeros((2, 8), np.uint32), few)
    assert ranks.moved == []


def test_a_layer_is_planned_again_only_where_loads_drift() -> None:
    ranks = PlayedRanks()
    both = np.stack([HOT, HOT[::-1]])
    looked(ranks, both, both, both)
    assert ranks.moved == [0, 1]
    drifted = PlayedRanks()
    looked(drifted, both, both[:, ::-1] * 4)
    assert drifted.moved == [0, 1, 0, 1]


def test_a_poll_plans_one_layer() -> None:
    ranks = PlayedRanks()
    balance = looked(ranks)
    ranks.counted = ranks.counted + np.stack([HOT, HOT])
    moved = []
    for _ in range(6):
        balance.poll(200.0)
        moved.append(len(ranks.moved))
    assert moved == [0, 0, 0, 1, 2, 2]
