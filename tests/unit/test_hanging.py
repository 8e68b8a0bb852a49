"""An engine that hangs is given up; one that is slow, is stopped, or is debugged is not."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from eyas.common.errors import Unavailable
from eyas.worker import worker
from eyas.worker.worker import hung, is_traced

TRACED = """
import ctypes, time
ctypes.CDLL(None).ptrace(0, 0, 0, 0)
print("traced", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LOOK_S", 0.005)
    monkeypatch.setattr(worker, "HANG_S", 0.05)


async def test_an_engine_that_makes_no_progress_is_given_up() -> None:
    with pytest.raises(Unavailable, match="the engine hangs: it has work"):
        await asyncio.wait_for(hung(lambda: True, os.getpid()), 5)


async def test_only_looks_in_a_row_count() -> None:
    looks = itertools.cycle([True] * 9 + [False])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hung(lambda: next(looks), os.getpid()), 0.5)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], text=True)
    yield child
    child.kill()
    child.wait()


async def test_a_process_that_a_signal_stopped_is_waited_for(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert is_traced(process.pid)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hung(lambda: True, process.pid), 0.3)
    process.send_signal(signal.SIGCONT)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(hung(lambda: True, process.pid), 5)


def test_a_debugger_holds_a_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", TRACED], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "traced\n"
        deadline = time.monotonic() + 5
        while not is_traced(child.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_traced(child.pid)
    finally:
        child.kill()
        child.wait()


def test_a_process_that_is_gone_is_held_by_nothing() -> None:
    assert not is_traced(2**22 + 1) and not is_traced(os.getpid())
