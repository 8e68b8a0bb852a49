"""`eyas bench sweep`: servers under rising load, up to the rate at which they no longer keep an SLO."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.bench.figures import figures, warn
from eyas.bench.http import MeasuredServer
from eyas.bench.measure import LoadMeasurement, run_interruptible
from eyas.bench.output import append_line, check_writable
from eyas.bench.plan import TRACE, add_plan, make_plan
from eyas.bench.plot_style import check_plot, check_series
from eyas.bench.plots import plot_sweep
from eyas.bench.records import LatencySlo
from eyas.cluster.screen import run_on_screen
from eyas.cluster.serve import LocalCluster
from eyas.commands import INTERRUPTED
from eyas.common.errors import ConfigError
from eyas.configuration import client_key, own_config
from eyas.flags import add_engine, http_url
from eyas.layout_flags import add_layout

BORNE = 0.9  # the share of requests within the SLO from which a rate counts as borne
SECONDS = 30.0  # for how long each rate is sent
FEWEST = 20  # requests at a rate, however low it is
COLUMNS = {
    "server": "server",
    "requests/s": "request_rate",
    "goodput": "goodput",
    "within SLO": "slo_attainment",
    "tokens/s": "output_throughput",
    "TTFT p50 ms": "median_ttft_ms",
    "p99 ": "p99_ttft_ms",
    "TPOT p50 ms": "median_tpot_ms",
    "p99": "p99_tpot_ms",
    "failed": "failed",
}

Line = dict[str, Any]
Measure = Callable[[str, float], Awaitable[Line]]  # of a server, by name, at a rate


START = 1.0  # requests per second
LOWEST, HIGHEST = 1 / 64, 4096.0
PRECISION = 1.1  # the knee is known when the lowest rate that was not borne is at most this times the highest


# Chooses rates to load a server with, to find the highest one that it bears. Rates are doubled until one is
# not borne; then the gap is halved.
def next_rate(borne: Mapping[float, bool]) -> float | None:
    """The next rate to try, requests per second, given those that were tried; None: the knee is known."""
    if not borne:
        return START
    good, bad = knee(borne), _lowest_missed(borne)
    if good is None:
        return min(borne) / 2 if min(borne) > LOWEST else None
    if bad is None:
        return 2 * good if good < HIGHEST else None
    return _rounded(math.sqrt(good * bad)) if bad / good > PRECISION else None


def knee(borne: Mapping[float, bool]) -> float | None:
    """The highest rate below all that were not borne; None if there is none."""
    limit = _lowest_missed(borne) or math.inf
    return max((rate for rate, was in borne.items() if was and rate < limit), default=None)


def _lowest_missed(borne: Mapping[float, bool]) -> float | None:
    return min((rate for rate, was in borne.items() if not was), default=None)


def _rounded(rate: float) -> float:
    """Three digits, for people."""
    return float(f"{rate:.3g}")


@dataclass
class RateSweep:
    """Rates to try, none: until the knee is known; and every line so far, by server."""

    measure: Measure
    rates: tuple[float, ...]
    tell: Callable[[Line], None]
    lines: dict[str, list[Line]] = field(default_factory=dict)
    complete: bool = True

    async def server(self, name: str) -> None:
        """Loads one server at every rate. An interrupted run ends the sweep: `complete` is then False."""
        lines = self.lines.setdefault(name, [])
        while self.complete and (rate := self._next(name)) is not None:
            line = await self.measure(name, rate)
            self.complete = line["complete"]
            lines.append(line)
            self.tell(line)

    def knee(self, name: str) -> float | None:
        """The highest rate that a server bore, requests per second; None if it bore none."""
        return knee(self._borne(name))

    def _next(self, name: str) -> float | None:
        borne = self._borne(name)
        if self.rates:
            return next((rate for rate in self.rates if rate not in borne), None)
        return next_rate(borne)

    def _borne(self, name: str) -> dict[float, bool]:
        lines = (line for line in self.lines.get(name, []) if line["complete"])
        return {line["request_rate"]: line["slo_attainment"] >= BORNE for line in lines}


# --- the command ---------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `eyas bench sweep`."""
    add = parser.add_argument_group("servers").add_argument
    text = "a running server, and its name in figures; repeat it for more (a cluster of its own)"
    add("--url", type=named_url, action="append", default=[], metavar="[NAME=]URL", help=text)
    add("--api-key", metavar="K", help="their key ($EYAS_API_KEY)")
    add("--ca", metavar="FILE", help="the authorities that https trusts (the system's)")
    add = parser.add_argument_group("sweep").add_argument
    add("--rates", type=rates, default=(), metavar="R,...", help="requests per second (up to the knee)")
    add("--output-file", type=Path, metavar="FILE", help="append one JSON line per run")
    add("--output-details", action="store_true", help="the line also has every request")
    add("--plot", type=Path, metavar="FILE", help="one figure of all servers: .png or .svg")
    add_plan(parser)
    add_layout(parser)
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    _check(args)
    if args.url:
        servers = {name: MeasuredServer(url, client_key(args), args.ca) for name, url in args.url}
        return int(run_interruptible(sweep(args, servers)))

    async def work(cluster: LocalCluster) -> int:
        return await sweep(args, {cluster.model: MeasuredServer(cluster.url)})

    return run_on_screen(own_config(args), work, quiet=True)


def _check(args: argparse.Namespace) -> None:
    if args.request_rate != float("inf"):
        raise ConfigError("--request-rate: a sweep tries many rates: see --rates", param="request-rate")
    if args.dataset_name == TRACE:
        raise ConfigError("--dataset-name: a trace has times of its own, and no rate", param="dataset-name")
    if args.slo is None and not args.rates:
        raise ConfigError("--slo: the knee is where it is missed: give one, or --rates", param="slo")
    if len({name for name, _ in args.url}) < len(args.url):
        raise ConfigError("--url: two servers have the same name: give NAME=URL", param="url")
    check_writable("output-file", args.output_file)
    if args.plot:
        check_writable("plot", args.plot)
        check_plot(args.plot)
        check_series(len(args.url))
    make_plan(_at(args, 1.0))  # a wrong flag fails before anything is measured


async def sweep(args: argparse.Namespace, servers: Mapping[str, MeasuredServer]) -> int:
    """Loads one server after the other; prints, writes and draws. Gives the exit code."""
    slo = LatencySlo({}) if args.slo is None else LatencySlo.parse(args.slo)

    async def measure(name: str, rate: float) -> Line:
        measurement = await LoadMeasurement.begin(make_plan(_at(args, rate)), servers[name])
        result = await measurement.run(lambda record: None)
        warn(result)
        return {"server": name, **figures(result, slo, details=args.output_details)}

    def tell(line: Line) -> None:
        print(_cells(line), flush=True)
        append_line(args.output_file, line)

    print("".join(f"{title:>13}" for title in COLUMNS))
    swept = RateSweep(measure, args.rates, tell)
    for name in servers:
        await swept.server(name)
    if args.plot:
        bounds_ms = {kind: 1e3 * bound for kind, bound in slo.bounds_s.items()}
        plot_sweep(swept.lines, bounds_ms, args.plot, _heading(args))
    return _end(swept, slo)


def _at(args: argparse.Namespace, rate: float) -> argparse.Namespace:
    """The flags of one run. Each rate has a seed of its own, so that prompts which are drawn are in no cache.

    The servers have the same ones.
    """
    count = args.num_prompts or max(FEWEST, round(SECONDS * rate))
    seed = args.seed + round(1000 * rate)
    return argparse.Namespace(**{**vars(args), "request_rate": rate, "num_prompts": count, "seed": seed})


def _end(swept: RateSweep, slo: LatencySlo) -> int:
    """Tells every server's knee. 1 if some server bore no rate, 130 if the sweep was interrupted."""
    missed = False
    for name, lines in swept.lines.items():
        within = f"with {BORNE:.0%} of the requests within {slo}" if slo.bounds_s else "without failures"
        if (rate := swept.knee(name)) is not None:
            print(f"{name} bears {rate:g} requests per second {within}")
        elif tried := [line["request_rate"] for line in lines if line["complete"]]:
            missed = True
            lowest = f"the lowest tried was {min(tried):g} per second"
            print(f"eyas: {name} bears no rate {within}: {lowest}", file=sys.stderr)
    return int(missed) if swept.complete else INTERRUPTED


def _cells(line: Line) -> str:
    def cell(value: Any) -> str:
        if value is None:
            return "-"
        return f"{value:,.2f}" if isinstance(value, float) else str(value)

    return "".join(f"{cell(line[key]):>13}" for key in COLUMNS.values())


def _heading(args: argparse.Namespace) -> str:
    return f"Rising load: dataset {args.dataset_name}" + (f", SLO {args.slo}" if args.slo else "")


# --- values ----------------------------------------------------------------------------------------------


def named_url(text: str) -> tuple[str, str]:
    """NAME=URL, or a URL that is its own name."""
    name, equals, url = text.partition("=")
    if not equals or "/" in name:
        return http_url(text), http_url(text)
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} has no name before =")
    return name, http_url(url)


def rates(text: str) -> tuple[float, ...]:
    """Distinct rates above 0, separated by commas, in rising order."""
    try:
        values = {float(part) for part in text.split(",")}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 1,2,4") from error
    if not all(0 < value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} has a rate that is not a number above 0")
    return tuple(sorted(values))
