"""The sizes that bound a step. Numbers only: who keeps to them is the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eyas.engine.scheduling.turns import StepRoom

YIELD_TOKENS_PER_S = 500.0
"""Tokens of a GPU's prompt that are worth one second of waiting for shorter prompts."""


@dataclass(frozen=True)
class BatchLimits:
    """Sizes that bound a step.

    `page_size`: rows per page. `max_running`: sequences per step. `chunk_tokens`: prompt rows per step.
    `round_rows`: rows that the widest verify or draft round may write.
    `rounds_ahead`: the number of rounds, the current one included, for which a running sequence reserves
    pages. It is larger where the next round is launched before the result of the current one is known.
    `mixed_prefill_budget`: (number of decoding sequences, whether many prompt tokens wait) -> prompt rows
    that may run in the same step. None: `chunk_tokens`.
    `room`: what a step may take; where more sequences decode than that has room for, requests take turns.
    None: all decode in every step. For devices on which a step's time grows with its rows.
    `yield_tokens_per_s`: a prompt of n tokens yields to shorter prompts that arrive within
    n / yield_tokens_per_s seconds after it (0: no prompt yields).
    """

    page_size: int
    max_running: int
    chunk_tokens: int
    round_rows: int
    rounds_ahead: int = 2
    mixed_prefill_budget: Callable[[int, bool], int] | None = None
    room: StepRoom | None = None
    yield_tokens_per_s: float = 0.0

    @property
    def rows_ahead(self) -> int:
        """Rows past its computed ones for which a running sequence reserves pages."""
        return self.rounds_ahead * self.round_rows

    def most_rows(self, pages: int) -> int:
        """The length, in rows, of the longest sequence that `pages` pages can hold."""
        return pages * self.page_size - self.rows_ahead
