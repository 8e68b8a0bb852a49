"""What several kinds of draft heads have in common on a GPU: a product of a feature's width, and layers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.kernels.products import skinny
from eyas.engine.kv.pool import KvPool
from eyas.engine.models.blocks import Blocks
from eyas.engine.models.fused_step import Forward
from eyas.engine.models.layer import head_layers
from eyas.engine.models.ops.device import DeviceOps
from eyas.engine.models.ops.device_machine import DeviceMachine
from eyas.engine.models.ops.few_rows import FewRows, most_rows
from eyas.engine.models.ops.many_rows import ManyRows


def product(
    x: torch.Tensor, weight: torch.Tensor, launch: skinny.ProductLaunch, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [m, k], weight [n, k], bias [n] -> x . weight^T + bias, [m, n]."""
    if x.shape[0] > skinny.MAX_ROWS:
        return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    out = skinny.empty_padded(x.shape[0], weight.shape[0], like=x)
    if bias is None:
        skinny.linear(skinny.SkinnyInput(x), weight, out, launch)
    else:
        skinny.linear(skinny.SkinnyInput(x), weight, out, launch, residual=out.copy_(bias))
    return out


class HeadLayers:
    """A head's layers, `layers.0` and on. The first reads rows that are given, the others the residual.

    `gain`: of the norm that the given rows have passed without one; None: there was none.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, gain: torch.Tensor | None) -> None:
        self._layers = head_layers(Blocks(config, weights, DeviceMachine()), gain)
        self._few_rows = most_rows(self._layers)
        self._eps = config.norm_eps

    def __call__(self, given: torch.Tensor, x: torch.Tensor, pool: KvPool, step: Forward) -> torch.Tensor:
        """given [m, width], the residual x [m, hidden], which is kept -> the residual after all layers."""
        last, own = self._layers[-1], len(self._layers) - 1
        ops = ops_of(step, pool, self._few_rows, self._eps)
        return ops.leave(last(*self._above(given, x, ops), own, ops))

    def keep(self, given: torch.Tensor, x: torch.Tensor, pool: KvPool, step: Forward) -> None:
        """The same, as far as it writes the rows' KV: nothing of the last layer reads it."""
        last, own = self._layers[-1], len(self._layers) - 1
        ops = ops_of(step, pool, self._few_rows, self._eps)
        last.keep(self._above(given, x, ops)[0], own, ops)

    def _above(self, given: torch.Tensor, x: torch.Tensor, ops: DeviceOps[Any, Any]) -> tuple[Any, Any]:
        """What the last layer's attention reads, and the residual, after all layers before it."""
        read, residual = ops.given(given), ops.residual(x)
        for i, (layer, after) in enumerate(pairwise(self._layers)):
            residual = layer(read, residual, i, ops)
            read, residual = ops.norm(residual, after.norm)
        return read, residual


def ops_of(step: Forward, pool: KvPool, few_rows: int, eps: float) -> DeviceOps[Any, Any]:
    """The verbs of a head's layers, which are never exact."""
    return (FewRows if step.rows.count <= few_rows else ManyRows)(step, pool, eps)
