"""Products of few rows for each expert whose k is short: against plain torch, and the way of tiles."""

from __future__ import annotations

import pytest
import torch

from eyas.engine.kernels.experts import grouped_sweep
from eyas.engine.kernels.experts.grouped_task import GroupedTask
from eyas.engine.kernels.experts.grouped_tiles import GroupedTile
from tests.unit.crossed import crossed
from tests.unit.grouped_products import DEVICE, close, meant, random, rounded
from tests.unit.tall_blocks import KINDS, experts_of, layers, run, with_tile

FEW = [
    GroupedTile(16, 64, 128, 4, 3),
    GroupedTile(32, 128, 128, 4, 2, group=2),
    GroupedTile(16, 64, 64, 4, 4, group=1),
]
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


@pytest.mark.parametrize(
    ("width", "tile", "kind"),
    crossed(
        [64, 128, 192, 256],
        FEW,
        KINDS,
        quick=lambda width, tile, kind: (
            tile is FEW[0] and (kind, width) in (("blocks", 128), ("float32", 192), ("token", 192))
        ),
    ),
)
def test_each_row_meets_its_own_expert(
    width: int, tile: GroupedTile, kind: str, swept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """k has one step or two, and may end within one; blocks of rows are not full, the last tile is cut."""
    hidden = 1904 if width == 128 else 272  # of 15 or 30 tiles, so that sweeps are two and three; of 3 or 5
    experts, (gate_up, down) = experts_of(ROWS), layers(kind, hidden, width)
    shared = with_tile(tile, (gate_up, down), experts.numel())
    order, inner = shared.group(experts, (gate_up, down)), random(experts.numel(), width)
    room = torch.full((experts.numel() + 1, hidden), 7.0, device=DEVICE)
    monkeypatch.setattr(GroupedTask, "out", room[:-1])
    found = shared.down(inner[order.order.cpu().long()].to(DEVICE), down, order)
    assert found.data_ptr() == room.data_ptr() and (room[-1] == 7.0).all(), "written behind the last row"
    assert swept == [width] * (width <= (256 if kind != "float32" else 2 * tile.depth))
    read, whole, whose = rounded(inner, down), meant(down), experts.flatten().tolist()
    expected = torch.stack([row @ whole[e].t() for row, e in zip(read, whose, strict=True)])
    close(found, expected, kind)
    with pytest.raises(AssertionError):  # a choice that goes to its neighbour's expert
        close(found, expected.roll(1, 0), kind)


@pytest.mark.parametrize("kind", ["blocks", pytest.param("token", marks=pytest.mark.slow)])
def test_sweeping_changes_no_bit_of_few_rows(
    kind: str, swept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, experts, weights = random(ROWS, 256), experts_of(ROWS), layers(kind, 256, 256)
    shared = with_tile(FEW[0], weights, experts.numel())
    found = run(shared, x, experts, weights)[1]
    monkeypatch.setattr(grouped_sweep, "takes", lambda task: False)
    assert torch.equal(found, run(shared, x, experts, weights)[1]) and swept == [256]
