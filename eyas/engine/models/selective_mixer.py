"""The mixer of a layer of a selective state space model (Mamba, arXiv 2312.00752): its tensors, and its
equation.

One product gives what is convolved, and a gate. Of what the convolution makes of that, another gives steps,
keys and queries.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Generic

import torch

from eyas.engine.formats.projection import ProjectionT
from eyas.engine.layers.activations import silu, softplus
from eyas.engine.layers.norm import Gain, rms_norm
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.machine import Blocks
from eyas.engine.states.selective import Selected, SelectiveRule
from eyas.engine.states.shape import SelectiveShape


class SelectiveMixer(Generic[ProjectionT]):
    """A `Mixer`, whose tensors are those below `prefix`. `gain`: as of `DecoderLayer`."""

    def __init__(
        self, blocks: Blocks[ProjectionT], shape: SelectiveShape, prefix: str, gain: Gain | None
    ) -> None:
        weights, columns = blocks.weights, shape.value_size
        self._dtype = weights.placement.dtype
        width = blocks.config.hidden_size if gain is None else gain.shape[0]
        self._counts = (shape.rank, shape.key_size, shape.key_size)

        def matrix(name: str, sides: tuple[int, int]) -> ProjectionT:
            whole = f"{prefix}.{name}.weight"
            return blocks.loader([whole]).whole(whole, sides)

        self._first = matrix("in_proj", (2 * columns, width))
        self._second = matrix("x_proj", (sum(self._counts), columns))
        self._steps = matrix("dt_proj", (columns, shape.rank))
        self.norm = None if gain is None else blocks.norm_before(gain, self._first)

        def of_columns(name: str, *sides: int) -> torch.Tensor:
            return weights.take(f"{prefix}.{name}", (columns, *sides), torch.float32)

        self._step_bias = of_columns("dt_proj.bias")
        filters = of_columns("conv1d.weight", 1, shape.kernel)[:, 0].t().contiguous()
        bias = of_columns("conv1d.bias") if shape.bias else None
        rates = of_columns("A_log", shape.key_size).exp().neg().t().contiguous()
        self._gains: list[torch.Tensor] = []
        if shape.norms == "gains":
            sizes = zip(("dt", "b", "c"), self._counts, strict=True)
            self._gains = [weights.take(f"{prefix}.{part}_layernorm.weight", (n,)) for part, n in sizes]
        elif shape.norms == "bare":
            self._gains = [filters.new_ones(n, dtype=self._dtype) for n in self._counts]
        self._rule = SelectiveRule(shape, filters, bias, of_columns("D"), rates)

    @property
    def projections(self) -> tuple[ProjectionT, ...]:
        """Its weights."""
        return self._first, self._second, self._steps

    def attend(self, read: Any, layer: int, ops: Ops[Any, Any, Any]) -> torch.Tensor:
        """-> what rows read of their states, times the gate's silu, [m, columns]."""
        inputs, gate = ops.product(read, self._first).chunk(2, 1)
        rule = replace(self._rule, select=partial(self._selected, ops))
        made = ops.recur(inputs.contiguous(), inputs.new_empty(len(inputs), 0).float(), rule, layer)
        return silu(gate, made)

    def keep(self, read: Any, layer: int, ops: Ops[Any, Any, Any]) -> None:
        """Keeps the rows."""
        self.attend(read, layer, ops)

    def _selected(self, ops: Ops[Any, Any, Any], made: torch.Tensor) -> Selected:
        parts = list(ops.product_of(made.to(self._dtype), self._second).split(self._counts, 1))
        for number, gain in enumerate(self._gains):
            parts[number] = rms_norm(parts[number], gain, self._rule.shape.norm_eps or ops.eps)
        steps = ops.product_of(parts[0].contiguous(), self._steps).float() + self._step_bias
        return Selected(softplus(steps), parts[1].float(), parts[2].float())
