"""Which addresses a worker dials: those of its cluster, and none that a request names."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec
import pytest
from fake_engine import FakeWorker, request, worker
from page_owner import EPOCH, handle, ready
from scripted_cluster import until

from eyas.common.cluster.listening import free_ports
from eyas.common.types import KvHandle, Role
from eyas.common.wire import clients, message, rpc
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import (
    AttachKv,
    Command,
    OpenPull,
    PullFailed,
    PullMet,
    SubmitGeneration,
    WatchOpened,
)
from eyas.worker.kv_puller import KvPuller
from prefill_svc.transfer import TransferServicer
from tests.rpc.session_events import next_of, tokens_of
from tests.rpc.watched_workers import decoder_of, prefilled


@dataclass
class Stranger:
    """An address where somebody listens who is no member, and how often it was dialled."""

    address: str = ""
    dialled: int = 0

    def answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.dialled += 1
        writer.close()


@contextlib.asynccontextmanager
async def stranger() -> AsyncIterator[Stranger]:
    found = Stranger()
    server = await asyncio.start_server(found.answer, "127.0.0.1")
    found.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield found


def at(offered: KvHandle, worker: str) -> KvHandle:
    return msgspec.structs.replace(offered, worker=worker)


async def test_an_attach_of_an_unknown_request_is_dropped() -> None:
    async with stranger() as foreign, worker(Role.PREFILL) as prefill, decoder_of(prefill) as decode:
        async with rpc.channel(decode.address) as channel:
            session = clients.DecodeSessionClient(channel, decode.address).open()
            session.attach("never-submitted", 1, (at(await prefilled(prefill), foreign.address),), ())
            session.submit(request(1), attempt=1, attach=False)
            await tokens_of(aiter(session))
            assert len(decode.engine.of(SubmitGeneration)) == 1 and decode.engine.of(AttachKv) == []
            session.attach("r", 1, (await prefilled(prefill),), ())  # it has ended: its handles go back
            await decode.heard(AttachKv)
        assert foreign.dialled == 0


@pytest.mark.parametrize("alone", [False, True])
async def test_a_handle_makes_nobody_dial_who_is_no_member(
    alone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with stranger() as foreign, worker(Role.PREFILL) as prefill:
        async with (
            decoder_of(*([] if alone else [prefill])) as decode,
            rpc.channel(decode.address) as channel,
        ):
            session = clients.DecodeSessionClient(channel, decode.address).open()
            session.submit(request(4, 5), attempt=1, attach=True)
            session.attach("r", 2, (at(await prefilled(prefill), foreign.address),), ())
            lost = await next_of(aiter(session), message.PagesLost)
            assert (lost.id, lost.attempt) == ("r", 2)
            (failed,) = decode.engine.of(PullFailed)
            assert failed.failure.code == "transfer_failed" and "--registry" in failed.failure.message
            assert foreign.address in failed.failure.message
        assert foreign.dialled == 0
    warned = [r for r in caplog.records if r.levelno == logging.WARNING and "no --registry" in r.message]
    assert len(warned) == alone


async def test_a_member_may_be_listed_by_another_address_than_its_name() -> None:
    async with worker(Role.PREFILL, host="0.0.0.0", advertise="prefill.example") as prefill:
        offered = await prefilled(prefill, f"127.0.0.1:{prefill.port}")
        assert offered.worker == prefill.address == f"prefill.example:{prefill.port}"
        async with worker(Role.DECODE, registry=f"static:localhost:{prefill.port}") as decode:
            async with rpc.channel(decode.address) as channel:
                session = clients.DecodeSessionClient(channel, decode.address).open()
                session.submit(request(4, 5, 6), attempt=1, attach=True)
                session.attach("r", 2, (offered,), ())
                assert len(await tokens_of(aiter(session))) == 3


async def test_lines_to_members_that_left_are_closed() -> None:
    async with worker(Role.PREFILL) as stays, contextlib.AsyncExitStack() as stack:
        leaves: FakeWorker = await stack.enter_async_context(worker(Role.PREFILL))
        decode = await stack.enter_async_context(decoder_of(stays, leaves))
        async with rpc.channel(decode.address) as channel:
            for number, owner in enumerate((stays, leaves)):
                session = clients.DecodeSessionClient(channel, decode.address).open()
                session.submit(request(4, 5, 6, id=f"r{number}"), attempt=1, attach=True)
                session.attach(f"r{number}", 2 + number, (await prefilled(owner),), ())
                await tokens_of(aiter(session))
        pulls = decode.front._pulls

        assert set(pulls._channels) == {stays.address, leaves.address}
        await leaves.front._server.stop(None)
        await until(lambda: set(pulls._channels) == {stays.address})


async def test_handles_name_no_place_and_only_what_their_owner_described_is_told() -> None:
    heard: list[Command] = []

    def send(commands: Sequence[Command]) -> None:
        heard.extend(commands)

    async def find(worker: str) -> str:
        return worker

    watched: list[Command] = []
    owner, engine, server = EngineClient(watched.extend), EngineClient(send), rpc.server()
    owner.ready, engine.ready = ready("/dev/shm/theirs"), ready("/dev/shm/ours")
    owner.accept()
    TransferServicer(owner).register(server)
    address = f"127.0.0.1:{rpc.bind(server, '127.0.0.1', 0)}"
    await server.start()
    pulls = KvPuller(engine, find)
    good = handle(address)
    forged = [
        msgspec.structs.replace(good, layout="other"),
        msgspec.structs.replace(good, epoch=EPOCH + 1),
    ]
    for number, shown in enumerate((good, *forged)):
        engine.dispatch([OpenPull(number, shown, 1)])
        await until(lambda count=number + 1: len(heard) >= count)
    met, *failed = heard
    assert isinstance(met, PullMet) and met.pool == owner.ready.pools["target"]
    assert len(failed) == 2 and all("restarted" in c.failure.message for c in failed)
    engine.dispatch([OpenPull(3, good, 2, known=True)])
    await until(lambda: len(watched) == 2)
    assert watched[1] == WatchOpened(2, good, 2) and len(heard) == 3, "who is known is not met again"
    await pulls.close()
    await server.stop(None)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_list_without_the_worker_itself_is_told(role: Role, caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[str]:
        found = [r.getMessage() for r in caplog.records if "leaves out this worker" in r.getMessage()]
        caplog.clear()
        return found

    async with worker(Role.PREFILL) as other, stranger() as silent:
        async with worker(role, registry=f"static:{other.address},{silent.address}") as missing:
            (said,) = told()
            assert said.startswith("--registry") and missing.address in said
        assert silent.dialled
        port = next(free_ports())
        for name in ("127.0.0.1", "localhost"):  # by its own address, and by another one
            async with worker(role, port=port, registry=f"static:{other.address},{name}:{port}"):
                assert told() == []
    async with worker(role):  # without a registry it has another warning, if it needs one
        assert told() == []
