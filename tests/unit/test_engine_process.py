"""The end of an engine's process whose front has died."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

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
