"""Goodput per GPU of every layout for the campaign's loads, simulated: a table of docs/planning.md.

    python -m tests.gpu.pair_layouts [--gpus 8] [--loads 256/512 chats ...]

`eyas plan` answers for one load of alike lengths; this answers for chats and bursts, too. No estimate tells
where to look, so every split is tried. It knows loads and targets, and refuses to know measurements.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from eyas.planning.command import NOISE
from eyas.simulator.cluster import ClusterLayout, ClusterShape
from eyas.simulator.goodput import Draw, GoodputKnee, SearchEffort, best_knee, find_knee
from eyas.simulator.hardware import example
from eyas.simulator.workload import RandomTraffic, poisson
from gateway.routing.placement import LatencyTargets
from tests.gpu.pair_workloads import WORKLOADS

LOADS: dict[str, Draw] = {name: workload.draw for name, workload in WORKLOADS.items()}
LOADS["16 at once"] = partial(poisson, RandomTraffic(1024, 256, burst=16))

TARGETS = (LatencyTargets(1.0, 0.008), LatencyTargets(1.0, 0.015))
HEAD = (
    "| load | GPUs | TPOT within | unified | split | `auto` | split over unified | `auto` over the better |"
)


@dataclass(frozen=True)
class Question:
    """A cluster of `workers`, a load, its targets, and how long it is played."""

    workers: int
    draw: Draw
    targets: LatencyTargets
    effort: SearchEffort

    def shape(self, layout: ClusterLayout, prefill: int = 0) -> ClusterShape:
        """The cluster in a layout."""
        return ClusterShape(example(), self.workers, layout, self.targets, prefill)

    def knee(self, layout: ClusterLayout, guess: float) -> GoodputKnee:
        """What a layout bears that has no number of prefill workers."""
        return find_knee(self.shape(layout), self.draw, self.effort, guess)


def best_split(asked: Question, guess: float) -> tuple[int, GoodputKnee]:
    """The number of prefill workers that bears most, and what it bears."""
    shapes = [asked.shape(ClusterLayout.SPLIT, n) for n in range(1, asked.workers)]
    best, knee = best_knee(shapes, asked.draw, asked.effort, guess)
    return best.prefill, knee


def row(name: str, asked: Question) -> str:
    """A line of the table: requests per second and GPU, and two ratios."""
    unified = asked.knee(ClusterLayout.UNIFIED, 4.0 * asked.workers).rate
    prefill, split = best_split(asked, unified)
    better = max(unified, split.rate)
    auto = asked.knee(ClusterLayout.AUTO, better).rate
    each = [f"{rate / asked.workers:.2f}" for rate in (unified, split.rate, auto)]
    each[1] += f" ({prefill} + {asked.workers - prefill})"
    bound = f"{1e3 * asked.targets.tpot_s:g} ms"
    ratios = _over(split.rate, unified), _over(auto, better)
    return f"| {' | '.join([name, str(asked.workers), bound, *each, *ratios])} |"


def _over(one: float, other: float) -> str:
    """A ratio of rates; those within NOISE of one another are alike, and of nothing there is none."""
    if not other:
        return "-"
    value = one / other
    return "1" if abs(value - 1) <= NOISE else f"{value:.2f}"


def rows(workers: int, loads: list[str], effort: SearchEffort) -> Iterator[str]:
    """A line per load and bound."""
    for name in loads:
        for targets in TARGETS:
            yield row(name, Question(workers, LOADS[name], targets, effort))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=8, help="workers, one per GPU (%(default)d)")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--seconds", type=float, default=15.0, help="of load that count (%(default)g)")
    args = parser.parse_args()
    print(f"{HEAD}\n|---|--:|---|--:|--:|--:|--:|--:|")
    for line in rows(args.gpus, args.loads, SearchEffort(seconds=args.seconds)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
