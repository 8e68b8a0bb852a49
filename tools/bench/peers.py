"""Measures Eyas and other servers one after the other: one machine, one client, the same requests.

    python -m tools.bench.peers [--servers eyas vllm sglang] [--out FILE] [CASE ...]

`make peers` first installs the others, each into an environment of its own below `.peers/`. All serve the
same folder, Llama-3.1-8B's shape with random weights, with their own defaults. Each is started with the
caches it finds, measured by the cases of `eyas bench suite`, and ended before the next one starts. What is
printed is a table for docs/benchmarks.md: versions, card, commit and date stand above it.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.bench.cases import ON_GPU, SHAPE, make_case
from eyas.bench.http import MeasuredServer
from eyas.bench.output import append_line, check_writable
from eyas.bench.section import Row, RunEnvironment, look_around
from eyas.bench.shapes import SHAPES, write_model
from eyas.bench.suite import BenchSuite
from eyas.cluster.child import ChildProcess
from eyas.common.cluster.listening import free_ports
from eyas.common.errors import EyasError
from tools.bench.child_server import answering

START_S = 900.0  # a peer's first start compiles
STOP_S = 30.0
ENVIRONMENTS = Path(".peers")
EYAS = "eyas"


@dataclass(frozen=True)
class PeerServer:
    """A server as it is started: `words` follow the Python of its environment; MODEL and PORT are put in."""

    package: str
    words: tuple[str, ...]

    def command(self, name: str, model: Path, port: int, more: Sequence[str]) -> tuple[str, ...]:
        """Its command line."""
        python = sys.executable if name == EYAS else str((ENVIRONMENTS / name / "bin/python").absolute())
        put = {"MODEL": str(model), "PORT": str(port)}
        return (python, *(put.get(word, word) for word in self.words), *more)


PEERS = {
    EYAS: PeerServer(EYAS, ("-m", "eyas.cli", "serve", "--model", "MODEL", "--port", "PORT")),
    "vllm": PeerServer(
        "vllm", ("-m", "vllm.entrypoints.openai.api_server", "--model", "MODEL", "--port", "PORT")
    ),
    "sglang": PeerServer("sglang", ("-m", "sglang.launch_server", "--model-path", "MODEL", "--port", "PORT")),
}
DUMMY = ("--load-format", "dummy")
OWN = {EYAS: ("--draft", "none", "--grpc-port", "0")}
"""Flags of one server: the others have no drafts by default."""


@dataclass(frozen=True)
class PeerRun:
    """One server, measured."""

    name: str
    version: str
    start_s: float
    rows: list[Row]


async def measured(name: str, model: Path, cases: tuple[str, ...], device: str) -> PeerRun:
    """Starts a server, measures it, ends it.

    Raises EyasError if it is not installed, does not start or answers nothing.
    """
    port = next(free_ports())
    flags = (*DUMMY, *OWN.get(name, ()), *(("--device", device) if name == EYAS else ()))
    command = PEERS[name].command(name, model, port, flags)
    if not Path(command[0]).exists():
        raise EyasError(f"{command[0]} is not there: `make peers` installs it")
    child = ChildProcess(name, command, lambda name, line: None)
    server, began = MeasuredServer(f"http://127.0.0.1:{port}"), time.monotonic()
    async with answering(child, server, "/health", START_S, STOP_S):
        start_s = time.monotonic() - began
        print(f"{name} answers after {start_s:.1f} s", flush=True)
        rows = await BenchSuite(cases, (True,), None, None).measure(server)
        return PeerRun(name, _version(command[0], PEERS[name].package), start_s, rows)


def _version(python: str, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


# --- the table -----------------------------------------------------------------------------------------


def table(runs: Sequence[PeerRun], where: RunEnvironment) -> list[str]:
    """Lines of Markdown: a column for each server."""
    servers = ", ".join(f"{run.name} {run.version}" for run in runs)
    lines = [f"{where.hardware}, {where.date}, Eyas at commit {where.commit}: {servers}.", ""]
    lines += [f"| case | figure | {' | '.join(f'{run.name} {run.version}' for run in runs)} |"]
    lines += ["|---|---|" + "--:|" * len(runs)]
    for place, row in enumerate(runs[0].rows):
        for figure, keys, unit in FIGURES:
            cells = [_cell(run.rows[place], keys, unit) for run in runs]
            lines.append(f"| {row['case']} | {figure} | {' | '.join(cells)} |")
    starts = " | ".join(f"{run.start_s:.1f} s" for run in runs)
    return [*lines, f"| start | with the caches that were there | {starts} |"]


FIGURES = (
    ("TPOT p50, p99", ("median_tpot_ms", "p99_tpot_ms"), "ms"),
    ("TTFT p50, p99", ("median_ttft_ms", "p99_ttft_ms"), "ms"),
    ("output tokens per second", ("output_throughput",), ""),
)


def _cell(row: Row, keys: Sequence[str], unit: str) -> str:
    values = [row[key] for key in keys]
    text = ", ".join("-" if value is None else f"{value:,.2f}" for value in values)
    return f"{text} {unit}".strip() + (f" ({row['failed']} failed)" if row["failed"] else "")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 if a server could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.peers", description=__doc__)
    usual = f"of `eyas bench suite` ({' '.join(ON_GPU)})"
    parser.add_argument("cases", nargs="*", metavar="CASE", help=usual)
    parser.add_argument("--servers", nargs="+", choices=PEERS, default=[*PEERS])
    parser.add_argument("--shape", choices=SHAPES, default=SHAPE)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="of Eyas")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append one JSON line per server")
    args = parser.parse_args(argv)
    cases = tuple(args.cases or ON_GPU)
    for case in cases:
        make_case(case)  # so that a wrong name is told before anything starts
    check_writable("out", args.out)
    runs: list[PeerRun] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, args.shape)
        write_model(SHAPES[args.shape], model)
        for name in args.servers:
            try:
                runs.append(run := asyncio.run(measured(name, model, cases, args.device)))
            except EyasError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            append_line(args.out, {"server": name, "version": run.version, "rows": run.rows})
    if runs:
        print("", *table(runs, look_around(args.device, 1, None)), sep="\n")
    return int(len(runs) < len(args.servers))


if __name__ == "__main__":
    sys.exit(main())
