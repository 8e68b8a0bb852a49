"""KV pages between real workers: every route gives the same bytes and tokens, whatever happens on the way."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from real_worker import alone, decoding, prefill, real_worker, tiny_config

from eyas.common.config import EngineConfig
from eyas.common.errors import InvalidRequest, TransferFailed
from eyas.common.types import KvHandle, KvKind, RankPages, Role
from eyas.common.wire import convert, message, rpc
from eyas.common.wire.message import WireFailure
from eyas.common.wire.transfer import TransferClient, WatchReady
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.transfer_messages import WatchUpdate
from kv_transfer.backends import stream
from kv_transfer.layout import PROBE_WINDOWS, window_pages
from prefill_svc import transfer
from protos import transfer_pb2
from tests.rpc.free_pages import PAGE_BYTES, PROMPT, Poison, request


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return tiny_config(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What a worker says that computes everything itself."""
    (answer,) = asyncio.run(alone(config, tmp_path_factory.mktemp("pools"), request()))
    return answer


@pytest.fixture
def two_hosts(config: EngineConfig, tmp_path: Path) -> Any:
    """A prefill and a decode worker that share no memory, and no sockets but gRPC's."""

    @contextlib.asynccontextmanager
    async def start(**changes: Any) -> AsyncIterator[Any]:
        async with real_worker(config, Role.PREFILL, pool_dir=str(tmp_path / "here")) as a:
            there = {"pool_dir": str(tmp_path / "there"), "registry": f"static:{a.address}"}
            async with real_worker(config, Role.DECODE, **{"transfer": "grpc", **there, **changes}) as b:
                yield a, b

    return start


@pytest.mark.parametrize(
    ("transfer_by", "there", "path"),
    [
        ("auto", "here", "shm"),
        ("auto", "there", "tcp"),
        pytest.param("shm", "here", "shm", marks=pytest.mark.slow),
        pytest.param("grpc", "here", "grpc", marks=pytest.mark.slow),
    ],
)
async def test_every_route_gives_the_same_bytes_and_tokens(
    config: EngineConfig, expected: list[int], tmp_path: Path, transfer_by: str, there: str, path: str
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        start = stack.enter_async_context
        a = await start(real_worker(config, Role.PREFILL, pool_dir=str(tmp_path / "here")))
        puller = {
            "registry": f"static:{a.address}",
            "pool_dir": str(tmp_path / there),
            "transfer": transfer_by,
        }
        b = await start(real_worker(config, Role.DECODE, **puller))
        decode = await start(decoding(b))
        decode.attach(request(), await prefill(a, request()))
        assert await decode.tokens() == (expected, path)
        await b.idle()
        await a.idle()
        digests = {hashlib.sha256(w.pages(PROMPT)).digest() for w in (a, b)}
        assert len(a.pages(PROMPT)) == 8 * PAGE_BYTES and len(digests) == 1


async def test_draft_pages_come_the_same_way(
    config: EngineConfig, expected: list[int], tmp_path: Path
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        start = stack.enter_async_context
        a = await start(real_worker(config, Role.PREFILL, pool_dir=str(tmp_path / "a")))
        known = f"static:{a.address}"
        d = await start(real_worker(config, Role.DRAFT, registry=known, pool_dir=str(tmp_path / "d")))
        known += f",{d.address}"
        b = await start(real_worker(config, Role.DECODE, registry=known, pool_dir=str(tmp_path / "b")))
        decode = await start(decoding(b))
        arrivals: list[tuple[KvHandle, str, bytes]] = []
        take = d.engine._sequences.arrived

        def arrived(owner: Any, arrival: Any) -> None:
            pages = d.engine._parts.runner.pool.tensor[arrival.pages]
            arrivals.append((arrival.handle, arrival.path, pages.numpy().tobytes()))
            take(owner, arrival)

        d.engine._sequences.arrived = arrived
        for i in range(40):  # until decode has found its draft worker
            handles = await prefill(a, request(f"r{i}"), draft=True)
            decode.attach(request(f"r{i}"), handles)
            assert (await decode.tokens())[0] == expected
            if arrivals:
                break
        handle, path, pages = arrivals[0]
        assert path == "tcp" and handle.group == "draft"
        assert pages == a.engine._parts.pools[1].tensor[list(handle.shards[0].pages)].numpy().tobytes()


async def test_a_route_that_cannot_be_taken_is_one_clear_line(
    two_hosts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_hosts(transfer="shm") as (a, b), decoding(b) as decode:
        decode.attach(request(), await prefill(a, request()))
        await decode.next(message.PagesLost)
        (line,) = [line for line in caplog.messages if "its KV did not arrive" in line]
        assert "is not a file in" in line and "transfer is shm" in line


class Slow(transfer.TransferServicer):
    """Sends one chunk of a fetch, and one more for each release of `gate`."""

    gate: ClassVar[asyncio.Semaphore]
    begun: ClassVar[asyncio.Event]

    async def Fetch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for chunk in super().Fetch(request, context):
            yield chunk
            self.begun.set()
            await self.gate.acquire()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[Slow]:
    monkeypatch.setattr(stream, "CHUNK_BYTES", PAGE_BYTES + 1000)
    monkeypatch.setattr(transfer, "TransferServicer", Slow)
    Slow.gate, Slow.begun = asyncio.Semaphore(0), asyncio.Event()
    return Slow


async def test_a_peer_that_goes_away_in_the_middle_is_lost_and_recomputed(
    two_hosts: Any, slow: type[Slow], expected: list[int]
) -> None:
    async with two_hosts() as (a, b), decoding(b) as decode:
        decode.attach(request(), await prefill(a, request()))
        await asyncio.wait_for(slow.begun.wait(), 30)
        await a.front.stop()
        lost = await decode.next(message.PagesLost)
        assert (lost.id, lost.attempt) == ("r", 2)
        decode.session.attach("r", 3, (), ())
        assert await decode.tokens() == (expected, "")
        await b.idle()


async def test_an_owner_that_sends_nothing_is_given_up(
    two_hosts: Any,
    slow: type[Slow],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("eyas.worker.fetches.STALL_S", 0.3)
    async with two_hosts() as (a, b), decoding(b) as decode:
        decode.attach(request(), await prefill(a, request()))
        await decode.next(message.PagesLost)
        assert "cannot come by grpc: the owner of the pages sent nothing for 0.3 s" in caplog.text
        decode.session.cancel("r")
        await b.idle()


async def test_a_cancelled_fetch_writes_no_byte_into_freed_pages(two_hosts: Any, slow: type[Slow]) -> None:
    async with two_hosts() as (a, b), decoding(b) as decode:
        poison = Poison(b)
        decode.attach(request(), await prefill(a, request()))
        await asyncio.wait_for(slow.begun.wait(), 30)
        decode.session.cancel("r")
        await b.idle()
        assert poison.freed == 9
        for _ in range(100):
            slow.gate.release()
        await asyncio.sleep(0.2)
        poison.check()


@pytest.mark.parametrize("transfer_by", ["shm", pytest.param("grpc", marks=pytest.mark.slow)])
async def test_no_free_page_is_ever_written(config: EngineConfig, tmp_path: Path, transfer_by: str) -> None:
    """Pulls that are cancelled at any moment, in a pool too small for all of them."""
    async with contextlib.AsyncExitStack() as stack:
        start = stack.enter_async_context
        a = await start(real_worker(config, Role.PREFILL, pool_dir=str(tmp_path)))
        puller = {"registry": f"static:{a.address}", "pool_dir": str(tmp_path), "transfer": transfer_by}
        b = await start(real_worker(config, Role.DECODE, num_pages=40, **puller))
        decode = await start(decoding(b))
        poison = Poison(b)
        for i in range(14):
            made = request(f"r{i}", tuple(range(i, 120 + i)))
            decode.attach(made, await prefill(a, made))
            await asyncio.sleep(0.002 * (i % 5))
            if i % 3:
                decode.session.cancel(f"r{i}")
        await b.idle()
        poison.check()
        assert poison.freed > 20
        assert b.engine._parts.pulls.active == 0


async def test_a_fetch_reaches_the_pages_of_the_handle_it_watches_and_no_others(
    config: EngineConfig, tmp_path: Path
) -> None:
    async with real_worker(config, Role.PREFILL, pool_dir=str(tmp_path)) as a:
        (handle,) = await prefill(a, request())
        secret, secret_draft = await prefill(a, request("s", tuple(range(200, 240))), draft=True)
        (foreign, *_) = secret.shards[0].pages
        async with rpc.channel(a.address) as channel:
            owner = TransferClient(channel, a.address)
            pages = handle.shards[0].pages
            with pytest.raises(TransferFailed, match="no Watch of handle"):
                await fetched(owner, handle, 1, pages)
            assert len(await proof_page(owner, handle, 128)) == PAGE_BYTES
            for asked in (0, pages[0], 127, 129):
                with pytest.raises(InvalidRequest, match="the proof page only"):
                    await proof_page(owner, handle, asked)
            window, most = window_pages(PAGE_BYTES), PROBE_WINDOWS * window_pages(PAGE_BYTES)
            many = [data async for data in owner.fetch_proof(handle.group, handle.epoch, [128] * window)]
            assert sum(map(len, many)) == window * PAGE_BYTES
            with pytest.raises(InvalidRequest, match="times at most"):
                _ = [data async for data in owner.fetch_proof(handle.group, handle.epoch, [128] * (most + 1))]
            with pytest.raises(InvalidRequest, match="the proof page only"):
                await proof_page(owner, msgspec.structs.replace(handle, epoch=1), 128)
            updates = owner.watch(handle, 1)
            assert await anext(updates) == WatchReady(len(PROMPT))
            assert await fetched(owner, handle, 1, pages[:8]) == a.pages(PROMPT)
            for asked in [(foreign,), (*pages[:8], foreign), (pages[0],) * 10, (128,)]:
                with pytest.raises(InvalidRequest, match="does not name"):
                    await fetched(owner, handle, 1, asked)
            for change in [{"id": secret.id}, {"group": KvKind.DRAFT}, {"epoch": 1}]:
                with pytest.raises(TransferFailed, match="no Watch of handle"):
                    await fetched(owner, msgspec.structs.replace(handle, **change), 1, pages[:1])
            with pytest.raises(TransferFailed, match="no Watch of handle"):
                await fetched(owner, handle, 2, pages[:1])
            await updates.aclose()
            async with asyncio.timeout(30):
                with pytest.raises(TransferFailed, match="no Watch of handle"):
                    while True:
                        await fetched(owner, handle, 1, pages[:1])


async def test_pages_that_were_released_are_read_no_more(
    config: EngineConfig, tmp_path: Path, slow: type[Slow]
) -> None:
    """They are another request's soon, whatever Watch is still open, whatever Fetch is under way."""
    async with real_worker(config, Role.PREFILL, pool_dir=str(tmp_path)) as a:
        (handle,) = await prefill(a, request())
        async with rpc.channel(a.address) as channel:
            owner = TransferClient(channel, a.address)
            pages = handle.shards[0].pages
            updates = owner.watch(handle, 2)
            await anext(updates)
            reading = owner.fetch(handle, 2, pages[:8])
            await anext(reading)
            assert not await owner.release(handle, 1), "an earlier attempt ends nothing"
            slow.gate.release()
            await anext(reading)
            assert await owner.release(handle, 2)
            slow.gate.release()
            with pytest.raises(TransferFailed, match="no Watch of handle"):
                async for _ in reading:
                    pass
            with pytest.raises(TransferFailed, match="no Watch of handle"):
                await fetched(owner, handle, 2, pages[:8])
            await updates.aclose()


async def test_a_watch_of_a_forged_handle_is_refused(config: EngineConfig, tmp_path: Path) -> None:
    """Else a puller would copy, out of memory that both share, pages that it was never offered."""
    async with real_worker(config, Role.PREFILL, pool_dir=str(tmp_path)) as a:
        (handle,) = await prefill(a, request())
        (secret,) = await prefill(a, request("s", tuple(range(200, 240))))
        async with rpc.channel(a.address) as channel:
            owner = TransferClient(channel, a.address)
            for change in [
                {"shards": secret.shards, "tokens": secret.tokens},
                {"shards": (msgspec.structs.replace(handle.shards[0], rank=1),)},
                {"group": KvKind.DRAFT},
            ]:
                with pytest.raises(TransferFailed, match="is not valid"):
                    await anext(owner.watch(msgspec.structs.replace(handle, **change), 1))
            assert abs(handle.id - secret.id) > 2**32, "who knows one handle can guess no other"


async def fetched(owner: TransferClient, handle: KvHandle, attempt: int, pages: tuple[int, ...]) -> bytes:
    return b"".join([chunk async for chunk in owner.fetch(handle, attempt, pages)])


async def proof_page(owner: TransferClient, handle: KvHandle, page: int) -> bytes:
    return b"".join([chunk async for chunk in owner.fetch_proof(handle.group, handle.epoch, [page])])


async def test_a_watch_that_failed_lets_nothing_be_read_although_its_stream_is_open() -> None:
    """Its pages may be another request's already: that is not left to a task which has not run yet."""
    client = EngineClient(lambda commands: None)
    client.ready = object()  # type: ignore[assignment]
    client.accept()
    servicer = transfer.TransferServicer(client)
    handle = KvHandle("w", 1, 0, 7, KvKind.TARGET, "m", 16, (RankPages(0, (3,)),))
    pb = convert.handle_to_pb(handle)
    updates: Any = servicer.Watch(transfer_pb2.WatchRequest(handle=pb, attempt=1), None)
    waiting = asyncio.ensure_future(anext(updates))
    await asyncio.sleep(0)
    fetch = transfer_pb2.FetchRequest(epoch=1, id=7, attempt=1, pages=[4], group=pb.group)
    failed = WatchUpdate(1, failure=WireFailure("transfer_failed", "the lease has ended"))
    no_watch, no_page = (TransferFailed, "no Watch of handle"), (InvalidRequest, "does not name")
    for event, (error, says) in ((None, no_watch), (WatchUpdate(1, 16), no_page), (failed, no_watch)):
        client.dispatch([] if event is None else [event])
        with pytest.raises(error, match=says):
            await anext(servicer.Fetch(fetch, None))
    assert (await waiting).ready.tokens == 16
    assert (await anext(updates)).failed.status.message == "the lease has ended"
