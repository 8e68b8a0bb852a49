"""A step's rows as attention plans them: whose they are, where they stand, and which rows they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Consecutive query rows of one sequence, in a step's flattened row order.

    `pages` is the sequence's page table and covers every logical row named here; rows below `start` are
    visible to all queries. `paths` None means causal: query i stands at row start + i and sees all rows up
    to its own. Otherwise the queries are tree nodes: query i sees, after the rows below `start`, the rows
    paths[i], of which the last is its own. `offset` is the RoPE position of logical row 0: not 0 for a
    drafter's window that starts in the middle of a sequence.
    """

    pages: Sequence[int]
    start: int
    count: int
    paths: tuple[tuple[int, ...], ...] | None = None
    offset: int = 0
