"""A worker as processes: its halves live and die together, and a stopped one is noticed in time."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fake_engine
import httpx
import pytest
from fake_engine import DIE, SLOW, STALL, FakeWorker, request

from eyas.common.cluster.listening import free_ports
from eyas.common.config import EngineConfig, WorkerConfig
from eyas.common.errors import ConfigError, Unavailable
from eyas.common.types import KvHandle, KvKind, Role
from eyas.common.wire import clients, message, rpc
from eyas.common.wire.transfer import TransferClient
from eyas.worker import worker
from eyas.worker.engine_process import EngineProcess
from tests.rpc.draft_commits import until_up
from tests.rpc.session_events import next_of, tokens_of
from tests.rpc.worker_process import HERE, fallen, gone, process


async def test_it_names_the_port_of_its_figures(tmp_path: Path) -> None:
    async with process("decode", tmp_path) as p, httpx.AsyncClient() as client:
        await p.ready()
        page = await client.get(f"http://127.0.0.1:{p.metrics_port}/metrics")
        assert "eyas_kv_pages{model_name=" in page.text


@pytest.mark.parametrize(
    "how", ["ctrl-c to the group", pytest.param("terminate the front", marks=pytest.mark.slow)]
)
async def test_it_serves_then_leaves_when_asked(how: str, tmp_path: Path) -> None:
    async with process("decode", tmp_path) as p:
        await p.ready()
        engine = p.engine
        async with rpc.channel(p.address) as channel:
            assert await rpc.is_serving(channel)
            session = clients.DecodeSessionClient(channel, p.address).open()
            session.submit(request(2), attempt=1, attach=False)
            events = aiter(session)
            assert len(await tokens_of(events)) == 3
            if how == "terminate the front":
                p.popen.terminate()
            else:
                os.killpg(p.popen.pid, signal.SIGINT)
            with pytest.raises(Unavailable):
                await next_of(events, message.StepReply)
        code, said = await p.ended()
        assert code == 0 and "Traceback" not in said
        assert not engine.is_running()


async def test_an_engine_that_dies_takes_the_front_with_it(tmp_path: Path) -> None:
    async with process("decode", tmp_path) as p:
        await p.ready()
        for name in (".lock", "-0a-target"):  # what a killed engine cannot remove
            (tmp_path / f"eyas-{p.engine.pid}-abcdef{name}").touch()
        async with rpc.channel(p.address) as channel:
            session = clients.DecodeSessionClient(channel, p.address).open()
            session.submit(request(DIE), attempt=1, attach=False)
            began = time.monotonic()
            with pytest.raises(Unavailable):
                await next_of(aiter(session), message.StepReply)
            assert time.monotonic() - began < 10
        code, said = await p.ended()
        assert code == 1 and "eyas: Unavailable: the engine process ended with code 3" in said
        assert list(tmp_path.iterdir()) == []


async def test_a_front_that_is_killed_takes_the_engine_with_it(tmp_path: Path) -> None:
    async with process("decode", tmp_path) as p:
        await p.ready()
        engine = p.engine
        p.popen.kill()
        await gone(engine, within_s=10)


async def test_an_engine_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    async with process("prefill", tmp_path, engine="refuse", model="x", member="") as p:
        code, said = await p.ended()
        assert code == 1 and said.splitlines() == ["eyas: ConfigError: model x cannot be read"]


async def test_a_front_that_cannot_be_made_ends_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process
    engine = EngineConfig(roles=(Role.DECODE,), model="m", pool_dir=str(tmp_path))
    config = WorkerConfig(engine=engine, port=1, tls_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="tls-dir"):
        await worker._run(config, fake_engine.main, EngineProcess())
    assert multiprocessing.active_children() == []


async def test_a_ctrl_c_before_there_is_a_front_ends_the_worker(tmp_path: Path) -> None:
    code = f"""
import fake_engine, signal
from eyas.common.config import EngineConfig, WorkerConfig
from eyas.common.types import Role
from eyas.worker import worker
engine = EngineConfig(roles=(Role.DECODE,), model="m", pool_dir={str(tmp_path)!r})
ready = worker._EngineHalf.start
def start(process, address):
    ready(process, address)
    signal.raise_signal(signal.SIGINT)
worker._EngineHalf.start = start
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test may run where it is ignored
worker.run_worker(WorkerConfig(engine=engine, port={next(free_ports())}), fake_engine.main)
"""
    env = {**os.environ, "PYTHONPATH": f"{HERE.parent.parent}:{HERE}"}
    ran = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=20
    )
    assert ran.returncode == -signal.SIGINT and "KeyboardInterrupt" in ran.stderr
    assert "InvalidStateError" not in ran.stderr


async def test_every_stream_of_a_stopped_worker_ends_within_six_seconds(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        target = await stack.enter_async_context(process("prefill,decode", tmp_path))
        drafter = await stack.enter_async_context(process("draft", tmp_path))
        await asyncio.gather(target.ready(), drafter.ready())
        decode = await FakeWorker((Role.DECODE,), registry=f"static:{drafter.address}").start()
        stack.push_async_callback(decode.stop)
        await until_up(decode, drafter.address)
        channel = await stack.enter_async_context(rpc.channel(target.address))
        handle = KvHandle(target.address, 5, 0, 1, KvKind.TARGET, "t", 2, ())
        prefill = clients.PrefillClient(channel)
        done = [event async for event in prefill.prefill(request(1, 2), 1, False)]
        assert len(done) == 3
        streams = [
            aiter(clients.DecodeSessionClient(channel, target.address).open()),
            prefill.prefill(request(SLOW), 1, False),
            TransferClient(channel, target.address).watch(handle, 1),
        ]
        for stream in streams:
            await anext(stream)
        decode.engine.heard.clear()
        for stopped in (target, drafter):
            os.killpg(stopped.popen.pid, signal.SIGSTOP)
        began = time.monotonic()
        ends = [asyncio.create_task(exhausted(stream)) for stream in streams]
        seconds = await asyncio.gather(*ends, fallen(decode))
        assert max(seconds) - began < 6.0, [s - began for s in seconds]


@pytest.mark.slow
async def test_an_engine_that_hangs_ends_the_worker(tmp_path: Path) -> None:
    """So that it is started again: what only stalls goes on (`test_front`)."""
    async with process("decode", tmp_path, limits=("30", "1")) as p:
        await p.ready()
        engine = p.engine
        async with rpc.channel(p.address) as channel:
            session = clients.DecodeSessionClient(channel, p.address).open()
            session.submit(request(STALL), attempt=1, attach=False)
            with pytest.raises(Unavailable, match="no progress"):
                async for _ in session:
                    pass
            code, said = await p.ended()
        assert code == 1 and "eyas: Unavailable: the engine hangs: it has work" in said
        await gone(engine, 10)


async def exhausted(stream: Any) -> float:
    with pytest.raises(Unavailable):
        async for _ in stream:
            pass
    return time.monotonic()
