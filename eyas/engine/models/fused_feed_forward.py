"""A layer's feed-forward on a GPU: dense, dense in FP8, or of experts (`fused_experts`).

One object of few calls, so that a layer does not ask which kind it has. It knows rows that are normalised and
the residual; it refuses to know attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from eyas.engine.checkpoint.config import FeedForwardSpec, ModelConfig
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.formats.projection import Projection, ProjectionLoader
from eyas.engine.formats.table import loader_of
from eyas.engine.kernels import exact_wide, skinny
from eyas.engine.kernels import rows as row_kernels
from eyas.engine.kernels.blocks import Normed
from eyas.engine.kernels.grouped_task import Gate
from eyas.engine.layers.mlp import down_name, gate_up_names
from eyas.engine.models.fused_residual import (
    NarrowRows,
    ScaledRows,
    add_made,
    add_product,
    normed_rows,
    source_of,
)
from eyas.engine.models.fused_step import Forward


class FeedForward(Protocol):
    """`norm`: of its rows; without a gain where its weights have that in them."""

    norm: row_kernels.Norm

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Its weights."""

    def narrow(self, residual: NarrowRows, step: Forward) -> NarrowRows:
        """At most 128 rows, with what it makes of their norm added to them."""

    def wide(self, normed: Normed, step: Forward) -> torch.Tensor:
        """-> what is added to the residual, [m, hidden], but for the sum over the ranks."""

    def exact_wide(self, residual: ScaledRows, step: Forward) -> ScaledRows:
        """Any rows, with what it makes of their norm added to them, by the bits of `narrow`."""


class DenseFeedForward:
    """down(activation(gate) * up), with everything small fused into the products of narrow steps.

    `post`: the gain of the norm behind it, if there is one. The norm's own gain is folded into the weights.
    """

    def __init__(
        self,
        eps: float,
        spec: FeedForwardSpec,
        weights: tuple[Projection, Projection],
        post: torch.Tensor | None,
    ) -> None:
        self.norm, self._eps, self._post = row_kernels.Norm(eps), eps, post
        self._gelu = spec.activation == "gelu_tanh"
        self.projections = self._gate_up, self._down = weights

    def narrow(self, residual: NarrowRows, step: Forward) -> NarrowRows:
        assert (matrix := self._gate_up.matrix) is not None
        inner = skinny.empty_padded(residual.x.shape[0], self._down.shape[1], like=residual.x)
        skinny.gated(source_of(residual, self._eps), matrix, inner, step.context.launch, self._gelu)
        return add_product(inner, self._down, residual, self._post, self._eps, step)

    def wide(self, normed: Normed, step: Forward) -> torch.Tensor:
        made = step.product(normed, self._gate_up)
        return step.product(row_kernels.act_mul(made, self._gelu, step.context.launch.pdl), self._down)

    def exact_wide(self, residual: ScaledRows, step: Forward) -> ScaledRows:
        launch = step.context.launch
        raw = step.exact_product(residual.x, self._gate_up, "gated")
        inner = exact_wide.act_mul(raw, residual.scales, self._gelu, launch.pdl)
        return residual.plus(step.exact_shares(inner, self._down), self._post, self._eps, step)


class GatedRows:
    """down(activation(gate) * up) of rows that have passed norm and gain: in FP8, or beside experts.

    `post`: the gain of the norm behind it, if there is one.
    """

    def __init__(
        self,
        eps: float,
        spec: FeedForwardSpec,
        weights: tuple[Projection, Projection],
        gain: torch.Tensor | None = None,
        post: torch.Tensor | None = None,
    ) -> None:
        self.projections = self._gate_up, self._down = weights
        self.norm = row_kernels.Norm(eps, gain, self._gate_up.rounding)
        self._post = post
        self._gate = Gate(spec.activation == "gelu_tanh", self._down.rounding)

    def narrow(self, residual: NarrowRows, step: Forward) -> NarrowRows:
        normed = normed_rows(residual.x, self.norm, step)
        return add_made(self.wide(normed, step), residual, self._post, self.norm.eps, step)

    def wide(self, normed: Normed, step: Forward) -> torch.Tensor:
        read = normed.read_by(self._gate_up.rounding)
        return step.product(self._gate_up.gated(read, step.context.products, self._gate), self._down)

    def exact_wide(self, residual: ScaledRows, step: Forward) -> ScaledRows:
        normed = normed_rows(residual.x, self.norm, step)
        return residual.plus(self.wide(normed, step), self._post, self.norm.eps, step)


def dense(
    config: ModelConfig,
    spec: FeedForwardSpec,
    weights: Weights,
    prefix: str,
    gain: torch.Tensor,
    post: torch.Tensor | None = None,
) -> DenseFeedForward | GatedRows:
    """The dense feed-forward whose tensors are below `prefix`."""
    gate_up, down = GatedLoaders.of(weights, [prefix]).pair(prefix, (config.hidden_size, spec.width))
    if gate_up.matrix is not None and down.matrix is not None:
        gate_up.folded(gain)
        return DenseFeedForward(config.norm_eps, spec, (gate_up, down), post)
    return GatedRows(config.norm_eps, spec, (gate_up, down), gain, post)


@dataclass(frozen=True)
class GatedLoaders:
    """What loads gate and up, and what loads down, of all feed-forwards that read the same rows."""

    gate_up: ProjectionLoader
    down: ProjectionLoader

    @classmethod
    def of(cls, weights: Weights, prefixes: list[str]) -> GatedLoaders:
        """Of all feed-forwards below these prefixes alike."""
        gate_up = [name for prefix in prefixes for name in gate_up_names(prefix)]
        return cls(loader_of(weights, gate_up), loader_of(weights, [down_name(each) for each in prefixes]))

    def pair(self, prefix: str, down: tuple[int, int]) -> tuple[Projection, Projection]:
        """This rank's gate and up, stacked; and down, whose whole shape is `down` [hidden, width]."""
        hidden, width = down
        gate_up = self.gate_up.rows(gate_up_names(prefix), [width, width], hidden)
        return gate_up, self.down.columns(down_name(prefix), down)
