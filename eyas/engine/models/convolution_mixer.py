"""The mixer of a layer with a short convolution (LFM2, arXiv 2511.23404): its tensors, and its equation.

One product gives three rows as wide as the residual: the first times the third is convolved, and the second
multiplies what comes of it.
"""

from __future__ import annotations

from typing import Any, Generic

import torch

from eyas.engine.formats.projection import ProjectionT
from eyas.engine.layers.norm import Gain
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.machine import Blocks
from eyas.engine.states.convolution import ShortConvolution
from eyas.engine.states.shape import ConvolutionShape


class ConvolutionMixer(Generic[ProjectionT]):
    """A `Mixer`, whose tensors are those below `prefix`. `gain`: as of `DecoderLayer`."""

    def __init__(
        self, blocks: Blocks[ProjectionT], shape: ConvolutionShape, prefix: str, gain: Gain | None
    ) -> None:
        columns, name = shape.value_size, f"{prefix}.in_proj.weight"
        width = blocks.config.hidden_size if gain is None else gain.shape[0]
        self._projection = blocks.loader([name]).whole(name, (3 * columns, width))
        self.norm = None if gain is None else blocks.norm_before(gain, self._projection)
        filters = blocks.weights.take(f"{prefix}.conv.weight", (columns, 1, shape.kernel), torch.float32)
        self._rule = ShortConvolution(shape, filters[:, 0].t().contiguous())

    @property
    def projections(self) -> tuple[ProjectionT, ...]:
        """Its weights."""
        return (self._projection,)

    def attend(self, read: Any, layer: int, ops: Ops[Any, Any, Any]) -> torch.Tensor:
        """-> what is convolved, times the second row, [m, columns]."""
        before, behind, inputs = ops.product(read, self._projection).chunk(3, 1)
        inputs = before * inputs
        return ops.recur(inputs, inputs.new_empty(len(inputs), 0), self._rule, layer).mul_(behind)

    def keep(self, read: Any, layer: int, ops: Ops[Any, Any, Any]) -> None:
        """Keeps the rows."""
        self.attend(read, layer, ops)
