"""What several kinds of draft heads have in common on a GPU: a product of a feature's width, and layers."""

from __future__ import annotations

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
        run = self._narrow if step.rows.count <= self._narrow_rows else self._wide
        return run(given, x, pool, step)

    def keep(self, given: torch.Tensor, x: torch.Tensor, pool: KvPool, step: Forward) -> None:
        """The same, as far as it writes the rows' KV: nothing of the last layer reads it."""
        keep = self._keep_narrow if step.rows.count <= self._narrow_rows else self._keep_wide
        keep(given, x, pool, step)

    def _narrow(self, given: torch.Tensor, x: torch.Tensor, pool: KvPool, step: Forward) -> torch.Tensor:
        first, *others = self._layers
        residual = first.narrow(skinny.Source(given), NarrowRows(x), pool.layer(0), step)
        for i, layer in enumerate(others, 1):
            residual = layer.narrow(layer.source(residual), residual, pool.layer(i), step)
        return residual.x

    def _keep_narrow(self, given: torch.Tensor, x: torch.Tensor, pool: KvPool, step: Forward) -> None:
        source, residual, last = skinny.Source(given), NarrowRows(x), len(self._layers) - 1
        for i, layer in enumerate(self._layers[:last]):
            residual = layer.narrow(source, residual, pool.layer(i), step)
            source = self._layers[i + 1].source(residual)
        self._layers[last].keep_narrow(source, pool.layer(last), step)

    def _wide(self, given: torch.Tensor, x: torch.Tensor, pool: KvPool, step: Forward) -> torch.Tensor:
        pdl, (first, *others) = step.context.launch.pdl, self._layers
        residual = first.wide(Normed(given), x.clone(), pool.layer(0), step)
        for i, layer in enumerate(others, 1):
            normed = layer.settle(residual, pdl)
            residual = layer.wide(normed, residual.x, pool.layer(i), step)
        return residual.settled(self._eps, pdl)

    def _keep_wide(self, given: torch.Tensor, x: torch.Tensor, pool: KvPool, step: Forward) -> None:
        normed, last = Normed(given), len(self._layers) - 1
        x = x.clone() if last else x
        for i, layer in enumerate(self._layers[:last]):
            residual = layer.wide(normed, x, pool.layer(i), step)
            normed, x = self._layers[i + 1].settle(residual, step.context.launch.pdl), residual.x
        self._layers[last].keep_wide(normed, pool.layer(last), step)
