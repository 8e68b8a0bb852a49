"""The memory of rows in all layers' rings, and slots that are new.

A slot that came from elsewhere, or is a copy, has the rows that the specification knows; what follows from
these is made again before the first step that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from eyas.engine.kernels.states.order import DeltaLayer, SolvedRows
from eyas.engine.kernels.states.prompts import Chunks, recur_chunks
from eyas.engine.states.rows import StateRows
from eyas.engine.states.shape import ChannelShape
from eyas.engine.states.store import StateStore


@dataclass(frozen=True)
class SolvedStore:
    """`parts`: by the names of `SolvedRows`, each [layers, slots, ..]; `layers`: by their numbers in the
    model.
    """

    parts: dict[str, torch.Tensor]
    layers: dict[int, SolvedRows]

    @classmethod
    def on(cls, states: StateStore) -> SolvedStore:
        """Allocates for all slots; what is there has been made of no rows."""
        form, like = states.format, states.parts["inputs"]
        sizes = len(form.layers), like.shape[0], form.ring
        parts = {
            name: like.new_zeros(*sizes, *sides, dtype=dtype)
            for name, (dtype, sides) in SolvedRows.row(form.shape, form.dtype).items()
        }
        rows = [
            SolvedRows(**dict(zip(parts, each, strict=True))) for each in zip(*parts.values(), strict=True)
        ]
        return cls(parts, dict(zip(form.layers, rows, strict=True)))


def remake(layers: Iterable[DeltaLayer], arrived: torch.Tensor) -> None:
    """Makes what `SolvedRows` has of the rows in slots that are new.

    arrived int32 [3, J]: each one's slot, where its state stands, and the end of its rows, which is less than
    SPAN further.
    """
    slots, bounds, ends = (row.clone() for row in arrived)  # on 16 bytes, as kernels like it
    number = torch.arange(slots.shape[0], dtype=torch.int32, device=arrived.device)
    none = torch.zeros_like(slots)
    rows = StateRows(slots, none, none, ends, bounds, bounds, none[:0], none[:0], 0)
    chunks = Chunks(torch.stack((number, bounds), 1), number + 1)
    for layer in layers:
        shape, stored = layer.rule.shape, layer.stored
        if isinstance(shape, ChannelShape):
            continue
        inputs = stored.inputs.new_empty(0, shape.inputs)
        recur_chunks(inputs, stored.gates.new_empty(0, shape.gates), layer, rows, chunks, inputs)
