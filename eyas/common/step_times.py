"""A model of an engine's step time: a measured table, the pace that corrects it, and the share of prompt
steps.

The table is interpolated linearly. A step's time is the sum of three terms: the products and row kernels of
all rows, the keys and values that decode rows read, and the attention of prompt rows. The pace is the ratio
of measured to predicted times, per kind of step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from eyas.common.prompt_room import StepBudget, rows_of

FADE_S = 5.0
"""After steps of a kind that take this long, those before them have lost all but 1/e of their weight."""

ENOUGH_S = 0.3
"""The least predicted time of measured steps of a kind; with less, its pace is unknown (0.0)."""

MOST = 4.0
"""The highest ratio of a step that counts. A slower step waited for something, and counts as this ratio."""

CHANGE = 0.05
"""Paces that differ by less than this part count as equal, so that decisions based on them stay."""

WINDOW_S = 4.0
"""The time constant of `PromptShare`: after it, a step has lost all but 1/e of its weight."""


@dataclass(frozen=True)
class PiecewiseCurve:
    """A piecewise linear function, by its points, x ascending. The last line extends beyond the last
    point.
    """

    points: tuple[tuple[float, float], ...]

    def at(self, x: float) -> float:
        """The value at `x`; below the first point, the value of that point."""
        starts, lines = self._lines
        x0, y0, slope = lines[bisect_right(starts, x)]
        return y0 + slope * (x - x0)

    @cached_property
    def _lines(self) -> tuple[list[float], list[tuple[float, float, float]]]:
        """The x values at which lines begin, and the lines: a point of each, and its slope."""
        points = self.points
        lines = [(*points[0], 0.0)]
        for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
            lines.append((x0, y0, (y1 - y0) / (x1 - x0)))
        return [x for x, _ in points[:-1]], lines


@dataclass(frozen=True)
class StepPace:
    """Measured over predicted time of steps that only decode, that only compute prompts, and that do both.

    1.0: as predicted; 0.0 in the report of a worker: unknown, for lack of such steps.
    """

    decode: float = 1.0
    prompt: float = 1.0
    mixed: float = 1.0


UNSEEN = StepPace(0.0, 0.0, 0.0)
KINDS = StepPace.__dataclass_fields__.keys()


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of the parts of a step.

    `rows_ms`: by all its rows. `context_ms`: by the tokens that all decode rows together attend to.
    `pairs_ms`: per million pairs of a prompt row and a token that it attends to. `mixed_ms`: what a step with
    prompt rows and decode rows takes beyond the sum of its parts. `grain`: rows; a step with prompts is
    padded to a multiple of it. `pace`: the ratio by which recent steps took longer than predicted.
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
class StepRates:
    """The measured steps of a worker: their times, and their number of prompt rows."""

    times: StepTimes
    budget: StepBudget


def prompt_s(
    times: StepTimes, budget: StepBudget, tokens: int, queued: int, decoding: int, context: float
) -> float:
    """Seconds until `tokens` prompt tokens are computed after `queued` others, while `decoding` sequences
    with `context` tokens in all decode.

    The tokens count as one prompt without cached tokens, or as a queue of prompts as long as one chunk.
    """
    total = tokens + queued
    if total <= 0:
        return 0.0
    rows = rows_of(budget, decoding, tokens, queued)
    return total / rows * times.step_s(decoding, context, rows, rows * min(total, 4 * rows) / 2)


class PaceMeter:
    """Measures the pace from every step. The pace of a kind stays unchanged while no step of it runs."""

    def __init__(self) -> None:
        self._sums = {kind: (0.0, 0.0) for kind in KINDS}  # measured and predicted seconds, fading

    def ran(self, decoding: int, prompt_rows: int, measured_s: float, predicted_s: float) -> None:
        """Records a step with `decoding` sequences and `prompt_rows` rows of prompts, not both 0."""
        kind = "decode" if not prompt_rows else "mixed" if decoding else "prompt"
        decay = math.exp(-predicted_s / FADE_S)
        measured, predicted = self._sums[kind]
        measured_s = min(measured_s, MOST * predicted_s)
        self._sums[kind] = decay * measured + measured_s, decay * predicted + predicted_s

    @property
    def pace(self) -> StepPace:
        """The pace by kind of step; 0.0 for a kind with too few steps."""
        return StepPace(
            **{
                kind: measured / predicted if predicted >= ENOUGH_S else 0.0
                for kind, (measured, predicted) in self._sums.items()
            }
        )


def mean_pace(reported: Iterable[StepPace]) -> StepPace:
    """The mean pace of identical workers.

    A kind of step that none of them has run gets the pace of the fastest kind, so that it will be tried.
    """
    paces, means = list(reported), {}
    for kind in KINDS:
        seen = [value for pace in paces if (value := getattr(pace, kind))]
        if seen:
            means[kind] = sum(seen) / len(seen)
    best = min(means.values(), default=1.0)
    return StepPace(**{kind: means.get(kind, best) for kind in KINDS})


def alike(one: StepPace, other: StepPace) -> bool:
    """Whether two paces differ by at most CHANGE in every kind."""
    pairs = [(getattr(one, kind), getattr(other, kind)) for kind in KINDS]
    return all(abs(new - old) <= CHANGE * old for new, old in pairs)


class PromptShare:
    """The fading share of time in which steps with prompts ran, from every step in order.

    Times are seconds of one clock. Time without steps counts as time without prompts.
    """

    def __init__(self) -> None:
        self._share = 0.0
        self._end_s = -math.inf

    def ran(self, start_s: float, end_s: float, *, prompts: bool) -> None:
        """Records a step; `prompts`: it computed prompt rows. Time that overlaps an earlier step belongs to
        that step.
        """
        start_s = max(start_s, self._end_s)
        end_s = max(start_s, end_s)
        decay = math.exp(-(end_s - start_s) / WINDOW_S)
        self._share = decay * self.at(start_s) + (1.0 - decay if prompts else 0.0)
        self._end_s = end_s

    def at(self, now_s: float) -> float:
        """The share, from 0 to 1."""
        return self._share and self._share * math.exp(-(now_s - self._end_s) / WINDOW_S)
