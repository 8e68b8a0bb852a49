"""A GPU, or a rank's share of one model on several."""

from __future__ import annotations

import torch

from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import Projection, ProjectionLoader
from eyas.engine.formats.table import loader_of
from eyas.engine.kernels.products.skinny_tiles import ProductTile, Table
from eyas.engine.models.ops.machine import Machine

SIDE = 16
"""Rows of a router are filled up to a multiple of it, as products need."""


class DeviceMachine(Machine[Projection]):
    """Weights in any format that there is. A router's are of the model's type, its sums float32."""

    groups_experts = True

    def loader(self, weights: WeightSource, names: list[str]) -> ProjectionLoader[Projection]:
        return loader_of(weights, names)

    def router(self, weights: WeightSource, name: str, shape: tuple[int, int]) -> tuple[torch.Tensor, Table]:
        stored = weights.take(name, shape)
        rows = torch.cat([stored, stored.new_zeros(-shape[0] % SIDE, shape[1])])
        return rows, router_tiles(*rows.shape)

    def own_experts(self, weights: WeightSource, experts: int) -> range:
        return weights.placement.own_experts(experts)


def router_tiles(rows: int, hidden: int) -> Table:
    """For `skinny.ProductLaunch`. A router has few rows: its programs take few of them, and share k."""
    split = next(split for split in (8, 4, 2, 1) if hidden % (split * SIDE) == 0)
    tile = ProductTile(columns=SIDE, depth=128, warps=4, stages=6, split=split)
    return {("linear", padded, rows, hidden): tile for padded in (16, 32, 64, 128)}
