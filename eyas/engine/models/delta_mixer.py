"""The mixer of a layer with a state: how its tensors are loaded.

One product gives the inputs of the convolution (q and k of key heads, v of value heads), the gate of what
value heads read, and of each value head its step and, if it corrects, the share of its corrections. Ranks
divide key heads, each with its value heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Generic

import torch

from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import ProjectionT
from eyas.engine.layers.norm import Gain
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.machine import Blocks
from eyas.engine.models.ops.parts import DeltaPart
from eyas.engine.states.delta import DeltaRule
from eyas.engine.states.shape import DeltaShape, SpaceShape


class DeltaMixer(Generic[ProjectionT]):
    """A `Mixer`, whose tensors are those below `prefix`. `gain`: as of `DecoderLayer`."""

    def __init__(
        self, blocks: Blocks[ProjectionT], shape: DeltaShape, prefix: str, gain: Gain | None
    ) -> None:
        weights, heads = blocks.weights, shape.value_heads
        keys, values = shape.key_heads * shape.key_size, heads * shape.value_size
        counts = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
        parts = [*"qkvz", *("b" * shape.corrects), "a", *("a" * bool(shape.spare_rows))]
        names = [f"{prefix}.in_proj_{part}.weight" for part in parts]
        width = blocks.config.hidden_size if gain is None else gain.shape[0]
        projection = blocks.loader(names).rows(names, [counts[part] for part in parts], width)
        self.norm = None if gain is None else blocks.norm_before(gain, projection)

        def of_heads(name: str) -> torch.Tensor:
            return weights.take_rows(f"{prefix}.{name}", (shape.value_heads,), torch.float32)

        rate, step_bias = of_heads("A_log").exp().neg(), of_heads("dt_bias")
        gains = None
        if not isinstance(shape, SpaceShape) or shape.norm_groups:
            gains = weights.take(f"{prefix}.norm.weight", (shape.value_size if shape.corrects else values,))
        rule = DeltaRule(
            shape.of_rank(weights.placement.ranks), convolution(weights, shape, prefix, "weight")
        )
        if isinstance(shape, SpaceShape):
            bias = convolution(weights, shape, prefix, "bias") if shape.bias else None
            rule = replace(rule, bias=bias, skip=of_heads("D"))
        self._part = DeltaPart(projection, rule, rate, step_bias, gains)

    @property
    def projections(self) -> tuple[ProjectionT, ...]:
        """Its weights."""
        return (self._part.projection,)

    @property
    def rule(self) -> DeltaRule:
        """The rule of its states, of this rank's heads."""
        return self._part.rule

    def attend(self, read: Any, layer: int, ops: Ops[Any, Any, Any]) -> torch.Tensor:
        """-> what value heads read of their states, behind its norm and gate, [m, heads * size]."""
        return ops.delta(read, self._part, layer)

    def keep(self, read: Any, layer: int, ops: Ops[Any, Any, Any]) -> None:
        """Keeps the rows."""
        ops.delta(read, self._part, layer)


def convolution(weights: WeightSource, shape: DeltaShape, prefix: str, kind: str) -> torch.Tensor:
    """The convolution's factors of this rank's columns, float32 [kernel, inputs], or its bias [inputs]."""
    keys, values = shape.key_heads * shape.key_size, shape.value_heads * shape.value_size
    sides = (1, shape.kernel) if kind == "weight" else ()
    stored = [
        weights.take_rows(f"{prefix}.conv_{part}.{kind}", (count, *sides), torch.float32)
        for part, count in {"q": keys, "k": keys, "v": values}.items()
    ]
    whole = torch.cat(stored)
    return whole[:, 0].t().contiguous() if sides else whole
