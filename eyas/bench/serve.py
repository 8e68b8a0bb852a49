"""`eyas bench serve`: loads a server, or a cluster that it starts itself, and measures it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eyas.bench.figures import figures, said_rate, summary, warn, without_details
from eyas.bench.http import MeasuredServer
from eyas.bench.measure import LoadMeasurement, run_interruptible
from eyas.bench.output import append_line, check_writable
from eyas.bench.plan import LoadPlan, add_plan, make_plan
from eyas.bench.plot_style import check_plot
from eyas.bench.plots import plot_runs
from eyas.bench.records import RequestRecord
from eyas.bench.runner import OnRecord
from eyas.bench.saved import from_figures
from eyas.cluster.screen import run_on_screen
from eyas.cluster.serve import LocalCluster
from eyas.commands import INTERRUPTED
from eyas.common.errors import EyasError
from eyas.configuration import client_key, own_config
from eyas.flags import add_engine, add_server
from eyas.layout_flags import add_layout


@dataclass(frozen=True)
class ResultFile:
    """The destination of results. `details`: the line also has a list per request for each quantity."""

    file: Path | None
    details: bool
    tag: str | None
    plot: Path | None

    def check(self) -> None:
        """Raises ConfigError for a file that cannot be written, before anything is measured."""
        if self.plot is not None:
            check_plot(self.plot)
        check_writable("output-file", self.file)
        check_writable("plot", self.plot)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `eyas bench serve`."""
    add_server(parser, url=None)
    add_plan(parser)
    add = parser.add_argument_group("results").add_argument
    add("--output-file", type=Path, metavar="FILE", help="append one JSON line per run")
    add("--output-details", action="store_true", help="the line also has every request")
    add("--tag", metavar="TEXT", help="a name in the line")
    add("--plot", type=Path, metavar="FILE", help="draw latencies and throughput (.svg, .png)")
    add_layout(parser)
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    output = ResultFile(args.output_file, args.output_details, args.tag, args.plot)
    output.check()
    plan = make_plan(args)
    if args.url:
        return int(
            run_interruptible(measure(MeasuredServer(args.url, client_key(args), args.ca), plan, output))
        )

    async def work(cluster: LocalCluster) -> int:
        return await measure(MeasuredServer(cluster.url), plan, output)

    return run_on_screen(own_config(args), work, quiet=True)


async def measure(server: MeasuredServer, plan: LoadPlan, output: ResultFile) -> int:
    """Measures a running server; prints and writes the result. Gives the exit code.

    Raises EyasError if nothing answers or no request succeeds.
    """
    measurement = await LoadMeasurement.begin(plan, server)
    if any(isinstance(turn.prompt, tuple) for job in plan.jobs for turn in job.turns):
        print(f"token ids are below {measurement.vocab_size} ({measurement.vocab_from})")
    with progress(sum(job.requests for job in plan.jobs)) as on_record:
        result = await measurement.run(on_record)
    if result.complete and all(record.error for record in result.records):
        raise EyasError(f"none of {len(result.records)} requests succeeded: {result.records[0].error}")
    line = {"tag": output.tag, **figures(result, plan.slo, details=True)}
    print(summary(line))
    warn(result)
    _write(line, output)
    return _exit_code(line)


@contextmanager
def progress(total: int) -> Iterator[OnRecord]:
    """A bar of `total` requests on a terminal's standard error; gives what moves it."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    shown = Progress(
        *columns, console=console, refresh_per_second=2, transient=True, disable=not console.is_terminal
    )
    with shown as bar:
        task = bar.add_task("", total=total)
        failed = 0

        def on_record(record: RequestRecord) -> None:
            nonlocal failed
            failed += bool(record.error)
            bar.update(task, advance=1, description=f"{failed} failed" if failed else "")

        yield on_record


def _write(line: dict[str, Any], output: ResultFile) -> None:
    append_line(output.file, line if output.details else without_details(line))
    if output.plot is not None and line["completed"]:
        run = from_figures(line, "the run", output.tag or line["model"])
        plot_runs([run], output.plot, f"{line['dataset_name']}, {said_rate(line['request_rate'])}")


def _exit_code(line: dict[str, Any]) -> int:
    """130 if interrupted; 1, with a word why, if a request failed or none was good enough; else 0."""
    if not line["complete"]:
        return INTERRUPTED
    if line["failed"]:
        print(f"eyas: {line['failed']} requests failed: {line['first_error']}", file=sys.stderr)
    if line.get("goodput") == 0.0:
        print(f"eyas: --slo: no request was within {line['slo']}", file=sys.stderr)
    return int(bool(line["failed"]) or line.get("goodput") == 0.0)
