"""The rows of one forward, as layers with a state read them; kernels and plain torch read the same.

A sequence's row is stored by its number, a tree's node t as row start + t, in place number % ring of the
sequence's slot; the rows of an accepted path move to start, start + 1, ... after the forward, as keys and
values do. The rows from the state's position on are always stored, those of this forward included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StateRows:
    """B sequences of a forward of m rows; all tensors are int32, on the device of the forward.

    Sequence b has the forward's rows `firsts[b]` .. `firsts[b] + counts[b] - 1`, which are its own rows
    `starts[b]`, `starts[b] + 1`, ...; those before are certain. Its state, in slot `slots[b]`, stands at
    `bounds[b]`, and must stand at `folds[b]` behind this forward: both are multiples of SPAN, and the rows
    below `folds[b]` are certain. At 0 a state and the inputs before it are zeros, whatever the slot has.
    `before` [m]: the sequence's own row that precedes each row of the forward on its path (-1: it is row 0).
    `positions` [m]: of each row on its path; they differ from row numbers in trees.
    `most`: no sequence has more rows in this forward. Padding sequences have a count of 0. `stays`: a number
    of each sequence's stay in its slot that no other stay has, -1: it has none; plain torch alone reads them.
    `trees`: False: the row before a row on its path is the last one, for kernels, which then need not look.
    """

    slots: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor
    bounds: torch.Tensor
    folds: torch.Tensor
    before: torch.Tensor
    positions: torch.Tensor
    most: int
    stays: tuple[int, ...] = ()
    trees: bool = False


@dataclass(frozen=True)
class StateGroups:
    """The rows of a device's forward by group: `rounds` and `singles` that decode, and `chunks` of prompts.

    `table` int32 [C, 2]: spans of SPAN rows of the chunks' sequences from their states' positions on, each
    one's sequence and first row; `ends` int32 [B]: behind each sequence's last one. What stands behind the
    last end is of a sequence without rows.
    """

    rounds: StateRows | None
    singles: StateRows | None
    chunks: StateRows | None
    table: torch.Tensor | None
    ends: torch.Tensor | None
