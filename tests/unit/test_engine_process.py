"""An engine's process: it begins before its engine is known, and ends with its front."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from eyas.worker.engine_process import EngineProcess

ENGINE = """
import sys, time
from eyas.worker import engine_main

def engine(link):
    try:
        print("runs", flush=True)
        time.sleep(60)
    finally:
        print("unlinks its pools", flush=True)
        time.sleep(0.5)
        print("has done so", flush=True)

engine_main.serve(engine, sys.argv[1])
"""


def test_an_engine_that_is_leaving_is_not_interrupted(tmp_path: Path) -> None:
    """The kernel tells of a front that dies once per thread of it."""
    command = [sys.executable, "-c", ENGINE, f"ipc://{tmp_path}/engine"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "runs\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "unlinks its pools\n"
        for _ in range(3):
            process.send_signal(signal.SIGUSR1)
        assert process.stdout.read() == "has done so\n"
        assert process.wait(10) == 1
        assert process.stderr.read() == ""


def note(path: Path, name: str, wait_s: float) -> None:
    """What a process of a test runs."""
    until = time.monotonic() + wait_s
    while name not in sys.modules and time.monotonic() < until:
        time.sleep(0.01)
    path.write_text(f"{name} {name in sys.modules}")


@pytest.mark.parametrize("modules", [("wave",), ("no_such_module", "wave")])
def test_a_process_imports_before_it_knows_what_it_runs(modules: tuple[str, ...], tmp_path: Path) -> None:
    """What fails to be imported is told where it is used."""
    process = EngineProcess(*modules)
    try:
        process.run(note, tmp_path / "ran", "wave", 5.0 if modules == ("wave",) else 0.0)
        assert process.exit_code() == 0
    finally:
        process.kill(5.0)
    assert (tmp_path / "ran").read_text() == f"wave {modules == ('wave',)}"


def note_limit(path: Path) -> None:
    """What a process of a test runs."""
    path.write_text(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def test_a_process_may_open_many_files_though_its_parent_may_not_yet(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(int(name) for name in os.listdir("/proc/self/fd")) + 64  # other tests may have left many open
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        process = EngineProcess()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        process.run(note_limit, tmp_path / "limit")
        assert process.exit_code() == 0
    finally:
        process.kill(5.0)
    assert int((tmp_path / "limit").read_text()) > few


def test_a_process_that_has_ended_runs_nothing_and_says_how_it_ended(tmp_path: Path) -> None:
    process = EngineProcess()
    os.kill(process.pid, signal.SIGKILL)
    assert process.exit_code() == -signal.SIGKILL
    process.run(note, tmp_path / "ran", "wave", 0.0)
    process.kill(5.0)
    assert not (tmp_path / "ran").exists()


PARENT = """
import os, sys, time
from eyas.worker.engine_process import EngineProcess

if __name__ == "__main__":
    print(EngineProcess("torch").pid, flush=True)
    time.sleep(60)
"""


def test_a_process_without_an_engine_ends_with_its_parent(tmp_path: Path) -> None:
    """However early: it may be importing."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        child.wait(5.0)
