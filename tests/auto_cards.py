"""`auto` beside the better static layout on two cards that differ from the built-in table, simulated.

    python -m tests.auto_cards [--scales 0.6 1.4] [--cold]

Steps take so many times what the table of an H200 says: all of them, or what memory bounds (few rows, and
the keys and values of decoding sequences). Workers measure their steps at their start, so `auto` knows them.
At the rate that the better of `unified` and `split` bears: goodput of `auto` over that of this layout. With
`--cold` requests count from the first one on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

from eyas.common.step_times import PiecewiseCurve
from eyas.simulator.cluster import ClusterLayout
from eyas.simulator.goodput import LoadOutcome
from eyas.simulator.hardware import WorkerHardware, example
from tests.gpu.pair_workloads import SEED, WORKLOADS, Cluster, Workload, knee_between, simulated

SCALES = (0.6, 0.8, 1.0, 1.2, 1.4)
PRECISION = 1.03
LONGER = 4
"""Loads last so many times as long as those that are measured: which layout is better is no chance then."""
FEW, MANY = 128, 512
"""Up to so many rows memory bounds a step, and from so many arithmetic."""
STATIC = (ClusterLayout.UNIFIED, ClusterLayout.SPLIT)


def all_of_it(scale: float) -> WorkerHardware:
    """Every step takes `scale` times as long."""
    made = example()
    times = made.times
    return replace(
        made,
        times=replace(
            times,
            rows_ms=_scaled(times.rows_ms, lambda _: scale),
            context_ms=_scaled(times.context_ms, lambda _: scale),
            pairs_ms=scale * times.pairs_ms,
            mixed_ms=scale * times.mixed_ms,
        ),
    )


def memory(scale: float) -> WorkerHardware:
    """What waits for memory takes `scale` times as long; as much arithmetic per second."""
    made = example()
    times = made.times

    def part(rows: float) -> float:
        bound = min(max((MANY - rows) / (MANY - FEW), 0.0), 1.0)
        return 1.0 + (scale - 1.0) * bound

    context = _scaled(times.context_ms, lambda _: scale)
    return replace(made, times=replace(times, rows_ms=_scaled(times.rows_ms, part), context_ms=context))


def _scaled(curve: PiecewiseCurve, factor: Callable[[float], float]) -> PiecewiseCurve:
    """The curve times a factor of x; it never falls."""
    points, most = [], 0.0
    for x, y in curve.points:
        most = max(most, y * factor(x))
        points.append((x, most))
    return PiecewiseCurve(tuple(points))


CARDS = {"all": all_of_it, "memory": memory}


def played(load: Workload, layout: ClusterLayout, card: WorkerHardware, rate: float) -> LoadOutcome:
    """Two workers."""
    return simulated(load, load.arrivals(rate, SEED), Cluster(layout, hardware=card))


def knee(load: Workload, layout: ClusterLayout, card: WorkerHardware) -> float:
    """Requests per second of which enough keep their targets; 0.0: none that was tried."""
    lowest = load.knee / 64
    borne = knee_between(load, Cluster(layout, hardware=card), lowest, 4 * load.knee, PRECISION)
    return borne if borne > lowest else 0.0


def share(load: Workload, card: WorkerHardware) -> tuple[str, float, float]:
    """(the better layout, its knee, the goodput of `auto` there over its own)."""
    knees = {layout: knee(load, layout, card) for layout in STATIC}
    best = max(STATIC, key=knees.__getitem__)
    if not knees[best]:
        return "none", 0.0, 1.0
    goodput = [played(load, layout, card, knees[best]).goodput for layout in (ClusterLayout.AUTO, best)]
    return best.value, knees[best], goodput[0] / goodput[1]


def main(words: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scales", type=float, nargs="+", default=SCALES)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--cold", action="store_true", help="requests before the layout has settled count too"
    )
    args = parser.parse_args(words)
    print(f"| steps | {' | '.join(args.workloads)} |")
    print(f"|---|{'--:|' * len(args.workloads)}")
    for name, card in CARDS.items():
        for scale in args.scales:
            cells = []
            for load in (WORKLOADS[one] for one in args.workloads):
                load = replace(load, seconds=LONGER * load.seconds, warm_s=0.0 if args.cold else load.warm_s)
                best, rate, ratio = share(load, card(scale))
                cells.append(f"{ratio:.2f} ({best} {rate:.2f})")
            print(f"| {name} x {scale:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
