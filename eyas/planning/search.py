"""The best layout for a load: goodput of each, and the number of workers that a rate needs.

The closed-form estimate says where to look, the simulator what is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from eyas.planning.inquiry import PlanRequest
from eyas.simulator.cluster import ClusterLayout, ClusterShape
from eyas.simulator.goodput import ATTAINMENT, GoodputKnee, best_knee, measure
from gateway.routing.capacity import capacity

STEP = 1 / 32
"""By this part of all workers, or by one, a split beside the estimated best has more or fewer for prompts."""

LARGE = 16
"""A simulation of this number of workers, or of more, takes long."""

ROUGH = 1.05
"""To this factor the knee of a large cluster is searched."""

MOST_WORKERS = 4096


@dataclass(frozen=True)
class LayoutOption:
    """A layout of `workers`, `prefill` of them for prompts (if it is split), and the rate it bears."""

    layout: ClusterLayout
    workers: int
    prefill: int
    knee: GoodputKnee

    @property
    def per_worker(self) -> float:
        """Requests per second and worker within the targets."""
        return self.knee.rate / self.workers


def layouts(inquiry: PlanRequest, workers: int) -> list[LayoutOption]:
    """Returns the capacity of each layout: unified, the best split if there are two workers or more, and
    auto.
    """
    guess = max(capacity(inquiry.mix, workers, 0, inquiry.rates), 1.0)
    options = [_best(inquiry, ClusterLayout.UNIFIED, workers, [0], guess)]
    if workers > 1:
        options.append(_best(inquiry, ClusterLayout.SPLIT, workers, likely_splits(inquiry, workers), guess))
        guess = max(option.knee.rate for option in options) or guess
        options.append(_best(inquiry, ClusterLayout.AUTO, workers, [0], guess))
    return options


def likely_splits(inquiry: PlanRequest, workers: int) -> list[int]:
    """Numbers of prefill workers worth a simulation: the best one by the estimate, then those beside it."""
    best, step = _estimated(inquiry, workers), max(1, round(STEP * workers))
    return [n for n in (best, best - step, best + step) if 0 < n < workers]


def needed(inquiry: PlanRequest, layout: ClusterLayout, rate: float) -> tuple[int, int] | None:
    """The fewest workers that bear `rate`, and how many of them compute prompts; None: not even MOST_WORKERS.

    A split needs a worker for each role; fewer than the answer were tried, too.
    """
    workers = _first_guess(inquiry, layout, rate)
    if workers is None:
        return None
    fewest = _bearing(inquiry, layout, workers, rate)
    while fewest is None:
        workers += max(workers // 20, 1)
        if workers > MOST_WORKERS:
            return None
        fewest = _bearing(inquiry, layout, workers, rate)
    least = 2 if layout is ClusterLayout.SPLIT else 1
    while workers > least and (fewer := _bearing(inquiry, layout, workers - 1, rate)) is not None:
        workers, fewest = workers - 1, fewer
    return workers, fewest


def _best(
    inquiry: PlanRequest, layout: ClusterLayout, workers: int, prefilling: list[int], guess: float
) -> LayoutOption:
    """The best of a layout's numbers of prefill workers."""
    shapes = [ClusterShape(inquiry.hardware, workers, layout, inquiry.targets, n) for n in prefilling]
    effort = inquiry.effort if workers < LARGE else replace(inquiry.effort, precision=ROUGH)
    shape, knee = best_knee(shapes, inquiry.draw, effort, guess)
    return LayoutOption(layout, workers, shape.prefill, knee)


def _estimated(inquiry: PlanRequest, workers: int) -> int:
    mix, rates = inquiry.mix, inquiry.rates
    return max(range(1, workers), key=lambda n: capacity(mix, workers, n, rates))


def _prefilling(inquiry: PlanRequest, layout: ClusterLayout, workers: int) -> Iterator[int]:
    """The numbers of prefill workers that are worth a simulation."""
    yield from (likely_splits(inquiry, workers) if layout is ClusterLayout.SPLIT else [0])


def _first_guess(inquiry: PlanRequest, layout: ClusterLayout, rate: float) -> int | None:
    """Estimates the number of workers, doubling from one worker and then scaling down."""
    workers = 2
    while workers <= MOST_WORKERS:
        prefill = _estimated(inquiry, workers) if layout is ClusterLayout.SPLIT else 0
        bears = capacity(inquiry.mix, workers, prefill, inquiry.rates)
        if bears >= rate:
            return max(round(workers * rate / bears), 2 if layout is ClusterLayout.SPLIT else 1)
        workers *= 2
    return None


def _bearing(inquiry: PlanRequest, layout: ClusterLayout, workers: int, rate: float) -> int | None:
    """Returns the number of prefill workers with which this layout bears the rate; None: it does not."""
    for prefill in _prefilling(inquiry, layout, workers):
        shape = ClusterShape(inquiry.hardware, workers, layout, inquiry.targets, prefill)
        if measure(shape, inquiry.draw, rate, inquiry.effort).attainment >= ATTAINMENT:
            return prefill
    return None
