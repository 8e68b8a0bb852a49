"""The environment of a report: the hardware, how busy it was, the commit, the versions.

It asks the operating system, nvidia-smi and git. What none of them knows is "unknown", never an error.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from eyas.common.machine.memory import GIB, memory

TIMEOUT_S = 10.0
VERSIONS = ("torch", "triton", "grpcio")


@dataclass(frozen=True)
class RunEnvironment:
    """`hardware` names the machine in a few words: sections of a page are told apart by it."""

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
