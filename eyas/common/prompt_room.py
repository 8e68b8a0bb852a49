"""The prompt rows of a step: how many it has room for, and how many of them each prompt may have.

One rule for an engine's scheduler, for the simulator of `eyas plan`, and for a router's estimates. What a row
costs, and in which order prompts are computed, it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

MANY_STEPS = 4
"""When more prompt tokens wait than so many of the largest steps that also decode compute, prompts take
precedence over decoding speed. One long prompt is not many: in small chunks its rows cost no more, and others
decode beside.
"""

LEAST_ROWS = 64
"""Prompt rows beside any number of decoding sequences: prompts go on however many decode."""

MOST_BESIDE = 3072
"""Rows of a step that also decodes, however many prompt tokens wait and steps of prompts alone have."""

MOST_TOGETHER = 8192
"""Rows of a step with several prompts: the first of them waits for the last. One alone may have more."""

LONG_PROMPT = 2048
"""A prompt of more tokens has half of a step's prompt rows while others decode: its own first token is far
off, and each of theirs comes sooner. Shorter prompts have the rows that it leaves. Of several such prompts
the first has all rows: with half of them each, all would come late.
"""

STEP_GRAIN = 64
"""Totals of rows are multiples: what matrix products take grows in such steps."""


def beside(chunk_tokens: int) -> int:
    """The most rows of a step that also decodes, where steps of prompts have up to `chunk_tokens`."""
    return min(chunk_tokens, MOST_BESIDE)


@dataclass(frozen=True)
class PromptRoom:
    """A step has room for `rows` prompt rows, up to `long_rows` of them of each long prompt."""

    rows: int
    long_rows: int

    def of(self, prompt: int) -> int:
        """The rows that a prompt of `prompt` tokens may have."""
        return min(self.rows, self.long_rows) if prompt > LONG_PROMPT else self.rows

    def behind(self, taken: int) -> PromptRoom:
        """What is left for further prompts when one has taken so many rows."""
        return replace(self, rows=max(min(self.rows, MOST_TOGETHER) - taken, 0))


class PromptLimits(Protocol):
    """The sizes by which `prompt_room` decides: see `BatchLimits`."""

    @property
    def chunk_tokens(self) -> int:
        """Prompt rows of a step that does not decode."""

    @property
    def mixed_prefill_budget(self) -> Callable[[int, bool], int] | None:
        """(number of decoding sequences, whether many prompt tokens wait) -> prompt rows beside them."""

    @property
    def long_prompt_rows(self) -> Callable[[int], int] | None:
        """(number of decoding sequences) -> those of them that a lone long prompt may have."""


def prompt_room(limits: PromptLimits, decoding: int, waiting: Iterable[tuple[int, int]]) -> PromptRoom:
    """The room of the next step: all rows if nothing decodes, few beside `decoding` sequences, of which a
    long prompt has a part unless another one waits; more if many tokens do.

    `waiting`: of each prompt that is not computed, its tokens and how many of them are missing.
    """
    if not decoding or limits.mixed_prefill_budget is None:
        return PromptRoom(limits.chunk_tokens, limits.chunk_tokens)
    many, backlog, long = MANY_STEPS * beside(limits.chunk_tokens), 0, 0
    for tokens, missing in waiting:
        backlog += missing
        long += tokens > LONG_PROMPT
        if backlog > many:
            most = limits.mixed_prefill_budget(decoding, True)
            return PromptRoom(most, most)
    rows = limits.mixed_prefill_budget(decoding, False)
    if long != 1 or limits.long_prompt_rows is None:
        return PromptRoom(rows, rows)
    return PromptRoom(rows, limits.long_prompt_rows(decoding))


def rows_of(limits: PromptLimits, decoding: int, prompts: Sequence[int]) -> int:
    """The rows that the next step computes of prompts of so many tokens, none of which has begun."""
    room, total = prompt_room(limits, decoding, [(tokens, tokens) for tokens in prompts]), 0
    for tokens in prompts:
        taken = min(tokens, room.of(tokens))
        room, total = room.behind(taken), total + taken
    return total


@dataclass(frozen=True)
class StepBudget:
    """`PromptLimits` of a worker of which no more is known than the most rows of a step with prompts, and as
    many as it should have while sequences decode: if these are as many, all steps are alike.
    """

    chunk_tokens: int
    mixed_tokens: int

    def mixed_prefill_budget(self, decoding: int, many: bool) -> int:
        """Prompt rows beside `decoding` sequences; `many`: many tokens wait."""
        most = max(beside(self.chunk_tokens), self.mixed_tokens) if many else self.mixed_tokens
        return max(most - decoding, LEAST_ROWS)

    def long_prompt_rows(self, decoding: int) -> int:
        """Those of a lone long prompt: half of them, in a step of a multiple of `STEP_GRAIN` rows."""
        rows = self.mixed_prefill_budget(decoding, False)
        if self.mixed_tokens >= self.chunk_tokens:
            return rows
        return max((rows // 2 + decoding) // STEP_GRAIN * STEP_GRAIN - decoding, min(LEAST_ROWS, rows))
