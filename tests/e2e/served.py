"""`eyas serve` as a child process, the way a user runs it, and a look at what it leaves behind.

The model is random but real in format, with the embedded model's tokenizer, so these tests do not depend on
trained weights.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from eyas.common.cluster.listening import free_ports
from eyas.common.config import NANO
from tests.unit.tiny import write_tiny_eagle3, write_tiny_llama

START_S = 180.0
STOP_S = 20.0


@dataclass(frozen=True)
class Folders:
    model: str
    draft: str


def make_folders(parent: Path) -> Folders:
    """A tiny random model and head under `parent`."""
    model = write_tiny_llama(parent / "tiny", vocab=4096, layers=4)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, model)
    return Folders(str(model), str(write_tiny_eagle3(parent / "tiny-head", model, reads=(1, 2, 3))))


@dataclass
class Served:
    """A running `eyas serve` whose output is kept in `lines`."""

    process: subprocess.Popen[str]
    port: int
    grpc_port: int
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as lines:
            self.lines.extend(line.rstrip() for line in lines)

    def says(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def worker(self, role: str) -> psutil.Process:
        return next(p for p in self.descendants() if f"--roles={role}" in p.cmdline())

    def pools(self) -> Path:
        """The folder in /dev/shm that holds everything of this cluster."""
        flags = next(flag for p in self.descendants() for flag in p.cmdline() if "--pool-dir=" in flag)
        return Path(flags.partition("=")[2])

    def interrupt(self) -> int:
        """Ctrl-C, as a terminal sends it; gives the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=STOP_S)


@contextlib.contextmanager
def serving(folders: Folders, *flags: str) -> Iterator[Served]:
    """`eyas serve` from ready to gone."""
    ports = free_ports()
    port, grpc_port = next(ports), next(ports)
    command = [sys.executable, "-m", "eyas.cli", "serve", "--model", folders.model, "--draft", folders.draft]
    command += [f"--port={port}", f"--grpc-port={grpc_port}", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    served = Served(process, port, grpc_port)
    try:
        wait_until(lambda: served.says("Ctrl-C stops it") or process.poll() is not None, START_S)
        if process.poll() is not None:
            served.reader.join(timeout=5)
            raise AssertionError("\n".join(served.lines))
        yield served
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=STOP_S)
        served.reader.join(timeout=5)


def wait_until(what: Callable[[], object], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.05)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(_runs(process) for process in processes)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it was reaped between the two questions
        return False
