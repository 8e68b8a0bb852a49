"""The size limits of a step, which the scheduler enforces."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from eyas.engine.scheduling.turns import StepRoom


@dataclass(frozen=True)
class PromptYield:
    """How long shorter prompts may overtake a prompt: one second per `tokens_per_s` of its tokens, at most
    `most_s` seconds.
    """

    tokens_per_s: float = math.inf
    most_s: float = math.inf

    def seconds(self, tokens: int) -> float:
        """Seconds after its arrival during which a prompt of `tokens` tokens yields to shorter ones."""
        return min(tokens / self.tokens_per_s, self.most_s)


GPU_YIELD = PromptYield(500.0, 12.0)
"""For prompts on a GPU. Under overload, the longest prompts are computed in order of arrival."""


@dataclass(frozen=True)
class BatchLimits:
    """Size limits of a step; `eyas.common.prompt_room` derives those of its prompts.

    `page_size`: rows per page. `max_running`: sequences per step. `chunk_tokens`: prompt rows per step.
    `round_rows`: rows that the widest verify or draft round may write.
    `rounds_ahead`: the number of rounds, the current one included, for which a running sequence reserves
    pages. It is larger where the next round is launched before the result of the current one is known.
    `mixed_prefill_budget`: (number of decoding sequences, whether many prompt tokens wait) -> prompt rows
    that may run in the same step. None: `chunk_tokens`.
    `long_prompt_rows`: (number of decoding sequences, tokens ahead) -> the part of these rows for prompts
    of more than `LONG_PROMPT` tokens, unless many tokens wait. None: all of them.
    `room`: the capacity of a step, on devices where its time grows with its rows; if more sequences decode
    than fit, requests take turns. None: all decode in every step.
    `yields`: how long shorter prompts may overtake a prompt; by default never.
    """

    page_size: int
    max_running: int
    chunk_tokens: int
    round_rows: int
    rounds_ahead: int = 2
    mixed_prefill_budget: Callable[[int, bool], int] | None = None
    long_prompt_rows: Callable[[int, int], int] | None = None
    room: StepRoom | None = None
    yields: PromptYield = PromptYield()

    @property
    def rows_ahead(self) -> int:
        """Rows past its computed ones for which a running sequence reserves pages."""
        return self.rounds_ahead * self.round_rows

    def most_rows(self, pages: int) -> int:
        """The length, in rows, of the longest sequence that `pages` pages can hold."""
        return pages * self.page_size - self.rows_ahead
