"""Real workers whose drafts go by shared memory: the stream agrees on it, a kill costs no token."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from real_worker import RealWorker, alone, decoding, real_worker, tiny_config

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from eyas.engine.loop.drafting import DraftWait
from eyas.engine.speculation.drafters.channels import GRPC, SHM

ROOT = Path(__file__).parents[2]
ASKED = GenerationRequest("r", tuple(range(3, 40)), SamplingParams(max_tokens=60, seed=5, ignore_eos=True))
SCRIPT = """
import sys
from eyas.common.config import EngineConfig, WorkerConfig
from eyas.common.types import Role
from eyas.worker.worker import run_worker
model, draft, pools = sys.argv[1:]
engine = EngineConfig(
    model=model, draft=draft, num_pages=128, chunk_tokens=48, pool_dir=pools, roles=(Role.DRAFT,)
)
run_worker(WorkerConfig(engine=engine))
"""


@dataclass
class Drafter:
    """A draft worker in processes of its own."""

    process: subprocess.Popen[str]
    address: str

    def kill(self) -> None:
        """Its front and its engine, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


@contextlib.asynccontextmanager
async def drafter(config: EngineConfig, pools: Path) -> AsyncIterator[Drafter]:
    assert config.draft is not None
    pools.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, config.model, config.draft, str(pools)],
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    line = ""
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while not line.startswith("worker ready"):
            line = await asyncio.to_thread(process.stderr.readline)
            assert line, "it ended"
    worker = Drafter(process, line.split("address=")[1].split()[0])
    try:
        yield worker
    finally:
        worker.kill()
        process.stderr.close()


async def until_connected(decode: RealWorker, *, direct: bool) -> None:
    head = decode.engine._drafting.drafter._head
    async with asyncio.timeout(30):
        while not head._workers or (direct and not head._channels._channels):
            await asyncio.sleep(0.02)


def page(worker: RealWorker) -> str:
    address = f"http://127.0.0.1:{worker.front.metrics_port}/metrics"
    return urllib.request.urlopen(address, timeout=5).read().decode()


@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_a_channel_is_agreed_on_and_shown_and_its_end_costs_no_token(
    tmp_path: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, pools = tiny_config(tmp_path / "models"), tmp_path / "p"  # short: it holds a socket
    (expected,) = await alone(config, tmp_path / "alone", ASKED)
    monkeypatch.setattr(DraftWait, "seconds", 5.0)  # a wait for one who is gone would show
    async with drafter(config, pools) as draft:
        registry = f"static:{draft.address}"
        start = real_worker(config, Role.DECODE, registry=registry, pool_dir=str(pools))
        async with start as decode, decoding(decode) as session:
            await until_connected(decode, direct=True)
            session.session.submit(ASKED, attempt=1, attach=False)
            if killed:
                async with asyncio.timeout(20):
                    while decode.engine._drafting.sent.get(SHM, 0) < 3:
                        await asyncio.sleep(0)
                draft.kill()
            async with asyncio.timeout(20):
                assert (await session.tokens())[0] == expected
            await decode.idle()
            sent = dict(decode.engine._drafting.sent)
            assert sent[GRPC] >= 1 and sent[SHM] > (2 if killed else 10)
            assert decode.engine._drafting.missed_rounds <= 1
            decode.front._update_metrics()
            labels = '{model_name="target",path="shm"}'
            assert f"eyas_draft_commits_total{labels} {float(sent[SHM])}" in page(decode)
            assert killed == (not decode.engine._drafting.drafter._head._channels._channels)


@pytest.mark.slow
async def test_workers_of_two_hosts_draft_by_grpc(tmp_path: Path) -> None:
    """Folders of their own: neither finds a file of the other's."""
    config = tiny_config(tmp_path / "models")
    (expected,) = await alone(config, tmp_path / "alone", ASKED)
    async with contextlib.AsyncExitStack() as stack:
        start = stack.enter_async_context
        draft = await start(real_worker(config, Role.DRAFT, pool_dir=str(tmp_path / "d")))
        registry = f"static:{draft.address}"
        away = real_worker(config, Role.DECODE, registry=registry, pool_dir=str(tmp_path / "b"))
        decode = await start(away)
        await until_connected(decode, direct=False)
        session = await start(decoding(decode))
        session.session.submit(ASKED, attempt=1, attach=False)
        async with asyncio.timeout(20):
            assert (await session.tokens())[0] == expected
        assert set(decode.engine._drafting.sent) == {GRPC}
        assert not [path for path in (tmp_path / "b").iterdir() if "mail" in path.name]
