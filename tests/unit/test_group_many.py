"""The order of many choices, sorted part by part, is the one that `group` gives of few."""

from __future__ import annotations

import pytest
import torch

from eyas.engine.kernels.experts import group as few
from eyas.engine.kernels.experts import group_many
from tests.unit.crossed import crossed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("experts", "rows", "count"),
    crossed([9, 40], [4, 64], [64, 1000], quick=lambda experts, rows, count: (rows == 4) == (count == 1000)),
)
def test_the_order_is_one(experts: int, rows: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some choose no expert, and some experts are chosen by none."""
    chosen = torch.randint(-1, experts - 1, (count, 3), generator=torch.Generator().manual_seed(count))
    chosen = torch.where(chosen == 2, 1, chosen).int().to(DEVICE)
    expected = few.group(chosen, experts, rows)
    monkeypatch.setattr(few, "FEWEST", 0)
    monkeypatch.setattr(group_many, "_PART", 128)
    made = few.group(chosen, experts, rows)
    placed = int((chosen >= 0).sum())
    assert torch.equal(made.order[:placed], expected.order[:placed])
    number = int(expected.blocks[-1])
    assert int(made.blocks[-1]) == number
    for field in range(3):
        own = slice(field * expected.most, field * expected.most + number)
        assert torch.equal(made.blocks[own], expected.blocks[own])


def test_many_take_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(few, "order_many", lambda chosen, *_: taken.append(chosen.numel()))
    few.group(torch.zeros(group_many.FEWEST // 8, 8, dtype=torch.int32), 4, 64)
    assert taken == [group_many.FEWEST]
