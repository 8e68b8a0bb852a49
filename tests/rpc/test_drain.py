"""Draining: a worker that is asked to leave takes nothing new and finishes what it has, in bounded time."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import FakeWorker, request, token, worker
from real_worker import Decode, RealWorker, prefill, real_worker, tiny_config
from scripted_backend import each
from scripted_cluster import DECODE, PREFILL, collect, gateway, make_request, until
from scripted_worker import expected, workers

from eyas.common.errors import Unavailable
from eyas.common.machine.leave import SAME_WORD_S
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from eyas.common.wire import clients, message, rpc
from tests.rpc.draft_commits import until_up
from tests.rpc.session_events import next_of, tokens_of
from tests.rpc.worker_process import fallen, process
from tests.unit.crossed import crossed

LONG = 60  # tokens: a third of a second and more of a fake engine
ENDLESS = 10_000


async def ended(w: FakeWorker | RealWorker, within_s: float = 30.0) -> None:
    """The engine has left by itself."""
    await asyncio.wait_for(asyncio.shield(w._running), within_s)


# --- a worker's front and engine -------------------------------------------------------------------------


async def test_running_requests_finish_and_new_ones_go_elsewhere() -> None:
    async with worker(Role.DECODE) as w, rpc.channel(w.address) as channel:
        session = clients.DecodeSessionClient(channel, w.address).open()
        events = aiter(session)
        session.submit(request(5, tokens=LONG), attempt=1, attach=False)
        await next_of(events, message.StepReply)
        await w.front.drain()
        assert not await rpc.is_serving(channel)
        assert not (await clients.InfoClient(channel).info(timeout_s=2)).serving
        session.submit(request(6, id="new"), attempt=1, attach=False)
        rejected = await next_of(events, message.RequestRejected)
        assert rejected.id == "new" and type(rejected.failure.error()) is Unavailable
        rest = await tokens_of(events)
        assert rest[-1].index == LONG - 1 and rest[-1].tokens == (token((5,), 0, LONG - 1),)
        await ended(w)


async def test_a_draining_worker_says_so_with_its_heartbeats() -> None:
    async with worker(Role.DECODE) as w, rpc.channel(w.address) as channel:
        session = clients.DecodeSessionClient(channel, w.address).open()
        events = aiter(session)
        assert not (await next_of(events, clients.Heartbeat)).draining
        session.submit(request(5, tokens=ENDLESS), attempt=1, attach=False)
        await next_of(events, message.StepReply)
        await w.front.drain()
        assert (await next_of(events, clients.Heartbeat)).draining


async def test_a_draft_worker_does_not_wait() -> None:
    async with worker(Role.DRAFT) as drafter:
        async with worker(Role.DECODE, registry=f"static:{drafter.address}") as decode:
            await until_up(decode, drafter.address)
            decode.engine.heard.clear()
            await drafter.front.drain()
            await ended(drafter)
            await drafter.front.stop()
            await fallen(decode)


# --- real engines ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> object:
    return tiny_config(tmp_path_factory.mktemp("models"))


async def test_prompts_are_kept_until_they_are_pulled(tiny, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    asked = GenerationRequest("r", tuple(range(1, 40)), SamplingParams(max_tokens=24, temperature=0.0))
    async with (
        real_worker(tiny, Role.PREFILL, pool_dir=str(tmp_path)) as source,
        real_worker(tiny, Role.DECODE, registry=f"static:{source.address}", pool_dir=str(tmp_path)) as target,
        rpc.channel(target.address) as channel,
    ):
        decode = Decode(target, channel)
        handles = await prefill(source, asked)
        await source.front.drain()
        with pytest.raises(Unavailable, match="draining"):
            await prefill(source, asked)
        await asyncio.sleep(0.5)
        assert not source._running.done(), "another worker may still pull the offered pages"
        decode.attach(asked, handles)
        tokens, path = await decode.tokens()
        assert len(tokens) == 24 and path == "shm"
        await ended(source)
        decode.session.close()


async def test_a_real_engine_finishes_its_requests_then_leaves(tiny, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    async with (
        real_worker(tiny, *Role, pool_dir=str(tmp_path), max_running=2) as w,
        rpc.channel(w.address) as channel,
    ):
        session = clients.DecodeSessionClient(channel, w.address).open()
        for i in range(5):  # two run, three wait
            asked = GenerationRequest(f"r{i}", tuple(range(1, 20 + i)), params)
            session.submit(asked, attempt=1, attach=False)
        events = aiter(session)
        for _ in range(5):
            await next_of(events, message.RequestAdmitted)
        await w.front.drain()
        lengths: list[int] = []
        async with asyncio.timeout(30):
            while len(lengths) < 5:
                step = await anext(events)
                entries = step.entries if isinstance(step, message.StepReply) else ()
                lengths += [entry.index + len(entry.tokens) for entry in entries if entry.finish]
        assert lengths == [24] * 5
        await ended(w)
        assert list(tmp_path.glob("*-target")) == []


# --- a worker's processes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "number"),
    crossed(
        ["the front", "every process"],
        [signal.SIGTERM, signal.SIGINT],
        quick=lambda to, number: to == "the front" and number is signal.SIGTERM,
    ),
)
async def test_a_signal_drains(to: str, number: signal.Signals, tmp_path: Path) -> None:
    async with process("decode", tmp_path) as p, rpc.channel((await p.ready()).address) as channel:
        session = clients.DecodeSessionClient(channel, p.address).open()
        session.submit(request(5, tokens=LONG), attempt=1, attach=False)
        events = aiter(session)
        await next_of(events, message.StepReply)
        for told in [p.popen.pid] if to == "the front" else [p.engine.pid, p.popen.pid]:
            os.kill(told, number)
        assert (await tokens_of(events))[-1].index == LONG - 1
        code, said = await p.ended()
        assert code == 0 and "Traceback" not in said


@pytest.fixture
def hangups() -> Iterator[None]:
    """What a test starts gets SIGHUP, also where the tests run under nohup, which would be inherited."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize(
    "words",
    [[signal.SIGTERM, signal.SIGTERM], pytest.param([signal.SIGHUP], marks=pytest.mark.slow)],
)
async def test_a_second_signal_does_not_wait(words: list[signal.Signals], tmp_path: Path) -> None:
    async with process("decode", tmp_path) as p, rpc.channel((await p.ready()).address) as channel:
        session = clients.DecodeSessionClient(channel, p.address).open()
        session.submit(request(5, tokens=ENDLESS), attempt=1, attach=False)
        events = aiter(session)
        await next_of(events, message.StepReply)
        engine = p.engine
        began = time.monotonic()
        for word in words:
            p.popen.send_signal(word)
            await asyncio.sleep(SAME_WORD_S + 0.1)
        with pytest.raises(Unavailable, match="leaving"):
            async for _ in events:
                pass
        assert (await p.ended())[0] == 0 and time.monotonic() - began < 8
        assert not engine.is_running()


@pytest.mark.slow
async def test_the_drain_time_is_an_end(tmp_path: Path) -> None:
    async with (
        process("decode", tmp_path, limits=("1", "60")) as p,
        rpc.channel((await p.ready()).address) as channel,
    ):
        session = clients.DecodeSessionClient(channel, p.address).open()
        session.submit(request(5, tokens=ENDLESS), attempt=1, attach=False)
        events = aiter(session)
        await next_of(events, message.StepReply)
        began = time.monotonic()
        p.popen.terminate()
        with pytest.raises(Unavailable, match="leaving"):
            async for _ in events:
                pass
        assert 0.9 < time.monotonic() - began < 8
        assert (await p.ended())[0] == 0


async def test_a_killed_worker_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a pool nor the folder of a socket."""
    temporary, pools = tmp_path / "tmp", tmp_path / "pools"
    temporary.mkdir()
    pools.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    async with process("decode", pools) as p:
        engine = (await p.ready()).engine
        for victim in (engine, p.popen):
            victim.kill()
        await p.ended()
    assert list(temporary.iterdir()) == [] and list(pools.iterdir()) == []


# --- the gateway's side ----------------------------------------------------------------------------------


async def test_a_request_that_waits_at_a_draining_worker_moves() -> None:
    async with workers(PREFILL, DECODE, DECODE) as started, gateway(started) as (backend, cluster):
        _, *decodes = started
        for decode in decodes:
            decode.script.stop_at = 0  # nothing is begun
        asked = make_request()
        stream = await backend.start(asked)
        await until(lambda: any(decode.of("attach") for decode in decodes))
        first, second = sorted(decodes, key=lambda decode: not decode.of("attach"))
        second.script.stop_at = None
        first.script.draining = True
        assert await collect(stream) == {0: expected(asked)}
        assert len(second.of("submit")) == 1 and second.of("attach")[0].handles, "the same pages serve again"
        assert len(started[0].of("prefill")) == 1
        again = make_request("again")
        assert await collect(await backend.start(again)) == {0: expected(again)}
        assert len(first.of("submit")) == 1, "nothing new is sent there"


async def test_a_request_stays_at_the_last_worker_and_where_it_has_begun() -> None:
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        decode = started[1]
        decode.script.step_s = 0.2
        asked = make_request()
        stream = await backend.start(asked)
        decode.script.draining = True
        assert await collect(stream) == {0: expected(asked)}
        assert len(decode.of("submit")) == 1
    async with workers(PREFILL, DECODE, DECODE) as started, gateway(started) as (backend, _):
        _, *decodes = started
        for decode in decodes:
            decode.script.step_s = 0.2
        stream = await backend.start(asked)
        entries = each(stream)
        while (await anext(entries)).index == 0:
            pass
        for decode in decodes:
            decode.script.draining = bool(decode.of("submit"))
        async for _ in entries:
            pass
        await stream.aclose()
        assert sum(len(decode.of("submit")) for decode in decodes) == 1
