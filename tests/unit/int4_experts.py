"""Experts in whole numbers of four bits, and their products."""

from __future__ import annotations

import torch

from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation, shape_of
from eyas.engine.kernels.experts.grouped_tiles import GroupedTile, key_of
from eyas.engine.kernels.products.int4 import Int4Weight
from eyas.engine.kernels.products.skinny import ProductLaunch
from tests.unit.grouped_products import DEVICE, PDL, act
from tests.unit.packed_experts import DTYPE, PER_ROW

N = 96


def computed(x: torch.Tensor, experts: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
    """Of the rows as the kernels read them: where gate and up are near zero, their rounding would be most of
    the result's error.
    """
    whose = experts.cpu().flatten().tolist()
    each = torch.stack([row for row in x.to(DTYPE).double() for _ in range(PER_ROW)])
    made = torch.stack([weight[e] @ row for e, row in zip(whose, each, strict=True)])
    return act(made) if gated else made


def run(x: torch.Tensor, experts: torch.Tensor, weight: Int4Weight, gated: bool, split: int) -> torch.Tensor:
    """By choice."""
    gate = GateActivation()
    tile = GroupedTile(16, 64, 128, 4, 3, split=split)
    table = {key_of(shape_of(weight, each), experts.numel()): tile for each in (gate, None)}
    shared = GroupedProducts(ProductLaunch.on(DEVICE, pdl=PDL), table)
    order, read = shared.group(experts, (weight, weight)), x.to(DEVICE, DTYPE)
    if not gated:
        return shared.each(read, weight, order, PER_ROW)
    inner = shared.gate_up(read, weight, order, PER_ROW, gate)
    assert isinstance(inner, torch.Tensor)
    by_choice = torch.empty_like(inner)
    by_choice[order.order.long()] = inner
    return by_choice
