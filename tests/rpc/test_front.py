"""The front around a scripted engine, over real gRPC: requests, refusals, cancellation, health, metrics."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from fake_engine import DIE, REFUSE, SLOW, STALL, WEDGE, FakeEngine, Traits, request, token, worker
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from decode_svc import servicer
from eyas.common.config import EngineConfig, WorkerConfig
from eyas.common.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    EyasError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from eyas.common.types import EngineTimings, FinishCause, FirstToken, Role, WorkerInfo
from eyas.common.wire import clients, convert, message, rpc
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import (
    CancelGeneration,
    Command,
    EngineLoad,
    PrefillDone,
    PrefillPrompt,
    SubmitGeneration,
)
from eyas.engine.ipc.pulse import EngineHeartbeat
from eyas.worker import front, scrape
from eyas.worker.front import EngineLiveness, WorkerFront
from prefill_svc.servicer import PrefillServicer
from protos import common_pb2, decode_pb2, prefill_pb2
from tests.rpc.local_link import LocalEngine, LocalFront
from tests.rpc.session_events import next_of, tokens_of


async def test_a_local_generation_comes_back_in_order() -> None:
    async with worker(Role.DECODE) as w, rpc.channel(w.address) as channel:
        session = clients.DecodeSessionClient(channel, w.address).open()
        session.submit(request(5, 6, choices=2), attempt=1, attach=False)
        events = aiter(session)
        admitted = await next_of(events, message.RequestAdmitted)
        assert (admitted.id, admitted.attempt) == ("r", 1)
        got = await tokens_of(events, ends=2)
        for choice in (0, 1):
            own = [entry for entry in got if entry.choice == choice]
            assert [entry.index for entry in own] == [0, 1, 2]
            assert [entry.tokens[0] for entry in own] == [token((5, 6), choice, i) for i in range(3)]
            assert own[-1].finish is FinishCause.LENGTH and own[-1].id == "r"
        session.close()


async def test_two_sessions_may_use_one_id_and_see_only_their_own() -> None:
    async with worker(Role.DECODE) as w, rpc.channel(w.address) as channel:
        client = clients.DecodeSessionClient(channel, w.address)
        sessions = [client.open(), client.open()]
        for first, session in enumerate(sessions):
            session.submit(request(first + 1, tokens=20), attempt=1, attach=False)
        both = await asyncio.gather(*(tokens_of(aiter(session)) for session in sessions))
        for first, got in enumerate(both):
            assert [entry.tokens[0] for entry in got] == [token((first + 1,), 0, i) for i in range(20)]


async def test_a_refusal_keeps_its_class() -> None:
    async with worker(Role.DECODE, Role.PREFILL) as w, rpc.channel(w.address) as channel:
        session = clients.DecodeSessionClient(channel, w.address).open()
        session.submit(request(REFUSE), attempt=4, attach=False)
        rejected = await next_of(aiter(session), message.RequestRejected)
        assert rejected.attempt == 4 and type(rejected.failure.error()) is Overloaded
        with pytest.raises(Overloaded, match="the queue is full"):
            async for _ in clients.PrefillClient(channel).prefill(request(REFUSE), 1, False):
                pass
        with pytest.raises(DeadlineExceeded, match="too late"):
            async for _ in clients.PrefillClient(channel).prefill(request(DIE), 1, False):
                pass


async def test_pages_that_cannot_be_named_end_their_request_alone() -> None:
    """As of a newer caller, whose kinds of KV this worker does not know."""
    async with worker(Role.DECODE) as w, rpc.channel(w.address) as channel:
        session = clients.DecodeSessionClient(channel, w.address).open()
        for id in ("a", "b"):
            session.submit(request(1, id=id), attempt=3, attach=True)
        await w.heard(SubmitGeneration, 2)
        handle = common_pb2.KvHandle(group=99)  # type: ignore[arg-type]
        attach = decode_pb2.Attach(id="a", attempt=3, handles=[handle])
        session._up.put_nowait(decode_pb2.DecodeServiceSessionRequest(attach=attach))
        failed = await next_of(aiter(session), message.RequestFailed)
        assert (failed.id, failed.attempt, failed.choice) == ("a", 3, None)
        assert type(failed.failure.error()) is InvalidRequest
        assert [c.id.partition(":")[2] for c in await w.heard(CancelGeneration, 1)] == ["a"]
        session.cancel("b")
        await w.heard(CancelGeneration, 2)
        session.close()


async def test_a_session_that_has_no_heartbeats_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its gateway would take the worker for dead, and no log would say why."""

    def broken(info: WorkerInfo) -> decode_pb2.Heartbeat:
        raise KeyError("no such figure")

    monkeypatch.setattr(servicer, "_heartbeat", broken)
    async with worker(Role.DECODE) as w, rpc.channel(w.address) as channel:
        session = clients.DecodeSessionClient(channel, w.address).open()
        with pytest.raises(EyasError, match="internal error"):
            await next_of(aiter(session), clients.Heartbeat)
    assert "no such figure" in caplog.text


async def test_cancel_and_the_end_of_a_session_reach_the_engine() -> None:
    async with worker(Role.DECODE) as w, rpc.channel(w.address) as channel:
        client = clients.DecodeSessionClient(channel, w.address)
        session, other = client.open(), client.open()
        for id in ("a", "b", "c"):
            session.submit(request(1, id=id), attempt=1, attach=True)
        other.submit(request(1, id="d"), attempt=1, attach=True)
        ids = {s.request.id.partition(":")[2]: s.request.id for s in await w.heard(SubmitGeneration, 4)}
        session.cancel("a")
        session.cancel("b", choice=0)
        heard = await w.heard(CancelGeneration, 2)
        assert [(c.id, c.choice) for c in heard] == [(ids["a"], None), (ids["b"], 0)]
        session.close()
        heard = await w.heard(CancelGeneration, 3)
        assert [c.id for c in heard[2:]] == [ids["c"]]  # neither what had ended nor another session's


async def test_prefill_runs_through_its_phases_and_does_not_cancel_what_is_done() -> None:
    async with worker(Role.PREFILL) as w, rpc.channel(w.address) as channel:
        client = clients.PrefillClient(channel)
        events = [event async for event in client.prefill(request(1, 2, choices=2), 1, True)]
        assert [type(event) for event in events] == [
            message.RequestAdmitted,
            message.PrefillStarted,
            message.PrefillDone,
        ]
        assert events[1].handles[0].worker == w.address
        assert [first.token for first in events[2].choices] == [token((1, 2), c, 0) for c in (0, 1)]
        assert w.engine.of(PrefillPrompt)[0].offer_draft
        stream = client.prefill(request(SLOW), 1, False)
        await anext(stream)
        await stream.aclose()
        cancels = await w.heard(CancelGeneration)
        assert [c.id for c in cancels] == [w.engine.of(PrefillPrompt)[1].request.id]


async def test_a_prompt_whose_end_the_caller_did_not_take_is_cancelled() -> None:
    sent: list[Command] = []
    engine = EngineClient(sent.extend)
    engine.ready = SimpleNamespace(context_length=128)
    engine.accept()
    asked = prefill_pb2.PrefillRequest(attempt=1)
    convert.fill_request(asked.request, request(1))
    for taken in (False, True):
        events = PrefillServicer(engine).Prefill(asked, None)
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        id = sent[-1].request.id
        engine.dispatch([PrefillDone(id, 1, (FirstToken(0, 5),), EngineTimings())])
        assert (await first).WhichOneof("event") == "done"
        if taken:
            with pytest.raises(StopAsyncIteration):
                await anext(events)
        await events.aclose()
        assert isinstance(sent[-1], PrefillPrompt if taken else CancelGeneration)


async def test_a_prompt_is_cancelled_by_its_id_behind_what_it_has_said() -> None:
    """Its caller reads to the end, so that it has the handles of all that was offered."""
    sent: list[Command] = []
    engine = EngineClient(sent.extend)
    engine.ready = SimpleNamespace(context_length=128)
    engine.accept()
    service = PrefillServicer(engine)
    asked = prefill_pb2.PrefillRequest(attempt=1)
    convert.fill_request(asked.request, request(1))
    events = service.Prefill(asked, None)
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    id = sent[-1].request.id
    for wrong in (("r", 2), ("other", 1)):
        await service.Cancel(prefill_pb2.CancelRequest(id=wrong[0], attempt=wrong[1]), None)
    engine.dispatch([message.RequestAdmitted(id, 1), message.PrefillStarted(id, 1, ())])
    await service.Cancel(prefill_pb2.CancelRequest(id="r", attempt=1), None)
    assert [(await first).WhichOneof("event"), (await anext(events)).WhichOneof("event")] == [
        "admitted",
        "started",
    ]
    with pytest.raises(Cancelled, match="the caller has left"):
        await anext(events)
    assert sent[-1] == CancelGeneration(id)
    await service.Cancel(prefill_pb2.CancelRequest(id="r", attempt=1), None)  # it has ended


async def test_health_follows_the_engine() -> None:
    link = LocalFront()
    front = WorkerFront(WorkerConfig(engine=EngineConfig(roles=(Role.DECODE,))), link)
    address = await front.start()
    running = asyncio.create_task(front.run())
    async with rpc.channel(address) as channel:
        assert not await rpc.is_serving(channel)
        info = await clients.InfoClient(channel).info(timeout_s=2)
        assert (info.worker, info.roles, info.serving, info.starting) == (
            address,
            (Role.DECODE,),
            False,
            True,
        )
        engine = FakeEngine(EngineConfig(), LocalEngine(link), Traits())
        thread = asyncio.create_task(asyncio.to_thread(engine.run))
        await asyncio.wait_for(asyncio.shield(front.ready), 30)
        info = await clients.InfoClient(channel).info(timeout_s=2)
        assert (info.worker, info.epoch, info.roles, info.serving) == (address, 5, (Role.DECODE,), True)
        assert not info.starting
        assert await rpc.is_serving(channel)
        session = clients.DecodeSessionClient(channel, address).open()
        await next_of(aiter(session), clients.Heartbeat)
        stopping = asyncio.create_task(front.stop())
        with pytest.raises(Unavailable, match="leaving"):
            await next_of(aiter(session), message.StepReply)
        await asyncio.gather(stopping, running, thread)


async def becomes(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not what():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("script", [STALL, WEDGE])
async def test_a_late_engine_gets_nothing_new_and_keeps_what_it_has(
    script: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "STALL", 100.0)
    async with worker(Role.DECODE, Role.PREFILL) as w, rpc.channel(w.address) as channel:
        session = clients.DecodeSessionClient(channel, w.address).open()
        session.submit(request(script, tokens=5), attempt=1, attach=False)
        events = aiter(session)
        await becomes(lambda: w.front.describe().stalled)
        assert not await rpc.is_serving(channel)
        said = await next_of(events, clients.Heartbeat)
        while not said.stalled:
            said = await next_of(events, clients.Heartbeat)
        assert not said.draining
        session.submit(request(3, id="late"), attempt=1, attach=False)
        rejected = await next_of(events, message.RequestRejected)
        assert rejected.id == "late" and type(rejected.failure.error()) is Unavailable
        with pytest.raises(Unavailable, match="is late: .* no progress"):
            await anext(clients.PrefillClient(channel).prefill(request(3), 1, False))
        w.engine.go_on.set()
        assert [entry.index for entry in await tokens_of(events)] == [0, 1, 2, 3, 4]
        await becomes(lambda: w.front.describe().serving)
        assert await rpc.is_serving(channel) and not w.front.describe().stalled
        session.submit(request(3, id="again"), attempt=1, attach=False)
        assert [entry.id for entry in await tokens_of(events)] == ["again"] * 3


async def test_an_engine_with_a_pulse_is_never_late() -> None:
    """However long its step takes, which no step of the warm-up was like."""
    async with worker(Role.DECODE) as w, rpc.channel(w.address) as channel:
        session = clients.DecodeSessionClient(channel, w.address).open()
        session.submit(request(STALL), attempt=1, attach=False)
        await w.heard(SubmitGeneration)
        pulse, began = EngineHeartbeat(w.link), time.monotonic()
        pulse.loop()
        while time.monotonic() < began + front.MIN_SILENCE_S + 1.0:
            pulse()
            assert w.front.describe().serving
            await asyncio.sleep(0.02)
        await becomes(lambda: w.front.describe().stalled)
        w.engine.go_on.set()
        assert len(await tokens_of(aiter(session))) == 3


@pytest.mark.parametrize("script", [STALL, WEDGE])
async def test_an_engine_that_stalls_fails_its_streams_and_comes_back(
    script: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "STALL", 1.0)
    async with worker(Role.DECODE) as w, rpc.channel(w.address) as channel:
        client = clients.DecodeSessionClient(channel, w.address)
        session = client.open()
        session.submit(request(script), attempt=1, attach=False)
        with pytest.raises(Unavailable, match="no progress"):
            async with asyncio.timeout(20):
                async for _ in session:
                    pass
        assert not await rpc.is_serving(channel) and w.front.stalled
        assert (await clients.InfoClient(channel).info(timeout_s=2)).stalled
        w.engine.go_on.set()
        await becomes(lambda: w.front.describe().serving)
        assert not (await clients.InfoClient(channel).info(timeout_s=2)).stalled
        again = client.open()
        again.submit(request(3), attempt=1, attach=False)
        assert len(await tokens_of(aiter(again))) == 3


async def test_a_draining_worker_is_not_said_to_stall() -> None:
    """Nothing is to wait for it, whatever its engine does."""
    async with worker(Role.DECODE) as w, rpc.channel(w.address) as channel:
        session = clients.DecodeSessionClient(channel, w.address).open()
        session.submit(request(STALL), attempt=1, attach=False)
        await becomes(lambda: w.front.describe().stalled)
        await w.front.drain()
        assert not w.front.describe().stalled
        w.engine.go_on.set()


def _liveness(slowest_step_s: float) -> EngineLiveness:
    live = EngineLiveness()
    live.loaded(slowest_step_s, now=0.0)
    return live


def test_liveness_counts_only_silence_with_work_pending() -> None:
    live = _liveness(1.0)
    assert live.limit_s == 4.0 and _liveness(0.1).limit_s == 3.0
    idle, busy = EngineLoad(1, False, 0, 0, 0), EngineLoad(1, True, 1, 0, 0)
    live.saw(idle, 1.0)
    assert not live.is_lagging(100.0)
    live.sent(1, 100.0)
    assert not live.is_lagging(103.9) and live.is_lagging(104.1)
    assert not live.stalled(115.9) and live.stalled(116.1)
    live.saw(busy, 116.2)  # the same stamp: nothing moved
    assert live.stalled(116.2)
    live.saw(EngineLoad(2, True, 1, 0, 0), 116.3)
    assert not live.is_lagging(120.2) and live.is_lagging(120.4)


def test_a_pulse_is_progress_and_time_that_nobody_had_is_no_silence() -> None:
    live = _liveness(0.1)
    live.sent(1, 10.0)
    live.beat(12.9)
    assert not live.is_lagging(15.8) and live.is_lagging(16.0)
    live.missed(20.0)
    assert not live.is_lagging(35.8) and live.is_lagging(36.0)
    live.beat(36.1)
    assert not live.is_lagging(36.2)


def test_a_load_that_left_before_a_command_came_knows_nothing_of_it() -> None:
    live = _liveness(0.1)
    live.sent(1, 9.0)
    live.saw(EngineLoad(1, False, 0, 0, 0, heard=1), 10.0)
    live.sent(2, 10.0)
    live.saw(EngineLoad(2, False, 0, 0, 0, heard=1), 10.1)
    assert not live.is_lagging(13.0) and live.is_lagging(13.2), "the engine never heard of two commands"
    live.saw(EngineLoad(3, False, 0, 0, 0, heard=3), 14.0)
    assert not live.is_lagging(100.0)


async def test_metrics_and_reflection() -> None:
    async with worker(Role.DECODE) as w, rpc.channel(w.address) as channel:
        session = clients.DecodeSessionClient(channel, w.address).open()
        session.submit(request(1), attempt=1, attach=False)
        await tokens_of(aiter(session))
        url = f"http://127.0.0.1:{w.front.metrics_port}/metrics"
        text = (await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read())).decode()
        assert 'eyas_generation_tokens_total{model_name="fake"} 3.0' in text
        assert 'eyas_draft_tokens_accepted_total{model_name="fake"} 3.0' in text
        assert 'eyas_kv_pages{model_name="fake"} 8.0' in text
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        reply = await anext(aiter(stub.ServerReflectionInfo(iter([ask]), timeout=5)))
        names = {service.name for service in reply.list_services_response.service}
        assert {
            "eyas.internal.v1.DecodeService",
            "eyas.internal.v1.WorkerService",
            "grpc.health.v1.Health",
        } <= names
        assert "eyas.internal.v1.PrefillService" not in names


async def test_connections_that_say_nothing_leave_metrics_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a thread: there are few of them, and they end."""
    monkeypatch.setattr(scrape, "MOST_CONNECTIONS", 3)
    async with worker(Role.DECODE) as w:
        places = [("127.0.0.1", w.front.metrics_port)] * 8
        silent = [socket.create_connection(place, timeout=5) for place in places]
        try:
            for connection in silent:
                connection.sendall(b"GET /met")
            url = f"http://127.0.0.1:{w.front.metrics_port}/metrics"
            page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read())
            assert b"eyas_kv_pages" in page
            ended = [await asyncio.to_thread(connection.recv, 1) for connection in silent[:5]]
            assert ended == [b""] * 5
            assert sum("process_request" in thread.name for thread in threading.enumerate()) <= 3
        finally:
            for connection in silent:
                connection.close()


async def test_a_connection_without_a_word_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape._Page, "timeout", 0.1)
    async with worker(Role.DECODE) as w:
        with socket.create_connection(("127.0.0.1", w.front.metrics_port), timeout=5) as silent:
            assert await asyncio.to_thread(silent.recv, 1) == b""


async def test_a_service_that_the_roles_do_not_name_is_not_there() -> None:
    async with worker(Role.PREFILL) as w, rpc.channel(w.address) as channel:
        session = clients.DecodeSessionClient(channel, w.address).open()
        with pytest.raises(EyasError, match="Method not found"):
            await next_of(aiter(session), clients.Heartbeat)


async def test_a_taken_port_is_refused() -> None:
    async with worker(Role.DECODE) as w:
        port = int(w.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match="cannot be used"):
            rpc.bind(rpc.server(), "127.0.0.1", port)
