"""`eyas bench suite`: the named cases on one server, or on clusters that it starts, and a report of them."""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.bench.backends import backend_for
from eyas.bench.cases import (
    CASES,
    MAKE_SHAPE,
    ON_CPU,
    ON_GPU,
    ClusterSetup,
    LoadCase,
    cases_of,
    command_line,
    gpus,
    make_case,
    setups,
)
from eyas.bench.datasets import DatasetOptions
from eyas.bench.figures import figures, warn
from eyas.bench.http import MeasuredServer
from eyas.bench.measure import LoadMeasurement, ServerFacts, look, run_interruptible
from eyas.bench.output import append_line, check_writable
from eyas.bench.plan import LoadPlan
from eyas.bench.plot_style import check_plot
from eyas.bench.plots import plot_runs
from eyas.bench.saved import SavedRun, from_figures
from eyas.bench.section import (
    MachineSection,
    ResultPlot,
    ResultTable,
    Row,
    RunEnvironment,
    look_around,
    write_section,
)
from eyas.cluster.screen import run_on_screen
from eyas.cluster.serve import LocalCluster
from eyas.common.errors import EyasError
from eyas.configuration import client_key
from eyas.flags import add_engine, add_server
from eyas.layout_flags import add_layout

WARM_UP, WARM_UP_CHATS = "1x64x32x2", "chat1"  # chats are the same each time: the prefix cache knows them
BY_CHANCE = (
    "Drafts were accepted by chance (synthetic acceptance): tokens per verify step were set beforehand."
)
FEWEST_DRAWN = 8  # requests from which a distribution is worth a figure
PLOTS = ".svg"


# --- the command ---------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `eyas bench suite`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "cases:\n" + "\n".join(f"  {name:22} {text}" for name, text in CASES.items())
    default = f"({' '.join(ON_CPU)}; on a GPU {' '.join(ON_GPU)})"
    parser.add_argument("cases", nargs="*", metavar="CASE", help=default)
    add_server(parser, url=None)
    add = parser.add_argument_group("suite").add_argument
    add("--served-model", metavar="ID", help="the model's name there (the first it lists)")
    add("--both", action="store_true", help="every case also without speculation (so it is without a CASE)")
    add("--output-file", type=Path, metavar="FILE", help="append one JSON line per run, with every request")
    add("--report", type=Path, metavar="PAGE", help="write this hardware's section of a Markdown page")
    add("--commit", metavar="ID", help="of the code, for the report (what git says)")
    add_layout(parser)
    add_engine(parser)
    parser.set_defaults(model=None)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code: 1 if a request failed."""
    names = cases_of(args)
    for name in names:
        make_case(name)  # a wrong name fails before anything starts
    check_writable("output-file", args.output_file)
    if args.report:
        check_writable("report", args.report)
        check_plot(args.report.with_suffix(PLOTS))
    where = look_around(args.device, gpus(args), args.commit)
    notes: list[str] = []
    if args.url:
        drafts = (True, False) if args.both else (True,)
        measurement = BenchSuite(names, drafts, args.served_model, args.output_file)
        rows = run_interruptible(measurement.measure(MeasuredServer(args.url, client_key(args), args.ca)))
        tables = [ResultTable(args.url, command_line(args), rows)]
    else:
        tables = _clusters(args, names)
        notes = _shape_note(args)
        for note in notes:
            print(note)
    if args.report:
        command = f"{command_line(args)} --report {args.report}"
        plots = draw(tables, args.report.parent, where)
        write_section(args.report, MachineSection(where, command, tables, plots, notes))
    return int(any(row["failed"] for table in tables for row in table.rows))


def _clusters(args: argparse.Namespace, names: tuple[str, ...]) -> list[ResultTable]:
    """Starts and measures one cluster after the other."""
    with tempfile.TemporaryDirectory(prefix="eyas-bench-") as folder:
        return [_cluster(setup, names, args.output_file) for setup in setups(args, Path(folder))]


def _cluster(setup: ClusterSetup, names: tuple[str, ...], out: Path | None) -> ResultTable:
    tables: list[ResultTable] = []

    async def work(cluster: LocalCluster) -> int:
        notes = [f"Start to healthy: {cluster.start_s:.1f} s."]
        if setup.config.engine.speculation.synthetic_rates:
            notes.append(BY_CHANCE)
        print("\n".join([setup.title, *notes]), flush=True)
        rows = await BenchSuite(names, setup.drafts, cluster.model, out).measure(MeasuredServer(cluster.url))
        tables.append(ResultTable(setup.title, setup.command, rows, notes))
        return 0

    run_on_screen(setup.config, work, quiet=True)
    return tables[0]


def _shape_note(args: argparse.Namespace) -> list[str]:
    if args.model is None and args.device == "cuda":
        return [f"M8 and H8 are folders with random weights' shapes: `{MAKE_SHAPE}`"]
    return []


# --- measuring -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchSuite:
    """Cases to measure on a server. `drafts`: with speculation, without it, or both, one after the other.

    `model` None: the first that the server lists. `out`: where lines of JSON are appended, if anywhere.
    `extra`: fields of every request.
    """

    names: tuple[str, ...]
    drafts: tuple[bool, ...]
    model: str | None
    out: Path | None
    extra: Mapping[str, Any] = field(default_factory=dict)

    async def measure(self, server: MeasuredServer) -> list[Row]:
        """A row of figures per case, with details; each is printed and written as it ends.

        Raises EyasError if no request of a case succeeds.
        """
        facts = await look(server)
        rows = []
        await self.case(server, facts, WARM_UP)
        if any(name.startswith(("chat", "agents")) for name in self.names):
            await self.case(server, facts, WARM_UP_CHATS)
        for name in self.names:
            for speculative in self.drafts:
                row = await self.case(server, facts, name, speculative)
                print(row_text(row), flush=True)
                append_line(self.out, row)
                rows.append(row)
        return rows

    async def case(
        self, server: MeasuredServer, facts: ServerFacts, name: str, speculative: bool = True
    ) -> Row:
        """The figures of one case, with details. Raises EyasError if no request succeeds."""
        # Without drafts the prompts differ: the same ones would be in the prefix cache by then.
        seed = 1 if speculative else 2
        plan = self._plan(make_case(name, seed), seed, speculative)
        result = await LoadMeasurement(plan, server, facts).run(lambda _: None)
        if not result.complete:
            raise asyncio.CancelledError
        if all(record.error for record in result.records):
            raise EyasError(f"{name}: no request succeeded: {result.records[0].error}")
        warn(result)
        measured = figures(result, details=True)
        drafts = bool(measured["accepted_tokens"] or measured["rejected_tokens"])
        row = {"case": name, "speculative": speculative, "drafts": drafts, **measured}
        # A server that tells its acceptance since it started tells it of these requests too.
        return row if drafts else {**row, "accept_length": None}

    def _plan(self, case: LoadCase, seed: int, speculative: bool) -> LoadPlan:
        return LoadPlan(
            dataset=case.name,
            draw=DatasetOptions(count=len(case.jobs), seed=seed),
            jobs=list(case.jobs),
            backend=backend_for(case.jobs),
            rate=case.rate or float("inf"),
            max_concurrency=case.concurrency,
            warmup=0,
            model=self.model,
            vocab_size=None,
            temperature=0.0,
            ignore_eos=True,
            extra={**self.extra} if speculative else {**self.extra, "speculative": False},
            slo=None,
        )


def row_text(row: Row) -> str:
    """One line for people."""
    drafts = "drafts" if row["drafts"] else "no drafts"
    counts = f"{row['completed']} requests, {row['failed']} failed, {row['output_throughput']:,.0f} tokens/s"
    times = [
        f"{name.upper()} {row[f'median_{name}_ms']:.2f} ms (p99 {row[f'p99_{name}_ms']:.2f})"
        for name in ("ttft", "tpot")
        if row[f"median_{name}_ms"] is not None
    ]
    return ", ".join([f"{row['case']}, {drafts}: {counts}", *times])


# --- figures -------------------------------------------------------------------------------------------


def draw(tables: Sequence[ResultTable], page: Path, where: RunEnvironment) -> list[ResultPlot]:
    """Writes a figure per case, in `page`/plots: its runs on all tables, with drafts and without."""
    runs: dict[str, list[SavedRun]] = {}
    for table in tables:
        for row in table.rows:
            if row["completed"] >= FEWEST_DRAWN:
                run = from_figures(row, row["case"], "with drafts" if row["drafts"] else "without drafts")
                runs.setdefault(row["case"], []).append(run)
    plots = []
    for case, lines in runs.items():
        path = f"plots/{_slug(where.hardware)}-{_slug(case)}{PLOTS}"
        caption = f"{case} on {where.hardware}"
        plot_runs(lines, page / path, caption)
        plots.append(ResultPlot(path, caption))
    return plots


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
