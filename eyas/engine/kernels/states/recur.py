"""A layer with a state over all rows of a device's forward, whatever groups they come in."""

from __future__ import annotations

import torch

from eyas.engine.kernels.states.few import recur_few
from eyas.engine.kernels.states.order import DeltaLayer
from eyas.engine.kernels.states.prompts import Chunks, recur_chunks
from eyas.engine.states.rows import StateGroups


def recur(
    inputs: torch.Tensor,
    gates: torch.Tensor,
    layer: DeltaLayer,
    groups: StateGroups,
    tree: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """As `states.plain.recur`, of the rows of every group. `tree`: those of rounds are trees."""
    made: list[torch.Tensor] = []
    if groups.rounds is not None:
        made.append(recur_few(inputs, gates, layer, groups.rounds, tree, pdl))
    if groups.singles is not None:
        made.append(recur_few(inputs, gates, layer, groups.singles, pdl=pdl))
    if groups.chunks is not None:
        assert groups.table is not None and groups.ends is not None
        chunks = Chunks(groups.table, groups.ends)
        made.append(recur_chunks(inputs, gates, layer, groups.chunks, chunks))
    whole = made[0]
    for other in made[1:]:
        whole += other  # a row is of one group, and zeros in the others
    return whole
