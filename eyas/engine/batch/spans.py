"""A step's rows as attention plans them: their sequence, their place in it, and the rows that they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class StatePlace(NamedTuple):
    """The place of a sequence's state, in its slot: at position `bound` before a step, at `fold` behind it.
    `stay`: a number of the sequence's stay there that no other one has; -1: none.
    """

    slot: int
    bound: int
    fold: int
    stay: int = -1


@dataclass(frozen=True)
class QuerySpan:
    """Consecutive query rows of one sequence, in a step's flattened row order.

    `pages` is the sequence's page table; it covers every logical row used here. All queries see the rows
    below `start`. `paths` None means causal: query i is row start + i and sees all rows up to its own.
    Otherwise the queries are tree nodes: query i also sees the rows paths[i], of which the last is its own.
    `offset` is the RoPE position of logical row 0; it differs from 0 for a drafter's window that starts in
    the middle of a sequence. `others`: its page tables in further groups of layers; none: `pages` is that of
    every group. `state`: if layers have states. `together`: every query sees all rows of the span, as a block
    of drafts made in one pass may; but in layers with a window none behind its own. `adapter`: the slot of
    the sequence's adapter; 0: it has none.
    """

    pages: Sequence[int]
    start: int
    count: int
    paths: tuple[tuple[int, ...], ...] | None = None
    offset: int = 0
    others: tuple[Sequence[int], ...] = ()
    state: StatePlace | None = None
    together: bool = False
    adapter: int = 0

    def in_group(self, group: int) -> QuerySpan:
        """The span with the pages of a group of layers."""
        return replace(self, pages=self.others[group - 1], others=()) if group and self.others else self
