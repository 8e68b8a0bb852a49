"""A worker of several attention ranks, as processes: a lost one ends it, and every request is told."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from eyas.common.config import NANO
from eyas.common.errors import Unavailable
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.common.wire import clients, message, rpc
from tests.rpc.session_events import next_of
from tests.rpc.worker_process import gone
from tests.unit import tiny_deepseek
from tests.unit.tiny_deepseek import write_tiny_deepseek

SIZES = tiny_deepseek.SMALL | {"num_hidden_layers": 2, "vocab_size": 4096}
FLAGS = ["--roles", "prefill,decode,draft", "--draft", "none", "--num-pages", "64", "--context-length", "512"]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`eyas worker --dp-attention 2`."""
    write_tiny_deepseek(tmp_path / "model", SIZES)
    shutil.copy(NANO / "tokenizer.json", tmp_path / "model")
    (tmp_path / "pools").mkdir()
    folders = ["--model", str(tmp_path / "model"), "--pool-dir", str(tmp_path / "pools")]
    command = [sys.executable, "-m", "eyas.cli", "worker", *folders, *FLAGS, "--dp-attention", "2"]
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    started = subprocess.Popen(
        command, stderr=subprocess.PIPE, start_new_session=True, text=True, env=env, cwd=os.getcwd()
    )
    yield started
    if started.poll() is None:
        os.killpg(started.pid, signal.SIGKILL)
    started.communicate()


async def _ready(worker: subprocess.Popen[str]) -> str:
    """Its address."""
    assert worker.stderr
    async with asyncio.timeout(90):
        while not (line := await asyncio.to_thread(worker.stderr.readline)).startswith("worker ready"):
            assert line, "it ended"
    assert "pages=128" in line, "of both ranks"
    return line.split("address=")[1].split()[0]


def _rank(worker: subprocess.Popen[str]) -> psutil.Process:
    """The process of rank 1: a child of the engine."""
    (engine,) = [p for p in psutil.Process(worker.pid).children() if "spawn_main" in " ".join(p.cmdline())]
    (rank,) = [p for p in engine.children() if "spawn_main" in " ".join(p.cmdline())]
    return rank


def _request(name: str, prompt: int) -> GenerationRequest:
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    return GenerationRequest(name, tuple(range(prompt)), params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "within_s"), [("killed", 5), pytest.param("stopped", 40, marks=pytest.mark.slow)]
)
async def test_a_lost_rank_ends_its_worker_and_every_request(
    worker: subprocess.Popen[str], how: str, within_s: float
) -> None:
    """One that decodes on each rank; both are told UNAVAILABLE, which asks a gateway to go elsewhere. A rank
    that stands still is given up after 12 s, or 16 of its slowest steps, as a busy machine took them.
    """
    address = await _ready(worker)
    rank = _rank(worker)
    async with rpc.channel(address) as channel:
        session = clients.DecodeSessionClient(channel, address).open()
        for name, prompt in (("a", 20), ("b", 30)):
            session.submit(_request(name, prompt), attempt=1, attach=False)
        events, seen = aiter(session), set()
        while seen != {"a", "b"}:
            step = await next_of(events, message.StepReply)
            seen |= {entry.id for entry in step.entries}
        os.kill(rank.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(Unavailable):
            while True:
                await next_of(events, message.StepReply)
        assert time.monotonic() - began < within_s
    if how == "stopped":
        os.kill(rank.pid, signal.SIGKILL)
    _, said = await asyncio.to_thread(worker.communicate, None, 20)
    assert worker.returncode == 1
    assert "rank 1 of 2 has ended: killed by SIGKILL" in said
    await gone(rank, 5)
