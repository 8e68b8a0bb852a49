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
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import fake_engine
import httpx
import psutil
import pytest
from fake_engine import DIE, SLOW, STALL, FakeWorker, request
from test_draft_svc import until_up
from test_front import next_of, tokens_of

from eyas.common.cluster.listening import free_ports
from eyas.common.config import EngineConfig, WorkerConfig
from eyas.common.errors import ConfigError, Unavailable
from eyas.common.types import KvHandle, KvKind, Role
from eyas.common.wire import clients, message, rpc
from eyas.common.wire.transfer import TransferClient
from eyas.engine.ipc.messages import DraftDown
from eyas.worker import worker
from eyas.worker.engine_process import EngineProcess

HERE = Path(__file__).parent
SCRIPT = """
import sys, fake_engine
from eyas.common.config import EngineConfig, WorkerConfig
from eyas.common.errors import EyasError
from eyas.common.types import Role
from eyas.worker import worker
from eyas.worker.worker import run_worker
worker.HANG_S = float(sys.argv[7])
roles = tuple(Role(name) for name in sys.argv[1].split(","))
try:
    engine = EngineConfig(roles=roles, model=sys.argv[2], pool_dir=sys.argv[3])
    config = WorkerConfig(engine=engine, registry=sys.argv[5], drain_s=float(sys.argv[6]))
    run_worker(config, getattr(fake_engine, sys.argv[4]))
except EyasError as error:
    sys.exit(f"eyas: {type(error).__name__}: {error}")
"""


class Process:
    """One `run_worker` in its own session, so that a test may signal its whole group."""

    def __init__(
        self,
        roles: str,
        pools: Path,
        engine: str = "main",
        model: str = "m",
        member: str = "127.0.0.1:1",
        limits: tuple[str, str] = ("30", "60"),
    ) -> None:
        """`limits`: its `drain_s`, and HANG_S."""
        env = {**os.environ, "PYTHONPATH": f"{HERE.parent.parent}:{HERE}"}
        words = (roles, model, str(pools), engine, f"static:{member}", *limits)
        self.popen = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *words],
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            env=env,
        )
        self.address = self.metrics_port = ""

    async def ready(self) -> Process:
        assert self.popen.stderr
        line = ""
        async with asyncio.timeout(30):
            while not line.startswith("worker ready: roles="):
                line = await asyncio.to_thread(self.popen.stderr.readline)
                assert line, "it ended"
        self.address = line.split("address=")[1].split()[0]
        self.metrics_port = line.split("metrics-port=")[1].split()[0]
        return self

    @property
    def engine(self) -> psutil.Process:
        children = psutil.Process(self.popen.pid).children()
        (engine,) = [c for c in children if "spawn_main" in " ".join(c.cmdline())]
        return engine

    async def ended(self) -> tuple[int, str]:
        """(return code, what was left on standard error), within 10 s."""
        _, said = await asyncio.to_thread(self.popen.communicate, None, 10)
        return self.popen.returncode, said


@contextlib.asynccontextmanager
async def process(roles: str, pools: Path, **kind: Any) -> AsyncIterator[Process]:
    started = Process(roles, pools, **kind)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.popen.pid, signal.SIGKILL)
        started.popen.communicate()


async def gone(process: psutil.Process, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)


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


async def fallen(decode: FakeWorker) -> float:
    async with asyncio.timeout(30):
        while not any(closed.seq == 0 for down in decode.engine.of(DraftDown) for closed in down.closed):
            await asyncio.sleep(0.02)
    return time.monotonic()
