"""The rows of one forward, as kernels take them: device tensors only, sizes as host integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DecodeRows:
    """B sequences of `width` rows each, one after the other in a forward.

    `slots`, `starts` int32 [B]: row j of sequence b stands at logical row starts[b] + j. `mask` int64
    [B, width]: bit r of node j says that it sees row starts[b] + r; None: chains. `extent`: rows from
    starts[b] on that a mask may name, if there are more than `width`.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    width: int = 1
    mask: torch.Tensor | None = None
    extent: int = 0

    @property
    def rows(self) -> int:
        return self.slots.shape[0] * self.width


@dataclass(frozen=True)
class Rows:
    """m rows. `tokens`, `positions`, `kv_rows` int32 [m] (-1: writes nothing); then their two kinds.

    `tiles` int32 [T, 4]: (slot, first row counted from the first chunk row, its logical row, count).
    `planned`: the chunk rows are those that the prompts' attention was last planned for. `singles`: sequences
    with one row each, which follow those of `rounds`.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    kv_rows: torch.Tensor
    rounds: DecodeRows | None = None
    tiles: torch.Tensor | None = None
    planned: bool = False
    singles: DecodeRows | None = None

    @property
    def groups(self) -> list[DecodeRows]:
        """Those that decode, in the order of their rows."""
        return [group for group in (self.rounds, self.singles) if group is not None]

    @property
    def count(self) -> int:
        return self.tokens.shape[0]
