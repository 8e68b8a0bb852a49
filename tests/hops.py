"""The files and functions that one streamed chat runs through, in every process of a split cluster on a CPU.

    python -m tests.hops

A tracer in each process counts the calls of functions of the installed packages. What also runs without a
request, in a window of the same length, does not count. It needs some 30 s and nothing but ports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import httpx

from eyas.common.cluster.listening import free_ports
from tests.shape import INSTALLED, ROOT

LENGTHS = (1, 48)
"""Tokens of the chats that are traced."""
START_S, STOP_S, WINDOW_S, SETTLED_S = 180.0, 30.0, 2.0, 0.5  # the gateway sends a request itself after 6 s
TIMES = 3

TRACER = """\
import json, os, sys, threading, time

FOLDERS, OUT = {folders!r}, {out!r}
calls = {{}}

def profile(frame, event, argument):
    if event == "call":
        calls[frame.f_code] = calls.get(frame.f_code, 0) + 1

def write(mark):
    found = [(code.co_filename, code.co_qualname, count) for code, count in list(calls.items())]
    own = [call for call in found if call[0].startswith(FOLDERS)]
    path = f"{{OUT}}/{{mark}}-{{os.getpid()}}.json"
    with open(path + ".part", "w") as file:
        json.dump(own, file)
    os.rename(path + ".part", path)

def watch():
    seen = ""
    while True:
        time.sleep(0.05)
        try:
            with open(OUT + "/mark") as file:
                mark = file.read()
        except OSError:
            continue
        if mark != seen:
            seen = mark
            write(mark)

def begin():
    threading.Thread(target=watch, daemon=True).start()

begin()
os.register_at_fork(after_in_child=begin)
threading.setprofile(profile)
sys.setprofile(profile)
"""
"""Run by every Python process at its start: at each new mark it writes how often each function was called."""

Calls = Counter[tuple[str, str, str]]  # by process, file and function


@dataclass(frozen=True)
class Hops:
    """What a chat of so many tokens ran through. `processes`: those in which anything ran for it."""

    tokens: int
    files: int
    functions: int
    calls: int
    processes: int


def measure(lengths: Iterable[int] = LENGTHS) -> list[Hops]:
    """Starts a cluster, traces a chat of each length, and stops it. Raises AssertionError if one fails."""
    with tempfile.TemporaryDirectory(prefix="hops-") as folder:
        out = Path(folder)
        folders = tuple(f"{ROOT / name}{os.sep}" for name in INSTALLED)
        (out / "sitecustomize.py").write_text(TRACER.format(folders=folders, out=folder))
        ports = free_ports()
        port, grpc_port = next(ports), next(ports)
        words = ("serve", "--layout=split", f"--port={port}", f"--grpc-port={grpc_port}")
        path = os.pathsep.join((folder, str(ROOT)))
        with (out / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "eyas.cli", *words],
                stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
            try:
                return [_hops(Traced(out, port), tokens) for tokens in lengths]
            finally:
                process.terminate()
                process.wait(STOP_S)


class Traced:
    """The traced cluster that listens at a port of this host."""

    def __init__(self, out: Path, port: int) -> None:
        """Waits until it answers a chat."""
        self._out = out
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self._marks = 0
        _wait(lambda: self._answers(1), START_S, lambda: (out / "log").read_text())

    def calls(self, work: Callable[[], None]) -> Calls:
        """What was called from before `work` until a while after it."""
        before = self._counted()
        begun = time.monotonic()
        work()
        time.sleep(max(0.0, WINDOW_S - (time.monotonic() - begun)))
        return self._counted() - before

    def chat(self, tokens: int) -> None:
        """Streams an answer of so many tokens."""
        assert self._answers(tokens)

    def _answers(self, tokens: int) -> bool:
        body = {
            "model": "eyas-nano", "stream": True, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
            "messages": [{"role": "user", "content": f"Count from 1 to {tokens + self._marks}."}],
        }  # fmt: skip
        try:
            return "[DONE]" in self._http.post("/v1/chat/completions", json=body).text
        except httpx.TransportError:
            return False

    def _counted(self) -> Calls:
        """All calls so far, of the processes that run now."""
        self._marks += 1
        mark = str(self._marks)
        (self._out / "next").write_text(mark)
        (self._out / "next").rename(self._out / "mark")
        written, before = self._written(mark), None
        while not written or written != before:  # every process has written when no further one does
            time.sleep(SETTLED_S)
            written, before = self._written(mark), written
        found: Calls = Counter()
        for path in written:
            for file, function, count in json.loads(path.read_text()):
                found[path.stem.partition("-")[2], file, function] += count
        return found

    def _written(self, mark: str) -> list[Path]:
        return sorted(self._out.glob(f"{mark}-*.json"))


def _hops(traced: Traced, tokens: int) -> Hops:
    """Of the middle of several chats: requests of the gateway's own may be in a window, of one or of none."""
    for _ in range(2):
        traced.chat(tokens)  # what happens once, at a first request, does not count
    found = sorted((_once(traced, tokens) for _ in range(TIMES)), key=lambda hops: hops.functions)
    return found[TIMES // 2]


def _once(traced: Traced, tokens: int) -> Hops:
    traced.chat(tokens)
    time.sleep(SETTLED_S)  # what is done a while after a request
    idle = traced.calls(lambda: None)
    found = traced.calls(lambda: traced.chat(tokens))
    own = {key: count for key, count in found.items() if key not in idle}
    return Hops(
        tokens=tokens,
        files=len({file for _, file, _ in own}),
        functions=len({(file, function) for _, file, function in own}),
        calls=sum(own.values()),
        processes=len({process for process, _, _ in own}),
    )


def _wait(what: Callable[[], bool], seconds: float, why: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, why()
        time.sleep(0.2)


if __name__ == "__main__":
    for hops in measure():
        print(hops)
