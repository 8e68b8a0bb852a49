"""The prompt rows of a step: how many it has room for, and how many of them each prompt may have.

One rule for an engine's scheduler, for the simulator of `eyas plan`, and for a router's estimates. What a row
costs, and in which order prompts are computed, it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

MANY_STEPS = 4
"""Prompts take precedence over decoding speed when more of their tokens wait than this number of the largest
steps that also decode can compute. One long prompt is not many: in small chunks its rows cost no more, and
others decode beside.
"""

LEAST_ROWS = 64
"""Prompt rows beside any number of decoding sequences: prompts go on however many decode."""

MOST_BESIDE = 3072
"""Rows of a step that also decodes, however many prompt tokens wait and steps of prompts alone have."""

MOST_TOGETHER = 8192
"""Rows of a step with several prompts: the first of them waits for the last. One alone may have more."""

LONG_PROMPT = 4096
"""A prompt of more tokens, cached ones not counted, is long. While others decode it has few of a step's
prompt rows: its own first token is far off, and the others' tokens come sooner. Shorter ones have the rest.
"""

LONG_PART = 4
"""The part of `mixed_tokens` that a long prompt has as rows: 128 of 512."""

AHEAD_PER_ROW = 16
"""Tokens of other long prompts, before it or behind it, for which a long prompt has one row more. So the rows
of a step follow the rate at which long prompts come.
"""

STEP_GRAIN = 64
"""Rows by which the time of steps with prompts is taken to grow."""

FINE = 384
"""Rows up to which steps with both have a shape for every `STEP_GRAIN` rows; above, for every two of these.
Between 384 and 512 rows the library's choice for the widest product takes longer than 512 do.
"""

LIGHT = 160
"""A shape more: its products take a few percent more than those of 128 rows, and those of 192 a fifth."""


def step_totals(most: int) -> list[int]:
    """The rows, up to `most`, of steps with prompts and decoding sequences that have a shape of their own."""
    fine = {LIGHT, *range(2 * STEP_GRAIN, FINE + 1, STEP_GRAIN)}
    return sorted(rows for rows in {*fine, *range(FINE, most + 1, 2 * STEP_GRAIN)} if rows <= most)


def beside(chunk_tokens: int) -> int:
    """The most rows of a step that also decodes, where steps of prompts have up to `chunk_tokens`."""
    return min(chunk_tokens, MOST_BESIDE)


@dataclass(frozen=True)
class PromptRoom:
    """A step has room for `rows` prompt rows, up to `long_rows` of them of long prompts."""

    rows: int
    long_rows: int

    def of(self, prompt: int) -> int:
        """The rows that a prompt may have of which `prompt` tokens are not cached."""
        return min(self.rows, self.long_rows) if prompt > LONG_PROMPT else self.rows

    def behind(self, prompt: int, taken: int) -> PromptRoom:
        """The room behind a prompt of `prompt` tokens, cached ones not counted, that takes `taken` rows."""
        rows = max(min(self.rows, MOST_TOGETHER) - taken, 0)
        return PromptRoom(rows, max(self.long_rows - taken * (prompt > LONG_PROMPT), 0))


class WaitingPrompt(NamedTuple):
    """A prompt that is not computed: its tokens beyond the cached ones, and those that are still missing.
    `ahead`: the missing tokens of long prompts when it came.
    """

    tokens: int
    missing: int
    ahead: int = 0


class PromptLimits(Protocol):
    """The sizes by which `prompt_room` decides: see `BatchLimits`."""

    @property
    def chunk_tokens(self) -> int:
        """Prompt rows of a step that does not decode."""

    @property
    def mixed_prefill_budget(self) -> Callable[[int, bool], int] | None:
        """(number of decoding sequences, whether many prompt tokens wait) -> prompt rows beside them."""

    @property
    def long_prompt_rows(self) -> Callable[[int, int], int] | None:
        """(number of decoding sequences, tokens ahead) -> those of these rows that long prompts may have."""


def prompt_room(limits: PromptLimits, decoding: int, waiting: Iterable[WaitingPrompt]) -> PromptRoom:
    """The room of the next step: all rows if nothing decodes, few beside `decoding` sequences, and of these
    few for long prompts; more if many tokens wait. `waiting`: those that run come first.
    """
    if not decoding or limits.mixed_prefill_budget is None:
        return PromptRoom(limits.chunk_tokens, limits.chunk_tokens)
    many, backlog, long = MANY_STEPS * beside(limits.chunk_tokens), 0, list[WaitingPrompt]()
    for prompt in waiting:
        backlog += prompt.missing
        if backlog > many:
            most = limits.mixed_prefill_budget(decoding, True)
            return PromptRoom(most, most)
        if prompt.tokens > LONG_PROMPT:
            long.append(prompt)
    rows = limits.mixed_prefill_budget(decoding, False)
    if not long or limits.long_prompt_rows is None:
        return PromptRoom(rows, rows)
    missing = [prompt.missing for prompt in long]
    ahead = max(long[0].ahead, sum(missing) - max(missing))
    return PromptRoom(rows, limits.long_prompt_rows(decoding, ahead))


def tokens_ahead(prompt: int, waiting: Iterable[WaitingPrompt]) -> int:
    """The `ahead` of a prompt of `prompt` tokens that comes now, if it is long."""
    if prompt <= LONG_PROMPT:
        return 0
    return sum(other.missing for other in waiting if other.tokens > LONG_PROMPT)


def room_behind(limits: PromptLimits, decoding: int, tokens: int, queued: int) -> PromptRoom:
    """The room of a step in which a prompt of `tokens` tokens waits behind `queued` tokens of others."""
    return prompt_room(limits, decoding, (WaitingPrompt(tokens, tokens, queued), WaitingPrompt(0, queued)))


def rows_of(limits: PromptLimits, decoding: int, tokens: int, queued: int = 0) -> int:
    """The rows of each step until such a prompt is computed, if those before it have no more per step."""
    return min(room_behind(limits, decoding, tokens, queued).of(tokens), tokens + queued)


@dataclass(frozen=True)
class StepBudget:
    """`PromptLimits` by two numbers: the most rows of a step with prompts, and the rows that it should have
    while sequences decode. If these are equal, all steps are alike.
    """

    chunk_tokens: int
    mixed_tokens: int

    def mixed_prefill_budget(self, decoding: int, many: bool) -> int:
        """Prompt rows beside `decoding` sequences; `many`: many tokens wait."""
        most = max(beside(self.chunk_tokens), self.mixed_tokens) if many else self.mixed_tokens
        return max(most - decoding, LEAST_ROWS)

    def long_prompt_rows(self, decoding: int, ahead: int) -> int:
        """Those of long prompts with `ahead` tokens ahead, in a step of one of `step_totals`."""
        rows = self.mixed_prefill_budget(decoding, False)
        if self.mixed_tokens >= self.chunk_tokens:
            return rows
        sizes = [total - decoding for total in step_totals(self.mixed_tokens)]
        return long_rows([size for size in sizes if size >= LEAST_ROWS] or [rows], self.mixed_tokens, ahead)


def long_rows(sizes: Sequence[int], mixed_tokens: int, ahead: int) -> int:
    """The rows of long prompts with `ahead` tokens ahead: one of the `sizes`, ascending."""
    wished = mixed_tokens // LONG_PART + ahead // AHEAD_PER_ROW
    return max((size for size in sizes if size <= wished), default=sizes[0])
