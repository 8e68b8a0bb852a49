"""The slots of states: what one has for each layer, its bytes, and views of the memory that has them all.

A slot has everything of one sequence: for each layer the state at a multiple of SPAN, the convolution's
inputs of the rows just before it, and a ring of the rows from there on that are not folded yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from eyas.engine.states.shape import FLOATS, DeltaShape, aligned

RING = ("inputs", "gates")
"""The parts of a slot that have rows."""


@dataclass(frozen=True)
class StateFormat:
    """A slot of the model's `layers`, which have one `shape`. `ring`: places for rows; row r is in place
    r % ring. `dtype`: of the convolution's inputs.
    """

    layers: tuple[int, ...]
    shape: DeltaShape
    ring: int
    dtype: torch.dtype

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a slot."""
        return self.shape.slot_bytes(self.ring, self.dtype.itemsize)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return len(self.layers) * self.layer_bytes


class RunningState(NamedTuple):
    """The state behind a sequence's first `row` rows, float32 [value heads, key size, value size]. `stay`:
    of the sequence in its slot.
    """

    stay: int
    row: int
    state: torch.Tensor


@dataclass(frozen=True)
class LayerStates:
    """The slots of one layer: `states` float32 [slots, value heads, key size, value size], `tails` [slots,
    kernel - 1, inputs], and the ring: `inputs` [slots, ring, inputs], `gates` float32 [slots, ring, gates].

    The first dimension is not dense. `running`: by slot, what plain torch goes on from; it never travels.
    """

    states: torch.Tensor
    tails: torch.Tensor
    inputs: torch.Tensor
    gates: torch.Tensor
    running: dict[int, RunningState] = field(default_factory=dict, init=False)


class StateStore:
    """Views of uint8 `memory` [slots, bytes], in which each slot begins with what `format` says. `parts`: by
    the names of `LayerStates`, each [slots, layers, ..]; `layers`: by their numbers in the model. `beside`:
    what kernels keep of the rows in rings, which they make again where a slot is new.
    """

    def __init__(self, format: StateFormat, memory: torch.Tensor) -> None:
        self.format = format
        self._memory = memory
        self.beside: object = None
        self.parts = dict(self._parts())
        self.layers = {
            layer: LayerStates(**{name: part[:, place] for name, part in self.parts.items()})
            for place, layer in enumerate(format.layers)
        }

    def _parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        form, first = self.format, 0
        each = self._memory[:, : form.slot_bytes].unflatten(1, (len(form.layers), form.layer_bytes))
        for name, sizes in form.shape.parts(form.ring).items():
            dtype = torch.float32 if name in FLOATS else form.dtype
            count = math.prod(sizes) * dtype.itemsize
            yield name, each[:, :, first : first + count].view(dtype).unflatten(2, sizes)
            first += aligned(count)

    def copy(self, source: int, target: int) -> None:
        """Copies a slot to another one."""
        self._memory[target] = self._memory[source]

    def move(self, slots: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Moves rows `sources` int64 [n] of `slots` [n] to rows `targets` of the rings; all are read before
        any is written.
        """
        ring = self.format.ring
        for name in RING:
            rows = self.parts[name]
            rows[slots, :, targets % ring] = rows[slots, :, sources % ring]
