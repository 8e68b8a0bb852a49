"""An engine that stalls under `eyas serve`: its streams have no other worker, wait, and go on unchanged.

One whose steps take long does not stall, whatever they take.
"""

from __future__ import annotations

import json
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from eyas.common.config import NANO, NANO_HEAD
from tests.chaos.faults import engines
from tests.e2e.served import Folders, Served, make_folders, serving

STALL_S = 9.0  # longer than a worker may be silent and a search is patient, together
STREAMS = 8
ANSWER_S = 300.0  # on a busy machine
BODY = {"model": "tiny", "prompt": "x" * 200, "max_tokens": 400, "ignore_eos": True, "temperature": 0.8}


class Stream:
    """A streamed answer, read by a thread of its own; `begun` is set when it has its first text."""

    def __init__(self, served: Served, seed: int) -> None:
        self._url, self._body = f"{served.url}/v1/completions", {**BODY, "seed": seed, "stream": True}
        self.begun = threading.Event()
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=ANSWER_S, trust_env=False) as reply:
            for line in reply.iter_lines():
                self.lines.append(line)
                if "text" in line:
                    self.begun.set()

    def said(self) -> str:
        """The whole text. Raises AssertionError for a stream that ended early."""
        self._thread.join(ANSWER_S)
        events = [line.removeprefix("data: ") for line in self.lines if line.startswith("data: ")]
        assert events[-2:-1] and events[-1] == "[DONE]" and "error" not in events[-2], events[-2:]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


@pytest.mark.slow
@pytest.mark.timeout(3 * ANSWER_S)
@pytest.mark.parametrize(("layout", "roles"), [("split", "decode"), ("unified", "prefill,decode,draft")])
def test_streams_wait_for_a_stalled_engine(layout: str, roles: str, tmp_path: Path) -> None:
    """So does a request that comes meanwhile."""
    with serving(make_folders(tmp_path), "--layout", layout) as served:
        undisturbed = [Stream(served, seed) for seed in range(STREAMS + 1)]
        expected = [stream.said() for stream in undisturbed]
        front = served.worker(roles).pid
        (engine,) = map(psutil.Process, engines(front))
        streams = [Stream(served, seed) for seed in range(STREAMS)]
        assert all(stream.begun.wait(ANSWER_S) for stream in streams)
        engine.send_signal(signal.SIGSTOP)
        try:
            threading.Event().wait(STALL_S - 2)
            streams.append(Stream(served, STREAMS))
            threading.Event().wait(2)
        finally:
            engine.send_signal(signal.SIGCONT)
        assert [stream.said() for stream in streams] == expected
        assert served.says("made no progress") and served.worker(roles).pid == front


TREES = ("--spec-topk=4", "--spec-steps=5", "--spec-draft-tokens=32")
LONG = 18  # prompts of 1,950 tokens: the pool holds 16 at a time
LONG_S = 1800.0  # on a busy machine


@pytest.mark.slow
@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize("layout", ["unified", "split"])
def test_long_steps_are_no_stalls(layout: str) -> None:
    """Rounds of many long sequences with trees take seconds each: every request is answered."""

    def ask(number: int) -> str:
        words = random.Random(number)
        body = {
            "model": "eyas-nano",
            "prompt": [words.randrange(3, 4096) for _ in range(1950)],
            "max_tokens": 6,
            "ignore_eos": True,
        }
        reply = httpx.post(f"{served.url}/v1/completions", json=body, timeout=LONG_S, trust_env=False)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    with serving(Folders(str(NANO), str(NANO_HEAD)), "--layout", layout, *TREES) as served:
        with ThreadPoolExecutor(LONG) as pool:
            answers = list(pool.map(ask, range(LONG)))
        assert len(answers) == LONG
        assert not served.says("not serving: its engine") and not served.says("ended with code")
