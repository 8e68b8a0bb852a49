"""Products of few rows for each expert whose k is short: against plain torch, and the way of tiles."""

from __future__ import annotations

import pytest
import torch

from eyas.engine.kernels import grouped_sweep
from eyas.engine.kernels.grouped_tiles import Tile
from tests.unit.test_kernels_grouped import DEVICE, close, meant, random, rounded
from tests.unit.test_kernels_grouped_wide import KINDS, experts_of, layers, run, with_tile

FEW = [Tile(16, 64, 128, 4, 3), Tile(32, 128, 128, 4, 2, group=2), Tile(16, 64, 64, 4, 4, group=1)]
ROWS = 21


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The k of every product that was swept."""
    seen: list[int] = []

    def start(task, launch, start=grouped_sweep.start):
        seen.append(task.shape.k)
        start(task, launch)

    monkeypatch.setattr(grouped_sweep, "start", start)
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", FEW, ids=str)
@pytest.mark.parametrize("width", [64, 128, 256], ids=str)
def test_each_row_meets_its_own_expert(width: int, tile: Tile, kind: str, swept: list[int]) -> None:
    """k has one step or two; a block of rows that is not full, and columns that no tile ends with."""
    hidden = 1920 if width == 128 else 256  # 15 and 30 tiles: two sweeps, and three
    experts, (gate_up, down) = experts_of(ROWS), layers(kind, hidden, width)
    shared = with_tile(tile, (gate_up, down), experts.numel())
    order, inner = shared.group(experts, (gate_up, down)), random(experts.numel(), width)
    found = shared.down(inner[order.order.cpu().long()].to(DEVICE), down, order)
    assert swept == [width] * (width <= (256 if kind != "float32" else 2 * tile.depth))
    read, whole, whose = rounded(inner, down), meant(down), experts.flatten().tolist()
    expected = torch.stack([row @ whole[e].t() for row, e in zip(read, whose, strict=True)])
    close(found, expected, kind)
    with pytest.raises(AssertionError):  # a choice that goes to its neighbour's expert
        close(found, expected.roll(1, 0), kind)


@pytest.mark.parametrize("kind", ["blocks", "token"])
def test_sweeping_changes_no_bit_of_few_rows(
    kind: str, swept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, experts, weights = random(ROWS, 256), experts_of(ROWS), layers(kind, 256, 256)
    shared = with_tile(FEW[0], weights, experts.numel())
    found = run(shared, x, experts, weights)[1]
    monkeypatch.setattr(grouped_sweep, "takes", lambda task: False)
    assert torch.equal(found, run(shared, x, experts, weights)[1]) and swept == [256]
