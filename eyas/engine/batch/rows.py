"""The rows of one forward, as kernels read them: device tensors, with their sizes as host integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.engine.states.rows import StateGroups


@dataclass(frozen=True)
class DecodeRows:
    """B sequences of `width` rows each, one after the other in a forward.

    `slots`, `starts` int32 [B]: row j of sequence b is logical row starts[b] + j of that sequence.
    `mask` int64 [words, B, width]: bit r % 64 of word r // 64 of entry j says that node j sees row
    starts[b] + r. None: chains.
    `extent`: the number of rows from starts[b] on that the mask covers, if that is more than `width`.
    `together`: they are a block that sees itself by its mask; in layers with a window it is a chain.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    width: int = 1
    mask: torch.Tensor | None = None
    extent: int = 0
    together: bool = False

    @property
    def rows(self) -> int:
        """B * width."""
        return self.slots.shape[0] * self.width


@dataclass(frozen=True)
class ForwardRows:
    """The m rows of a forward: first those of `rounds`, then prompt chunks.

    `tokens`, `positions`, `kv_rows` int32 [m]: ids, RoPE positions, and the physical KV row that each row
    writes (-1: none). `tiles` int32 [T, 4] cut the chunks: (slot, first row counted from the first chunk
    row, its logical row, number of rows). `planned`: the prompts' attention was last planned for these
    chunk rows. `singles`: sequences with one row each, whose rows follow those of `rounds`. `firsts` int32
    [slots]: each slot's first row that may be seen, what lies below it being anything (None: all rows may).
    `depth`: how far a draft head's rows stand below the certain ones; 0: they are certain. `table` int32
    [slots, most pages]: where the pages of these rows stand (None: where the attention looks by itself).
    `others`: the same rows in further groups of layers, which differ in `kv_rows` and `table`. `states`: the
    same rows for layers with states, if there are some. `adapters` int32 [m]: the slot of each row's adapter,
    0: it has none (None: no row has one). `leaving` int32 [n]: the rows that leave the last layer, in which
    the others are only seen (None: all leave it).
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    kv_rows: torch.Tensor
    rounds: DecodeRows | None = None
    tiles: torch.Tensor | None = None
    planned: bool = False
    singles: DecodeRows | None = None
    firsts: torch.Tensor | None = None
    depth: int = 0
    table: torch.Tensor | None = None
    others: tuple[ForwardRows, ...] = ()
    states: StateGroups | None = None
    adapters: torch.Tensor | None = None
    leaving: torch.Tensor | None = None

    def in_group(self, group: int) -> ForwardRows:
        """The rows in a group of layers."""
        return self.others[group - 1] if group else self

    @property
    def groups(self) -> list[DecodeRows]:
        """The row groups that decode, in the order of their rows."""
        return [group for group in (self.rounds, self.singles) if group is not None]

    @property
    def count(self) -> int:
        """m."""
        return self.tokens.shape[0]
