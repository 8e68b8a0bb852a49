"""The highest rate at which enough requests keep their targets, found by playing a load at several rates.

More load never helps: the search halves the gap between a rate that was borne and one that was not. Every
layout sees the same draws, so that chance is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eyas.simulator.cluster import ClusterShape, play
from eyas.simulator.outcome import LoadOutcome, outcome
from eyas.simulator.workload import SimulatedRequest

ATTAINMENT = 0.9
"""The part of the requests that must keep every target."""

WARM_UP_S = 15.0
"""Earlier requests are not counted: batches fill, and preferences settle."""

LOWEST, HIGHEST = 1 / 64, 65536.0

Draw = Callable[[float, int, int], Sequence[SimulatedRequest]]
"""Rate per second, number of requests, seed."""


@dataclass(frozen=True)
class SearchEffort:
    """How a knee is searched: to the factor `precision`, by loads that last `seconds` after the warm-up, or
    as long as `fewest` requests take.
    """

    seconds: float = 90.0
    fewest: int = 300
    precision: float = 1.02
    seed: int = 1


@dataclass(frozen=True)
class GoodputKnee:
    """The highest rate per second that was borne, 0.0 if none was, and what happened at it."""

    rate: float
    outcome: LoadOutcome | None


def measure(shape: ClusterShape, draw: Draw, rate: float, effort: SearchEffort) -> LoadOutcome:
    """Simulates one rate once the cluster is warm."""
    count = max(effort.fewest, round(rate * effort.seconds)) + round(rate * WARM_UP_S)
    return outcome(play(shape, draw(rate, count, effort.seed)), shape.targets, WARM_UP_S)


def find_knee(shape: ClusterShape, draw: Draw, effort: SearchEffort, guess: float) -> GoodputKnee:
    """The knee of a cluster, looked for from `guess` requests per second."""
    best, missed = GoodputKnee(0.0, None), float("inf")
    rate, factor = min(max(guess, LOWEST), HIGHEST), 1.25
    while missed > best.rate * effort.precision and LOWEST <= rate <= HIGHEST:
        outcome = measure(shape, draw, rate, effort)
        if outcome.attainment >= ATTAINMENT:
            best = GoodputKnee(rate, outcome)
        else:
            missed = rate
        if best.rate and missed < float("inf"):
            rate = (best.rate * missed) ** 0.5
        else:
            rate = rate * factor if best.rate else rate / factor
            factor *= factor
    return best


def best_knee(
    shapes: Sequence[ClusterShape], draw: Draw, effort: SearchEffort, guess: float
) -> tuple[ClusterShape, GoodputKnee]:
    """The shape that bears most, and its knee. `shapes`: one or more, the likeliest first.

    Only a shape that bears more than the best before it is searched: the others cost one play each.
    """
    best, knee = shapes[0], find_knee(shapes[0], draw, effort, guess)
    for shape in shapes[1:]:
        more = knee.rate * effort.precision
        if not more or measure(shape, draw, more, effort).attainment >= ATTAINMENT:
            best, knee = shape, find_knee(shape, draw, effort, more or guess)
    return best, knee
