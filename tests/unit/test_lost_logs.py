"""Logs that cannot be written, or have nowhere to go, end no server."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from eyas.cluster.screen import ClusterScreen
from eyas.common.cluster.listening import free_ports
from eyas.common.config import NANO

# Files 0 to 2 as a service manager may leave them: on a disk that is full, or closed.
FULL = "exec 1> /dev/full 2>&1"
CLOSED = "exec 0<&- 1>&- 2>&-"


@pytest.mark.parametrize("files", [FULL, CLOSED])
def test_a_gateway_serves_and_leaves_without_a_log(files: str) -> None:
    ports = free_ports()
    port = next(ports)
    flags = f"--registry static:127.0.0.1:1 --model {NANO} --port {port} --grpc-port {next(ports)}"
    words = f"{files}; exec {sys.executable} -m eyas.cli gateway {flags}"
    process = subprocess.Popen(
        ["sh", "-c", words], env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    )
    try:
        deadline = time.monotonic() + 60
        while not _answers(port):
            assert process.poll() is None, f"it ended with code {process.returncode}"
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/version", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


FLOOD = """
import logging, sys
from eyas.common.logging import setup
setup("flood", sys.argv[1])
for number in range(20_000):
    logging.getLogger("eyas").info("line %d of a flood", number)
print("served", flush=True)
"""


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_reader_of_logs_that_has_stopped_stops_nobody(format: str) -> None:
    """Its pipe is full: what comes then is lost, and what it reads later is whole lines in order."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", FLOOD, format], stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        assert select.select([process.stdout], [], [], 60)[0]
        assert process.stdout.readline() == "served\n"
        numbers = [int(n) for n in re.findall(r"line (\d+) of a flood", process.stderr.read())]
        assert 100 < len(numbers) < 20_000 and numbers == sorted(numbers)
    finally:
        process.kill()
        process.wait()


LONG = """
import logging
from eyas.common.logging import setup
setup("long", "json")
for number in range(400):
    logging.getLogger("eyas").info("line %d %s", number, "x" * (10, 3_000, 9_000, 20_000)[number % 4])
"""


def test_long_lines_are_whole_or_lost() -> None:
    """A pipe takes a part of a long line, so the rest of it comes before the next one."""
    process = subprocess.Popen([sys.executable, "-c", LONG], stderr=subprocess.PIPE)
    assert process.stderr is not None
    output = b""
    try:
        while part := os.read(process.stderr.fileno(), 5_000):
            output += part
            time.sleep(0.0003)
        *lines, last = output.split(b"\n")
        numbers = [int(json.loads(line)["message"].split()[1]) for line in lines]
        assert 4 < len(numbers) < 400 and numbers == sorted(numbers)
        assert not last or last.startswith(b"{"), "only what the process had no time to end is a part"
    finally:
        process.kill()
        process.wait()


SHARED = """
import os, sys
from eyas.common.logging import setup
setup("first", "text")
print(os.get_blocking(1), os.get_blocking(2), flush=True)
"""


def test_others_who_write_to_the_same_pipe_wait_for_its_reader() -> None:
    reader, writer = os.pipe()
    try:
        subprocess.run([sys.executable, "-c", SHARED], stdout=writer, stderr=writer, check=True, timeout=60)
        assert os.get_blocking(writer) and os.read(reader, 100) == b"True False\n"
    finally:
        os.close(reader)
        os.close(writer)


class FullDisk(io.TextIOBase):
    """A file on a disk that is full."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.longest = 0

    def write(self, text: str) -> int:
        self.longest = max(self.longest, len(text))
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("is_json", [False, True])
def test_a_cluster_goes_on_when_its_lines_are_lost(is_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", FullDisk())
    monkeypatch.setattr(sys, "stderr", disk := FullDisk())
    screen = ClusterScreen(quiet=False, json=is_json)
    screen.progress(["decode-0"], 0.0)
    for _ in range(100):
        screen.log("decode-0", "a line")
    assert 0 < disk.longest < 200, "lines that are lost are kept"
    cluster: Any = SimpleNamespace(model="m", start_s=1.0, pids={"decode-0": 1}, url="u", grpc_address="g")
    screen.ready(cluster)
    screen.stopping(5.0)
