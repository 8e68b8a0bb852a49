"""Experts beside a feed-forward, each between norms of its own: Gemma 4's. How their tensors are loaded, and
their equation over the verbs of `ops`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Generic

import torch

from eyas.engine.checkpoint.config import ApartSpec, ExpertsSpec, FeedForwardSpec, LayerSpec
from eyas.engine.formats.projection import AnyProjection, ProjectionT
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.layers.norm import load_gain
from eyas.engine.models.feed_forward import Gains, GatedFeedForward, Mixture
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.machine import Blocks
from eyas.engine.models.ops.parts import ExpertsPart


class ExpertsApart(Generic[ProjectionT]):
    """The norm of a feed-forward plus the norm of what experts make, for the layer below `prefix`.

    `gains`: of the norms before the feed-forward, and behind the sum.

    Experts and their router read the residual by norms of their own. A row's weights are multiplied by a
    number of each expert.
    """

    def __init__(self, blocks: Blocks[ProjectionT], layer: LayerSpec, prefix: str, gains: Gains) -> None:
        spec, config, weights = layer.feed_forward, blocks.config, blocks.weights
        assert isinstance(spec, ApartSpec)
        before, self._post = gains
        dense = replace(layer, feed_forward=FeedForwardSpec(spec.shared_width, spec.activation))
        mixed = replace(layer, feed_forward=_alone(spec))

        def gain(name: str) -> torch.Tensor:
            return load_gain(config, weights, f"{prefix}.{name}.weight", config.hidden_size)

        behind = [gain(f"post_feedforward_layernorm_{number}") for number in (1, 2)]
        self._dense = GatedFeedForward(blocks, dense, f"{prefix}.mlp", (before, behind[0]))
        inside = gain("pre_feedforward_layernorm_2"), behind[1]
        self._mixture = Mixture(blocks, mixed, f"{prefix}.mlp", inside)
        scale = weights.take(f"{prefix}.mlp.gate.scale", (config.hidden_size,))
        self._judged = row_kernels.NormInput(config.norm_eps, scale * config.hidden_size**-0.5, None)
        each = weights.take(f"{prefix}.mlp.gate.per_expert_scale", (spec.experts,), torch.float32)
        self._router = replace(self._mixture.router, factors=each)

    @property
    def projections(self) -> tuple[AnyProjection, ...]:
        """Its weights."""
        return (*self._dense.projections, *self._mixture.projections)

    @property
    def part(self) -> ExpertsPart[ProjectionT]:
        """The experts' part."""
        return self._mixture.part

    def inner(self, residual: Any, ops: Ops[Any, Any, Any]) -> tuple[Any, Any]:
        """The input of the feed-forward's last product, and which experts read what; the residual."""
        dense, residual = self._dense.inner(residual, ops)
        read, residual = ops.norm(residual, self._mixture.norm)
        judged, residual = ops.norm(residual, self._judged)
        rows = ops.normed(read)
        return (dense, rows, ops.route(rows, self._router, ops.normed(judged))), residual

    def add(self, residual: Any, inner: Any, ops: Ops[Any, Any, Any]) -> Any:
        """The residual with the norm of both sums added."""
        dense, rows, routed = inner
        blank = torch.zeros_like(ops.leave(residual))
        both = self._dense.add(ops.residual(blank), dense, ops)
        return ops.grown(residual, ops.mix(both, rows, routed, self.part), self._post)


def _alone(spec: ApartSpec) -> ExpertsSpec:
    """The experts without the feed-forward beside them."""
    return ExpertsSpec(
        width=spec.width,
        activation=spec.activation,
        experts=spec.experts,
        per_row=spec.per_row,
        scores=spec.scores,
        normalised=spec.normalised,
    )
