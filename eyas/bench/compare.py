"""`eyas bench compare A.jsonl B.jsonl`: is B faster than A, and by how much?

Runs of the same settings are compared, request by request.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas.bench import bootstrap
from eyas.bench.bootstrap import RatioInterval
from eyas.bench.files import check_writable
from eyas.bench.plots.runs import plot_runs
from eyas.bench.plots.style import check_plot
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
STATISTICS = {  # and the share of requests that are below it
    "mean": (bootstrap.mean, 0.5),
    "median": (bootstrap.percentile(0.5), 0.5),
    "p90": (bootstrap.percentile(0.9), 0.9),
    "p99": (bootstrap.percentile(0.99), 0.99),
}
CHANCE = (
    "The intervals hold for all ratios of a table together ({level:.0%}). They cover chance among the\n"
    "requests of these runs; what changes from one run to the next only if a file has several runs."
)


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
    print(CHANCE.format(level=bootstrap.LEVEL))
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
        (time, name, bootstrap.enough(sides[0].shape[1], share))
        for time, sides in pairs.items()
        for name, (_, share) in STATISTICS.items()
        if sides[0].shape[1]
    ]
    level = 1 - (1 - bootstrap.LEVEL) / max(1, sum(has_level for _, _, has_level in candidates))
    ratios = [
        bootstrap.ratio(f"{time} {name}", pairs[time], STATISTICS[name][0], level if has_level else None)
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
