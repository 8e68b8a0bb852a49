"""A dense feed-forward: how its tensors are loaded, and its equation over the verbs of `ops`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Self

import torch

from eyas.engine.checkpoint.config import FeedForwardSpec
from eyas.engine.formats.projection import AnyProjection, ProjectionLoader, ProjectionT
from eyas.engine.kernels.experts.grouped_task import GateActivation
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.layers.activations import ACTIVATIONS
from eyas.engine.models.blocks import Blocks, Gains
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.parts import GatedPart, OutPart

GATES = {"silu": False, "gelu_tanh": True}
"""The activations that kernels know, and whether that is GELU."""


def gate_of(spec: FeedForwardSpec, down: AnyProjection) -> GateActivation | None:
    """What kernels know of an activation that `down` reads; None: they do not know it, or there is a bias."""
    if spec.bias or spec.activation not in GATES:
        return None
    return GateActivation(GATES[spec.activation], down.rounding)


class GatedFeedForward(Generic[ProjectionT]):
    """down(activation(gate) * up) of the norm of rows, below `prefix`, between norms of these `gains`.

    A gain goes into the weights where both products are of numbers themselves.
    """

    def __init__(self, blocks: Blocks[ProjectionT], spec: FeedForwardSpec, prefix: str, gains: Gains) -> None:
        config, weights, (gain, post) = blocks.config, blocks.weights, gains
        loaders = GatedLoaders.of(blocks.loader, [prefix])
        gate_up, down = loaders.pair(prefix, (config.hidden_size, spec.width))
        self.projections = gate_up, down
        fused = gate_up.matrix is not None and down.matrix is not None
        self.norm = None
        if gain is not None:
            left = gate_up.folded(gain) if fused else gain
            self.norm = row_kernels.NormInput(config.norm_eps, left, gate_up.rounding)
        bias = down_bias = None
        if spec.bias:
            names = [f"{prefix}.{part}_proj.bias" for part in ("gate", "up")]
            bias = torch.cat([weights.take_rows(name, (spec.width,)) for name in names])
            if weights.placement.rank == 0:  # once in the sum over the ranks
                down_bias = weights.take(f"{prefix}.down_proj.bias", (config.hidden_size,))
        self._gated = GatedPart(gate_up, ACTIVATIONS[spec.activation], gate_of(spec, down), fused, bias)
        self._down = OutPart(down, down_bias, post)

    def __call__(self, residual: Any, ops: Ops[Any, Any, Any]) -> Any:
        """The residual with what it makes of it added."""
        read, residual = ops.norm(residual, self.norm)
        return ops.add(residual, ops.gated(read, self._gated), self._down)


@dataclass(frozen=True)
class GatedLoaders(Generic[ProjectionT]):
    """What loads gate and up, and what loads down, of all feed-forwards that read the same rows."""

    gate_up: ProjectionLoader[ProjectionT]
    down: ProjectionLoader[ProjectionT]

    @classmethod
    def of(cls, loader: Callable[[list[str]], ProjectionLoader[ProjectionT]], prefixes: list[str]) -> Self:
        """Of all feed-forwards below these prefixes alike; `loader`: of products that read the same rows."""
        gate_up = [name for prefix in prefixes for name in _gate_up(prefix)]
        return cls(loader(gate_up), loader([_down(each) for each in prefixes]))

    def pair(self, prefix: str, down: tuple[int, int]) -> tuple[ProjectionT, ProjectionT]:
        """This rank's gate and up, stacked; and down, whose whole shape is `down` [hidden, width]."""
        hidden, width = down
        gate_up = self.gate_up.rows(_gate_up(prefix), [width, width], hidden)
        return gate_up, self.down.columns(_down(prefix), down)


def _gate_up(prefix: str) -> list[str]:
    """The tensors of gate and up."""
    return [f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"]


def _down(prefix: str) -> str:
    """The tensor of down."""
    return f"{prefix}.down_proj.weight"
