"""A layer's feed-forward on a GPU: dense, dense in FP8, or of experts (`fused_experts`).

One object of few calls, so that a layer does not ask which kind it has. It knows rows that are normalised and
the residual; it refuses to know attention.
"""

from __future__ import annotations

from typing import Protocol

import torch

from eyas.engine.checkpoint.config import FeedForwardSpec, ModelConfig
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.kernels import exact_wide, skinny
from eyas.engine.kernels import rows as row_kernels
from eyas.engine.kernels.blocks import Fp8Weight, Normed, rounding_of
from eyas.engine.kernels.grouped_task import Gate, Weight
from eyas.engine.layers.mlp import GatedRoundings, down_name, gate_up_names
from eyas.engine.models.fused_residual import (
    NarrowRows,
    ScaledRows,
    add_made,
    add_product,
    normed_rows,
    source_of,
)
from eyas.engine.models.fused_step import Forward, product
from eyas.engine.models.fused_weights import columns_of, stacked


class FeedForward(Protocol):
    """`norm`: of its rows; without a gain where its weights have that in them."""

    norm: row_kernels.Norm

    @property
    def in_fp8(self) -> tuple[bool, ...]:
        """Which of its weights are."""

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

    in_fp8: tuple[bool, ...] = (False, False)

    def __init__(
        self,
        eps: float,
        spec: FeedForwardSpec,
        weights: tuple[torch.Tensor, torch.Tensor],
        post: torch.Tensor | None,
    ) -> None:
        self.norm, self._eps, self._post = row_kernels.Norm(eps), eps, post
        self._gelu = spec.activation == "gelu_tanh"
        self._gate_up, self.down = weights

    def narrow(self, residual: NarrowRows, step: Forward) -> NarrowRows:
        inner = skinny.empty_padded(residual.x.shape[0], self.down.shape[1], like=residual.x)
        skinny.gated(source_of(residual, self._eps), self._gate_up, inner, step.context.launch, self._gelu)
        return add_product(inner, self.down, residual, self._post, self._eps, step)

    def wide(self, normed: Normed, step: Forward) -> torch.Tensor:
        inner = row_kernels.act_mul(product(normed.plain, self._gate_up), self._gelu, step.context.launch.pdl)
        return product(inner, self.down)

    def exact_wide(self, residual: ScaledRows, step: Forward) -> ScaledRows:
        launch = step.context.launch
        raw = exact_wide.product(residual.x, self._gate_up, launch, "gated")
        inner = exact_wide.act_mul(raw, residual.scales, self._gelu, launch.pdl)
        return residual.plus(exact_wide.shares(inner, self.down, launch), self._post, self._eps, step)


class GatedRows:
    """down(activation(gate) * up) of rows that have passed norm and gain: in FP8, or beside experts.

    `post`: the gain of the norm behind it, if there is one.
    """

    def __init__(
        self,
        eps: float,
        spec: FeedForwardSpec,
        weights: tuple[Weight, Weight],
        gain: torch.Tensor | None = None,
        post: torch.Tensor | None = None,
    ) -> None:
        self._gate_up, self._down = weights
        self.norm = row_kernels.Norm(eps, gain, rounding_of(self._gate_up))
        self._post = post
        self._gate = Gate(spec.activation == "gelu_tanh", rounding_of(self._down))

    @property
    def in_fp8(self) -> tuple[bool, ...]:
        """Which of its weights are."""
        return isinstance(self._gate_up, Fp8Weight), isinstance(self._down, Fp8Weight)

    def narrow(self, residual: NarrowRows, step: Forward) -> NarrowRows:
        normed = normed_rows(residual.x, self.norm, step)
        return add_made(self.wide(normed, step), residual, self._post, self.norm.eps, step)

    def wide(self, normed: Normed, step: Forward) -> torch.Tensor:
        launch, few = step.context.launch, normed.plain.shape[0] <= skinny.MAX_ROWS
        if isinstance(self._gate_up, Fp8Weight) or few or launch.exact:
            read = normed.read_by(self._gate_up)
            inner = step.context.products.dense_gated(read, self._gate_up, self._gate)
        else:
            made = product(normed.plain, self._gate_up)
            inner = row_kernels.act_mul(made, self._gate.gelu, launch.pdl)
        return step.product(inner, self._down)

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
    roundings = GatedRoundings.of(weights, [prefix])
    gate_up, down = gated_weights(weights, prefix, (config.hidden_size, spec.width), roundings)
    if isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
        return DenseFeedForward(config.norm_eps, spec, (gate_up.mul_(gain), down), post)
    return GatedRows(config.norm_eps, spec, (gate_up, down), gain, post)


def gated_weights(
    weights: Weights, prefix: str, down: tuple[int, int], roundings: GatedRoundings
) -> tuple[Weight, Weight]:
    """This rank's gate and up, stacked; and down, whose whole shape is `down` [hidden, width]."""
    hidden, width = down
    gate_up = stacked(weights, gate_up_names(prefix), [width, width], hidden, roundings.gate_up)
    return gate_up, columns_of(weights, down_name(prefix), down, roundings.down)
