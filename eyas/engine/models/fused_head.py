"""What several kinds of draft heads have in common on a GPU: a product of a feature's width, and layers."""

from __future__ import annotations

from itertools import pairwise

import torch

from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.kernels import skinny
from eyas.engine.kernels.blocks import Normed
from eyas.engine.kv.pool import KvPool
from eyas.engine.models.fused_layer import FusedLayer, load_input_gain
from eyas.engine.models.fused_residual import NarrowRows
from eyas.engine.models.fused_step import Forward


def product(
    x: torch.Tensor, weight: torch.Tensor, launch: skinny.Launch, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [m, k], weight [n, k], bias [n] -> x . weight^T + bias, [m, n]."""
    if x.shape[0] > skinny.MAX_ROWS:
        return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    out = skinny.empty_padded(x.shape[0], weight.shape[0], like=x)
    if bias is None:
        skinny.linear(skinny.Source(x), weight, out, launch)
    else:
        skinny.linear(skinny.Source(x), weight, out, launch, residual=out.copy_(bias))
    return out


class HeadLayers:
    """A head's layers, `layers.0` and on. The first reads rows that are given, the others the residual.

    `gain`: of the norm that the given rows have passed without one; None: there was none.
    """

    def __init__(self, config: ModelConfig, weights: Weights, gain: torch.Tensor | None) -> None:
        first, *others = config.layers
        self._layers = [FusedLayer(config, first, weights, "layers.0", gain)]
        for i, spec in enumerate(others, 1):
            own = load_input_gain(config, weights, spec, f"layers.{i}")
            self._layers.append(FusedLayer(config, spec, weights, f"layers.{i}", own))
        self._narrow_rows = min(layer.narrow_rows for layer in self._layers)
        self._eps = config.norm_eps

    def __call__(self, given: torch.Tensor, x: torch.Tensor, pool: KvPool, step: Forward) -> torch.Tensor:
        """given [m, width], the residual x [m, hidden], which is kept -> the residual after all layers."""
        last, own = self._layers[-1], pool.layer(len(self._layers) - 1)
        if step.rows.count <= self._narrow_rows:
            source, residual = self._above_narrow(given, x, pool, step)
            return last.narrow(source, residual, own, step).x
        normed, x = self._above_wide(given, x, pool, step)
        return last.wide(normed, x, own, step).settled(self._eps, step.context.launch.pdl)

    def keep(self, given: torch.Tensor, x: torch.Tensor, pool: KvPool, step: Forward) -> None:
        """The same, as far as it writes the rows' KV: nothing of the last layer reads it."""
        last, own = self._layers[-1], pool.layer(len(self._layers) - 1)
        if step.rows.count <= self._narrow_rows:
            last.keep_narrow(self._above_narrow(given, x, pool, step)[0], own, step)
        else:
            last.keep_wide(self._above_wide(given, x, pool, step)[0], own, step)

    def _above_narrow(
        self, given: torch.Tensor, x: torch.Tensor, pool: KvPool, step: Forward
    ) -> tuple[skinny.Source, NarrowRows]:
        """What the last layer's attention reads, and the residual, after all layers before it."""
        source, residual = skinny.Source(given), NarrowRows(x)
        for i, (layer, after) in enumerate(pairwise(self._layers)):
            residual = layer.narrow(source, residual, pool.layer(i), step)
            source = after.source(residual)
        return source, residual

    def _above_wide(
        self, given: torch.Tensor, x: torch.Tensor, pool: KvPool, step: Forward
    ) -> tuple[Normed, torch.Tensor]:
        """The same."""
        normed, x = Normed(given), x.clone()
        for i, (layer, after) in enumerate(pairwise(self._layers)):
            residual = layer.wide(normed, x, pool.layer(i), step)
            normed, x = after.settle(residual, step.context.launch.pdl), residual.x
        return normed, x
