"""The gated feed-forward block of one expert: SwiGLU, GeGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.engine.checkpoint.config import FeedForwardSpec
from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.layers.activations import ACTIVATIONS
from eyas.engine.layers.linear import Linear, in_blocks


@dataclass(frozen=True)
class GatedRoundings:
    """How the rows of gate and up are rounded, and those of down."""

    gate_up: RowRounding | None
    down: RowRounding | None

    @classmethod
    def of(cls, weights: WeightSource, prefixes: list[str]) -> GatedRoundings:
        """Of all feed-forwards below these prefixes alike: experts read the same rows."""
        gate_up = [name for prefix in prefixes for name in gate_up_names(prefix)]
        return cls(weights.rounding(gate_up), weights.rounding([down_name(prefix) for prefix in prefixes]))


def gate_up_names(prefix: str) -> list[str]:
    """The tensors of gate and up."""
    return [f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"]


def down_name(prefix: str) -> str:
    """The tensor of down."""
    return f"{prefix}.down_proj.weight"


class GatedMlp:
    """down(activation(gate(x)) * up(x)), gate and up fused into one product. `roundings`: if not its own."""

    def __init__(
        self,
        spec: FeedForwardSpec,
        weights: WeightSource,
        prefix: str,
        hidden: int,
        roundings: GatedRoundings | None = None,
    ) -> None:
        rounding, inner = roundings or GatedRoundings.of(weights, [prefix]), spec.width
        gate_up = weights.stack(gate_up_names(prefix), [inner, inner], hidden)
        self._bias = self._down_bias = None
        if spec.bias:
            names = [f"{prefix}.{part}_proj.bias" for part in ("gate", "up")]
            self._bias = torch.cat([weights.take(name, (inner,)) for name in names])
            self._down_bias = weights.take(f"{prefix}.down_proj.bias", (hidden,))
        self._gate_up = Linear(gate_up, rounding.gate_up)
        self._down = Linear(weights.take(down_name(prefix), (hidden, inner)), rounding.down)
        self._activation = ACTIVATIONS[spec.activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, hidden] -> [R, hidden]."""
        # Block by block all the way: the wide intermediate rows stay in the cache.
        return in_blocks(self._block, x)

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._activation(*self._gate_up(x, self._bias).chunk(2, dim=-1)), self._down_bias)
