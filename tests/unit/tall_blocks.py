"""Layers of experts computed by tall blocks."""

from __future__ import annotations

import torch

from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation, shape_of
from eyas.engine.kernels.experts.grouped_tiles import (
    GroupedTile,
    key_of,
)
from eyas.engine.kernels.products.blocks import StoredWeight
from eyas.engine.kernels.products.skinny import ProductLaunch
from tests.unit.grouped_products import DEVICE, PDL, in_kind, random

EXPERTS, PER_ROW, ROWS = 4, 2, 70
KINDS = ["float32", "blocks", "powers", "token", "tensor"]


def experts_of(rows: int) -> torch.Tensor:
    """Expert 0 has all rows but some, expert 1 the fewest, expert 2 none."""
    chosen = torch.tensor([[0, 3]]).repeat(rows, 1)
    chosen[::9] = torch.tensor([1, 0])
    chosen[5::31] = torch.tensor([3, 1])
    return chosen.int().to(DEVICE)


def layers(kind: str, hidden: int, width: int) -> tuple[StoredWeight, StoredWeight]:
    gate_up = random(EXPERTS, 2 * width, hidden, seed=1) / hidden**0.5
    down = random(EXPERTS, hidden, width, seed=2) / width**0.5
    return in_kind(gate_up, kind), in_kind(down, kind)


def with_tile(tile: GroupedTile, weights: tuple[StoredWeight, StoredWeight], choices: int) -> GroupedProducts:
    shapes = shape_of(weights[0], GateActivation()), shape_of(weights[1], None)
    return GroupedProducts(
        ProductLaunch.on(DEVICE, pdl=PDL), {key_of(shape, choices): tile for shape in shapes}
    )


def run(
    shared: GroupedProducts,
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: tuple[StoredWeight, StoredWeight],
) -> list[torch.Tensor]:
    order = shared.group(experts, weights)
    inner = shared.gate_up(x.to(DEVICE), weights[0], order, PER_ROW, GateActivation())
    assert isinstance(inner, torch.Tensor)
    by_choice = torch.empty_like(inner)
    by_choice[order.order.long()] = inner
    return [by_choice, shared.down(inner, weights[1], order)]
