"""A layer with a state over all rows of a device's forward, whatever groups they come in."""

from __future__ import annotations

import torch

from eyas.engine.kernels.states.by_row import recur_by_row
from eyas.engine.kernels.states.few import recur_few
from eyas.engine.kernels.states.order import DeltaLayer
from eyas.engine.kernels.states.prompts import Chunks, recur_chunks
from eyas.engine.states.rows import StateGroups
from eyas.engine.states.shape import ChannelShape


def recur(
    inputs: torch.Tensor,
    gates: torch.Tensor,
    layer: DeltaLayer,
    groups: StateGroups,
    out: torch.Tensor,
    pdl: bool = False,
) -> torch.Tensor:
    """Recurs over the rows of every group, as `states.plain.recur` does, into `out` [m, value heads * value
    size]; its rows that no sequence has stay as they are.
    """
    by_row = isinstance(layer.rule.shape, ChannelShape)
    for rows in (groups.rounds, groups.singles, groups.chunks if by_row else None):
        if rows is not None:
            (recur_by_row if by_row else recur_few)(inputs, gates, layer, rows, out, pdl)
    if groups.chunks is not None and not by_row:
        assert groups.table is not None and groups.ends is not None
        recur_chunks(inputs, gates, layer, groups.chunks, Chunks(groups.table, groups.ends), out)
    return out
