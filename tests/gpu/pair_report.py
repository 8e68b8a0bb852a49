"""The tables of the goodput campaign: what was measured beside what the simulator says of the same requests.

    python -m tests.gpu.pair_report DIR/goodput.jsonl [MORE.jsonl ...] [--rates FILE]

It knows runs. Ratios between layouts are of requests that both were sent, with a bootstrap interval of 95 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path

from eyas.bench.compare import LEVEL, mean, resampled_ratio
from eyas.simulator.cluster import ClusterLayout
from eyas.simulator.goodput import LoadOutcome
from eyas.simulator.hardware import WorkerHardware, example, read_hardware
from tests.gpu.pair_runs import Run, bears, read_runs
from tests.gpu.pair_workloads import Cluster, simulated

STATIC = ("unified", "split")
ERROR = 0.1
SURE = (0.03, 0.985)
SCAN = tuple(share / 100 for share in range(76, 127, 3))
KNOWN = frozenset(layout.value for layout in ClusterLayout)

Pick = Callable[[Run], float]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--rates", type=Path, metavar="FILE", help="what a worker does (an 8B model's)")
    args = parser.parse_args()
    hardware = read_hardware(args.rates) if args.rates else example()
    runs = sorted(read_runs(args.files), key=lambda run: run.case)
    tables = against_simulator(runs, hardware), [""], at_rates(runs), [""], knees(runs, hardware)
    print("\n".join(chain.from_iterable(tables)))


def against_simulator(runs: Sequence[Run], hardware: WorkerHardware) -> Iterator[str]:
    """A row per run. Near a knee a step that is 2 % longer halves a goodput, so the error is one of rates: of
    the rate at which the simulator has the part within the targets that was measured.
    """
    titles = ("within targets", "goodput", "simulated", "", "simulated at, per second", "error")
    yield _head("tokens in / out", "per second", "layout", *titles)
    for run in runs:
        row = (
            f"| {run.workload.name} | {run.rate:g} | {run.name} | {run.attainment:.1%} | {run.goodput:.2f} |"
        )
        if (told := _simulated(run, hardware)) is None:
            yield f"{row} - | - | - | - |"
            continue
        yield f"{row} {told.attainment:.1%} | {told.goodput:.2f} | {_like(run, told, hardware)} |"


def _like(run: Run, told: LoadOutcome, hardware: WorkerHardware) -> str:
    """The rate at which the simulator has the run's attainment, over the run's own; near 0 and 1 many do."""
    if not SURE[0] < run.attainment < SURE[1]:
        return "- | -" if abs(told.attainment - run.attainment) < ERROR else "- | !"
    kept = [(share, _simulated(run, hardware, share * run.rate)) for share in SCAN]
    above = [share for share, found in kept if found and found.attainment >= run.attainment]
    below = [share for share, found in kept if found and found.attainment < run.attainment]
    if not above or not below:
        return f"{'<' if below else '>'}{run.rate * (SCAN[0] if below else SCAN[-1]):.2f} | !"
    share = (max(above) + min(below)) / 2
    return f"{share * run.rate:.2f} | {share - 1:+.0%}{'' if abs(share - 1) <= ERROR else ' !'}"


def at_rates(runs: Sequence[Run]) -> Iterator[str]:
    """A row per load: each layout at its best mixed-step size, goodput over that of the better static one."""
    ratios = ("split over unified", "auto over the better")
    yield _head("tokens in / out", "per second", *STATIC, "auto", "tp2", *ratios)
    for (name, rate, _), group in groupby(runs, key=lambda run: run.case):
        best = _best(group)
        cells = {layout: f"{run.goodput:.2f}" for layout, run in best.items()}
        told = [cells.get(layout, "-") for layout in (*STATIC, "auto", "tp2")]
        static = [best[layout] for layout in STATIC if layout in best]
        between = _over(best.get("split"), best.get("unified"))
        better = max(static, key=lambda run: run.attainment, default=None)
        over = _over(best.get("auto"), better if len(static) == len(STATIC) else None)
        yield f"| {name} | {rate:g} | {' | '.join(told)} | {between} | {over} |"


def knees(runs: Sequence[Run], hardware: WorkerHardware) -> Iterator[str]:
    """A row per workload and layout: the rate at which 90 % keep the targets, measured and simulated."""
    yield _head("tokens in / out", "layout", "bears, per second", "simulated", "error")
    for name, group in groupby(runs, key=lambda run: run.workload.name):
        of_workload = list(group)
        for layout in dict.fromkeys(run.layout for run in of_workload):
            best = [_best(same)[layout] for same in _by_rate(of_workload, layout)]
            rate, bound = bears([(run.rate, run.attainment) for run in best])
            told = [(run.rate, found.attainment) for run in best if (found := _simulated(run, hardware))]
            other, other_bound = bears(told) if told else (0.0, "-")
            exact = told and not bound and not other_bound
            error = f"{rate / other - 1:+.1%}" if exact else "-"
            yield f"| {name} | {layout} | {bound}{rate:.2f} | {other_bound}{other:.2f} | {error} |"


def _head(*titles: str) -> str:
    return f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}"


def _by_rate(runs: Iterable[Run], layout: str) -> Iterator[list[Run]]:
    for _, group in groupby((run for run in runs if run.layout == layout), key=lambda run: run.case):
        yield list(group)


def _best(runs: Iterable[Run]) -> dict[str, Run]:
    """Of each layout, the run with the most requests within the targets."""
    best: dict[str, Run] = {}
    for run in runs:
        if run.layout not in best or run.attainment > best[run.layout].attainment:
            best[run.layout] = run
    return best


def _simulated(run: Run, hardware: WorkerHardware, rate: float | None = None) -> LoadOutcome | None:
    """At the run's rate or another one. None for a layout that the simulator does not know."""
    if run.layout not in KNOWN:
        return None
    arrivals = run.workload.arrivals(rate or run.rate, run.seed)
    cluster = Cluster(ClusterLayout(run.layout), run.mixed, run.fields["workers"], hardware)
    return simulated(run.workload, arrivals, cluster)


def _over(one: Run | None, other: Run | None) -> str:
    if one is None or other is None:
        return "-"
    found = resampled_ratio("goodput", (other.met[None], one.met[None]), mean, LEVEL)
    bounds = f" ({found.bounds[0]:.2f} to {found.bounds[1]:.2f})" if found.bounds else ""
    return f"{found.value:.3f}{bounds}"


if __name__ == "__main__":
    main()
