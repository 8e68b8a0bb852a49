"""The ratio of measured to predicted step times, by kind of step."""

from __future__ import annotations

import math
from collections.abc import Iterable

from eyas.common.step_times import StepPace

FADE_S = 5.0
"""After steps of a kind that take this long, those before them have lost all but 1/e of their weight."""

ENOUGH_S = 0.3
"""Predicted time of the steps of a kind that count; with less, nothing is said of it."""

MOST = 4.0
"""A step that took longer than this many times the prediction waited for something: it counts as so long."""

CHANGE = 0.05
"""Paces within this part of one another are alike: what follows from them need not change."""

KINDS = StepPace.__dataclass_fields__.keys()


class PaceMeter:
    """Told of every step. What it says of a kind stays as it is while no such step runs."""

    def __init__(self) -> None:
        self._sums = {kind: (0.0, 0.0) for kind in KINDS}  # measured and predicted seconds, fading

    def ran(self, decoding: int, prompt_rows: int, measured_s: float, predicted_s: float) -> None:
        """A step ran: `decoding` sequences and `prompt_rows` rows of prompts, at least one of either."""
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
    """The mean of what alike workers say.

    Steps of which none of them has seen any are taken to be as fast as the fastest kind: so they are tried.
    """
    paces, means = list(reported), {}
    for kind in KINDS:
        seen = [value for pace in paces if (value := getattr(pace, kind))]
        if seen:
            means[kind] = sum(seen) / len(seen)
    best = min(means.values(), default=1.0)
    return StepPace(**{kind: means.get(kind, best) for kind in KINDS})


def alike(one: StepPace, other: StepPace) -> bool:
    """Whether they differ by so little that nothing follows from it."""
    pairs = [(getattr(one, kind), getattr(other, kind)) for kind in KINDS]
    return all(abs(new - old) <= CHANGE * old for new, old in pairs)
