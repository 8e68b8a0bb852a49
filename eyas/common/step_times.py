"""The time of an engine's step: a measured table, read between its points on straight lines.

A step's time is the sum of what its rows take (products and row kernels), what its decode rows read of keys
and values, and what its prompt rows attend to.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

MANY_CHUNKS = 6
"""When more prompt tokens wait than this many small chunks, prompts take precedence over decoding speed."""

LEAST_ROWS = 64
"""Prompt rows beside any number of decoding sequences: prompts go on however many decode."""


@dataclass(frozen=True)
class PiecewiseCurve:
    """A function given by points, x ascending. Beyond the last point it goes on as between the last two."""

    points: tuple[tuple[float, float], ...]

    def at(self, x: float) -> float:
        """The value at `x`; below the first point that point's."""
        starts, lines = self._lines
        x0, y0, slope = lines[bisect_right(starts, x)]
        return y0 + slope * (x - x0)

    @cached_property
    def _lines(self) -> tuple[list[float], list[tuple[float, float, float]]]:
        """The points at which another line begins, and the lines: a point of each, and its slope."""
        points = self.points
        lines = [(*points[0], 0.0)]
        for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
            lines.append((x0, y0, (y1 - y0) / (x1 - x0)))
        return [x for x, _ in points[:-1]], lines


@dataclass(frozen=True)
class StepPace:
    """Measured over predicted time of steps that only decode, that only compute prompts, and that do both.

    1.0: as predicted; 0.0, in what a worker says of itself: it has not seen such steps.
    """

    decode: float = 1.0
    prompt: float = 1.0
    mixed: float = 1.0


UNSEEN = StepPace(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of the parts of a step.

    `rows_ms`: by all its rows. `context_ms`: by the tokens that all decode rows together attend to.
    `pairs_ms`: per million pairs of a prompt row and a token that it attends to. `mixed_ms`: what a step with
    prompt rows and decode rows takes beyond the sum of its parts. `grain`: rows; a step with prompts is
    padded to a multiple of it. `pace`: by how much steps were longer lately than the parts say.
    """

    rows_ms: PiecewiseCurve
    context_ms: PiecewiseCurve
    pairs_ms: float
    mixed_ms: float = 0.0
    grain: int = 1
    pace: StepPace = StepPace()

    def step_s(self, decoding: int, context: float, prompt_rows: int = 0, pairs: float = 0.0) -> float:
        """Seconds of a step with `decoding` sequences of `context` tokens in all, and with prompt rows."""
        rows, pace = decoding + prompt_rows, self.pace.decode
        if prompt_rows:
            rows = self.grain * math.ceil(rows / self.grain)
            pace = self.pace.mixed if decoding else self.pace.prompt
        total = self.rows_ms.at(rows) + 1e-6 * pairs * self.pairs_ms
        if decoding:
            total += self.context_ms.at(context) + (self.mixed_ms if prompt_rows else 0.0)
        return 1e-3 * pace * total


@dataclass(frozen=True)
class StepBudget:
    """The most rows of a step with prompts, and as many as it should have while sequences decode."""

    chunk_tokens: int
    mixed_tokens: int

    def prompt_rows(self, decoding: int, waiting: int) -> int:
        """Prompt rows beside `decoding` sequences while `waiting` prompt tokens are to be computed."""
        if not decoding:
            return self.chunk_tokens
        many = waiting > MANY_CHUNKS * max(self.mixed_tokens - 1, LEAST_ROWS)
        return max((self.chunk_tokens if many else self.mixed_tokens) - decoding, LEAST_ROWS)


@dataclass(frozen=True)
class StepRates:
    """The measured steps of a worker: their times, and their number of prompt rows."""

    times: StepTimes
    budget: StepBudget


def prompt_s(times: StepTimes, budget: StepBudget, tokens: int, decoding: int, context: float) -> float:
    """Seconds until `tokens` prompt tokens are computed beside `decoding` sequences with `context` tokens.

    They count as one prompt of which nothing is cached, or as a queue of prompts as long as one chunk.
    """
    if tokens <= 0:
        return 0.0
    rows = min(budget.prompt_rows(decoding, tokens), tokens)
    return tokens / rows * times.step_s(decoding, context, rows, rows * min(tokens, 4 * rows) / 2)
