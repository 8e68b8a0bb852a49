"""`eyas bench compare A.jsonl B.jsonl`: is B faster than A, and by how much?

Runs of the same settings are compared, request by request: ratios of latencies with bootstrap confidence
intervals. Both servers answered the same requests, so requests are resampled in pairs; with repeated runs of
a server, its runs are resampled too.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas.bench.output import check_writable
from eyas.bench.plot_style import check_plot
from eyas.bench.plots import plot_runs
from eyas.bench.saved import Floats, SavedRun, read_runs
from eyas.common.errors import ConfigError

SETTINGS = (
    "case",
    "dataset_name",
    "num_prompts",
    "request_rate",
    "max_concurrency",
    "random_input_len",
    "random_output_len",
    "random_range_ratio",
    "sharegpt_output_len",
    "seed",
)
TIMES = ("ttft", "tpot", "e2e")
Statistic = Callable[[Floats], Any]  # the last axis is the sample


def mean(samples: Floats) -> Any:
    """The mean over the last axis."""
    return samples.mean(axis=-1)


def percentile(share: float) -> Statistic:
    """The percentile at `share` (0 to 1) over the last axis."""
    return lambda samples: np.quantile(samples, share, axis=-1)


STATISTICS = {  # and the share of requests that are below it
    "mean": (mean, 0.5),
    "median": (percentile(0.5), 0.5),
    "p90": (percentile(0.9), 0.9),
    "p99": (percentile(0.99), 0.99),
}
CHANCE = (
    "The intervals hold for all ratios of a table together ({level:.0%}). They cover chance among the\n"
    "requests of these runs; what changes from one run to the next only if a file has several runs."
)
SEED = 1
RESAMPLES = 4000
AT_ONCE = 1_000_000  # numbers in memory
FEWEST = 10  # requests on the far side of a percentile, for an interval
LEVEL = 0.95


@dataclass(frozen=True)
class RunComparison:
    """The runs of the same settings in two files, and the ratios of their latencies (seconds)."""

    settings: dict[str, Any]
    runs: tuple[list[SavedRun], list[SavedRun]]
    requests: int  # that succeeded in every run
    ratios: list[RatioInterval]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `eyas bench compare`."""
    parser.add_argument("first", type=Path, metavar="A.jsonl", help="runs with --output-details")
    parser.add_argument("second", type=Path, metavar="B.jsonl", help="others with the same settings and seed")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a figure of both: .png or .svg")


def run(args: argparse.Namespace) -> int:
    """Prints a table per settings that both files have; returns 0."""
    if args.plot:
        check_writable("plot", args.plot)
        check_plot(args.plot)
    comparisons = compare(read_runs(args.first), read_runs(args.second))
    names = (str(args.first), str(args.second))
    for comparison in comparisons:
        print(table(comparison, names), end="\n\n")
    print(CHANCE.format(level=LEVEL))
    if args.plot:
        first = comparisons[0]
        shown = [run for side in first.runs for run in side[:1]]
        plot_runs(shown, args.plot, _said(first.settings))
        print(f"{args.plot} shows {_said(first.settings)}")
    return 0


def compare(first: Sequence[SavedRun], second: Sequence[SavedRun]) -> list[RunComparison]:
    """A comparison per settings.

    Raises ConfigError if the two sides have none in common, or if a run was interrupted.
    """
    for run in (*first, *second):
        if run.figures.get("complete") is False:
            raise ConfigError(f"{run.name}: a run was interrupted: its requests cannot be paired with others")
    sides = _by_settings(first), _by_settings(second)
    if common := [key for key in sides[0] if key in sides[1]]:
        return [_compared(sides[0][key], sides[1][key]) for key in common]
    one, other = settings(first[0]), settings(second[0])
    differ = [
        f"{key} {one.get(key)} and {other.get(key)}" for key in SETTINGS if one.get(key) != other.get(key)
    ]
    raise ConfigError(f"the files have no run of the same settings: {', '.join(differ)}")


def settings(run: SavedRun) -> dict[str, Any]:
    """The settings that must agree between two runs, as far as their lines say them, and the number of
    requests.
    """
    said = {key: run.figures[key] for key in SETTINGS if run.figures.get(key) is not None}
    return {**said, "num_prompts": run.requests}


def _by_settings(runs: Sequence[SavedRun]) -> dict[str, list[SavedRun]]:
    out: dict[str, list[SavedRun]] = {}
    for run in runs:
        out.setdefault(json.dumps(settings(run), sort_keys=True), []).append(run)
    return out


def _compared(first: list[SavedRun], second: list[SavedRun]) -> RunComparison:
    """Ratios over the requests that have the figure in every run."""
    pairs = {name: _in_pairs(first, second, name) for name in TIMES}
    candidates = [
        (time, name, enough(sides[0].shape[1], share))
        for time, sides in pairs.items()
        for name, (_, share) in STATISTICS.items()
        if sides[0].shape[1]
    ]
    level = 1 - (1 - LEVEL) / max(1, sum(has_level for _, _, has_level in candidates))
    ratios = [
        resampled_ratio(f"{time} {name}", pairs[time], STATISTICS[name][0], level if has_level else None)
        for time, name, has_level in candidates
    ]
    return RunComparison(settings(first[0]), (first, second), pairs["e2e"][0].shape[1], ratios)


def _in_pairs(first: list[SavedRun], second: list[SavedRun], name: str) -> tuple[Floats, Floats]:
    """[runs, requests] of either side, of the requests that have this figure in all runs."""
    attribute = {"ttft": "ttfts_s", "tpot": "tpots_s", "e2e": "latencies_s"}[name]
    one, other = (np.stack([getattr(run, attribute) for run in side]) for side in (first, second))
    known = ~np.isnan(np.concatenate((one, other))).any(axis=0)
    return one[:, known], other[:, known]


# --- words ---------------------------------------------------------------------------------------------


def table(comparison: RunComparison, names: tuple[str, str]) -> str:
    """The comparison for people: A, B, B / A with its interval, and what that says."""
    runs = comparison.runs
    lines = [_said(comparison.settings)]
    for letter, name, side in zip("AB", names, runs, strict=True):
        failed = sum(run.failed for run in side)
        speed = float(np.mean([run.figures.get("output_throughput") or np.nan for run in side]))
        count = f"{len(side)} run{'s' * (len(side) > 1)}"
        lines.append(f"  {letter}: {name}, {count}, {failed} failed requests, {speed:,.1f} output tokens/s")
    lines.append(
        f"  {comparison.requests} of {runs[0][0].requests} requests succeeded everywhere and are compared"
    )
    lines.append(f"  {'':12}{'A ms':>10}{'B ms':>10}{'B / A':>8}   {'interval':16}")
    lines += [_line(ratio) for ratio in comparison.ratios]
    return "\n".join(lines)


def _line(ratio: RatioInterval) -> str:
    interval = "-" if ratio.bounds is None else "{:.3f} to {:.3f}".format(*ratio.bounds)
    numbers = f"{1e3 * ratio.first:10.2f}{1e3 * ratio.second:10.2f}{ratio.value:8.3f}"
    return f"  {ratio.name:12}{numbers}   {interval:16} {verdict(ratio)}"


def verdict(ratio: RatioInterval) -> str:
    """A verdict on B from a ratio of times."""
    if ratio.bounds is None:
        return "too few requests to tell"
    if not ratio.differs:
        return "no difference shown"
    return f"B is {'faster' if ratio.value < 1 else 'slower'}"


def _said(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


@dataclass(frozen=True)
class RatioInterval:
    """`second` / `first` of one figure, and between which bounds it lies; None where requests are too few."""

    name: str
    first: float
    second: float
    bounds: tuple[float, float] | None

    @property
    def value(self) -> float:
        """The ratio."""
        return self.second / self.first if self.first else math.nan

    @property
    def differs(self) -> bool:
        """True if the interval leaves out 1."""
        return self.bounds is not None and not self.bounds[0] <= 1.0 <= self.bounds[1]


def enough(requests: int, share: float) -> bool:
    """True if this number of requests tells something about the percentile at `share`."""
    return round(requests * (1 - share), 6) >= FEWEST  # 100 * (1 - 0.9) is a little below 10


def resampled_ratio(
    name: str, sides: tuple[Floats, Floats], statistic: Statistic, level: float | None
) -> RatioInterval:
    """The ratio of a statistic of two arrays [runs, requests] without NaN; a column is one request in both.

    `level`: of the interval; None: there is to be none. There is none either if the first may be 0.
    """
    first, second = (float(statistic(side.ravel())) for side in sides)
    if level is None or not first:
        return RatioInterval(name, first, second, None)
    ratios = np.concatenate(_resampled(sides, statistic, np.random.default_rng(SEED)))
    if not np.isfinite(ratios).all():
        return RatioInterval(name, first, second, None)
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return RatioInterval(name, first, second, (float(low), float(high)))


def _resampled(sides: tuple[Floats, Floats], statistic: Statistic, rng: np.random.Generator) -> list[Floats]:
    """RESAMPLES ratios in portions: requests drawn once for both sides, runs for each side."""
    requests = sides[0].shape[1]
    portion = max(1, AT_ONCE // max(side.size for side in sides))
    out = []
    for done in range(0, RESAMPLES, portion):
        count = min(portion, RESAMPLES - done)
        columns = rng.integers(requests, size=(count, 1, requests))
        values = []
        for side in sides:
            rows = rng.integers(len(side), size=(count, len(side), 1))
            values.append(statistic(side[rows, columns].reshape(count, -1)))
        with np.errstate(divide="ignore", invalid="ignore"):
            out.append(values[1] / values[0])
    return out
