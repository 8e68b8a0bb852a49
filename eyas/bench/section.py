"""A section of docs/benchmarks.md: what one machine measured, in Markdown, and its place in the page.

The machine's environment stands in it: the hardware, how busy it was, the commit, the versions, as the
operating system, nvidia-smi and git say them. What none of them knows is "unknown", never an error.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from eyas.common.machine.memory import GIB, memory

Row = dict[str, Any]  # the figures of a run, with "case" and "drafts"
COLUMNS = {
    "case": "case",
    "drafts": "drafts",
    "requests": "completed",
    "failed": "failed",
    "output tokens/s": "output_throughput",
    "TTFT p50, ms": "median_ttft_ms",
    "p99": "p99_ttft_ms",
    "TPOT p50, ms": "median_tpot_ms",
    "p99 ": "p99_tpot_ms",
    "tokens per verify step": "accept_length",
    "cached": "cache_hit_rate",
}
BUSY = "**Other work had the cores too: these figures are too slow, and the next ones will differ.**"
TIMEOUT_S = 10.0
VERSIONS = ("torch", "triton", "grpcio")


@dataclass(frozen=True)
class ResultTable:
    """One server's rows, the command that makes them, and sentences below them."""

    title: str
    command: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class ResultPlot:
    """A figure, by its path from the page, and what it shows."""

    path: str
    caption: str


@dataclass(frozen=True)
class MachineSection:
    """All that one machine has to say; `command` makes the whole section."""

    where: RunEnvironment
    command: str
    tables: Sequence[ResultTable]
    plots: Sequence[ResultPlot]
    notes: Sequence[str] = ()


def write_section(page: Path, section: MachineSection) -> None:
    """Replaces this hardware's section of a page, or adds it at the end; a missing page becomes one."""
    text = page.read_text() if page.exists() else "# Benchmarks\n"
    page.write_text(replaced(text, section))


def replaced(page: str, section: MachineSection) -> str:
    """The page with this section in the place of the earlier one of the same hardware, or at the end."""
    name = section.where.hardware
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    text = f"{begin}\n{markdown(section)}\n{end}"
    earlier = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if earlier.search(page):
        return earlier.sub(lambda _: text, page, count=1)
    return f"{page.rstrip()}\n\n{text}\n"


def markdown(section: MachineSection) -> str:
    """The section's text, without the comments around it."""
    where = section.where
    parts = [
        f"## {where.hardware}",
        f"{where.date}, commit {where.commit}. {where.details}. Load just before: {where.load:.1f}.",
        *([BUSY] if where.busy else []),
        f"The whole section: `{section.command}`",
    ]
    for table in section.tables:
        parts += [f"**{table.title}**: `{table.command}`", grid(table.rows), *table.notes]
    parts += section.notes
    parts += [f"![{plot.caption}]({plot.path})\n\n{plot.caption}" for plot in section.plots]
    return "\n\n".join(parts)


def grid(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table; columns in which no row has a figure are left out."""
    columns = {title: key for title, key in COLUMNS.items() if any(row.get(key) is not None for row in rows)}
    lines = [list(columns), ["---" if key in ("case", "drafts") else "--:" for key in columns.values()]]
    lines += [[_cell(row.get(key)) for key in columns.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return str(value)


@dataclass(frozen=True)
class RunEnvironment:
    """`hardware` names the machine in a few words, and so the section of a page."""

    hardware: str
    details: str
    commit: str
    date: str
    load: float  # processes that wanted a core, on average over the minute before
    cores: int

    @property
    def busy(self) -> bool:
        """True if other work took much of the machine."""
        return self.load > self.cores / 2


def look_around(device: str, gpus: int, commit: str | None) -> RunEnvironment:
    """Looks around, before the measurement. `commit` None: what git says about this checkout."""
    cores = len(os.sched_getaffinity(0))
    cpu = f"{_cpu()}, {cores} cores"
    gpu = _gpu() if device == "cuda" else ""
    hardware = cpu if not gpu else f"{gpu} x {gpus}" if gpus > 1 else gpu
    versions = [f"{name} {version}" for name in VERSIONS if (version := _version(name))]
    machine = [f"{memory().total / GIB:.0f} GiB of memory"]
    details = ", ".join([*([cpu] if gpu else []), *machine, f"Python {platform.python_version()}", *versions])
    date = datetime.now(UTC).date().isoformat()
    return RunEnvironment(hardware, details, commit or _commit(), date, os.getloadavg()[0], cores)


def _cpu() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.machine()


def _gpu() -> str:
    said = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    if not said:
        return "a GPU of unknown kind"
    name, _, mib = said.splitlines()[0].partition(", ")
    return f"{name}, {int(mib) / 1024:.0f} GiB" if mib.isdigit() else name


def _commit() -> str:
    folder = str(Path(__file__).parent)
    commit = _output("git", "-C", folder, "rev-parse", "--short", "HEAD")
    changed = _output("git", "-C", folder, "status", "--porcelain", "--untracked-files=no")
    return "unknown" if not commit else f"{commit}, with changes" if changed else commit


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    """The output of a command; "" if it does not exist, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
