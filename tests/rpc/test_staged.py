"""Workers whose pools are in no file, as a GPU's: pages pass through staging, and tokens are the same."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from real_worker import RealWorker, alone, decoding, prefill, real_worker, tiny_config
from staged_rig import PROMPT, SLOTS, pair, pretend, request, same_pages, slots_free, slots_left

from eyas.common.config import EngineConfig
from eyas.common.errors import InvalidRequest, RequestTimeout
from eyas.common.types import KvKind, Role
from eyas.common.wire import clients, message, rpc
from eyas.common.wire.transfer import TransferClient
from eyas.engine.kv.staging import PageStaging, StagingInlet
from eyas.engine.loop import engine as loop_engine
from kv_transfer import nics
from kv_transfer.backends import nixl, table
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.backends.rdma_slots import RdmaSlotsBackend
from prefill_svc.transfer import TransferServicer
from protos import transfer_pb2_grpc
from tests.unit.fake_nixl import FakeNixl


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return tiny_config(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """What a worker says of each prompt that computes everything itself."""
    pools = tmp_path_factory.mktemp("pools")
    return dict(enumerate(asyncio.run(alone(config, pools, *map(request, range(8))))))


Played = Callable[[], FakeNixl]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    """Call it to have NIXL's library here, played."""

    def play() -> FakeNixl:
        nixl = FakeNixl()
        monkeypatch.setattr(table, "missing", lambda name: "")
        table.backend("rdma")  # its class is made before the one below it is replaced
        for kind in (NixlBackend, RdmaSlotsBackend):
            played = partial(kind, bindings=lambda: nixl)
            monkeypatch.setattr(f"{kind.__module__}.{kind.__name__}", played)
        return nixl

    return play


@pytest.fixture(autouse=True)
def device_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


@pytest.mark.parametrize(
    "by",
    [
        "auto",
        pytest.param("tcp", marks=pytest.mark.slow),
        pytest.param("grpc", marks=pytest.mark.slow),
        "nixl",
        "rdma_slots",
    ],
)
async def test_pages_that_pass_through_staging_give_the_same_bytes_and_tokens(
    config: EngineConfig,
    expected: dict[int, list[int]],
    tmp_path: Path,
    played: Played,
    monkeypatch: pytest.MonkeyPatch,
    by: str,
) -> None:
    """`rdma_slots`: through slots in the devices' memory."""
    monkeypatch.setattr(nics, "folders", lambda *sysfs: [tmp_path] if by == "rdma_slots" else [])
    monkeypatch.setattr(nixl, "SLOW", 0.0)  # as the played library is
    if by in ("nixl", "rdma_slots"):
        library = played()
    async with pair(config, tmp_path, by) as (a, b), decoding(b) as decode:
        assert isinstance(b.engine._parts.copiers[0]._landing, StagingInlet)
        decode.attach(request(0), await prefill(a, request(0)))
        assert await decode.tokens() == (expected[0], "shm" if by == "auto" else by)
        assert await same_pages(a, b)
        assert slots_left(a) == slots_free(b) == SLOTS
    assert {path.suffix for path in tmp_path.iterdir()} <= {".lock"}, "staging files outlived their workers"
    if by in ("nixl", "rdma_slots"):
        assert library.wrong == [] and len(library.reads) >= 5, "nine pages, two at a time"


async def test_bytes_that_were_not_held_until_they_were_read_do_not_count(
    config: EngineConfig,
    expected: dict[int, list[int]],
    tmp_path: Path,
    played: Played,
    monkeypatch: Any,
    caplog: Any,
) -> None:
    """The owner takes its slots back while the first READ of the prompt runs."""
    nixl = played()
    monkeypatch.setattr("prefill_svc.transfer.SLOT_LEASE_S", 0.3)
    async with pair(config, tmp_path, "nixl", Role.DECODE, Role.PREFILL) as (a, b), decoding(b) as decode:
        warm = request(1, "warm")  # the way is proven
        decode.attach(warm, await prefill(a, warm))
        assert (await decode.tokens())[1] == "nixl"
        nixl.hold = True
        began = len(nixl.reads)
        decode.attach(request(0), await prefill(a, request(0)))
        async with asyncio.timeout(30):
            while len(nixl.reads) == began:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.6)
        nixl.let_go()
        await decode.next(message.PagesLost)
        assert "has not read its slots within 0.3 s" in caplog.text
        decode.session.attach("r0", 3, (), ())
        assert await decode.tokens() == (expected[0], "")
        await b.idle()
        await a.idle()
        assert slots_left(a) == slots_free(b) == SLOTS and nixl.wrong == []


async def test_a_call_to_stage_that_asks_for_nothing_ends(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefill_svc.transfer.REQUEST_S", 0.3)
    async with (
        real_worker(config, Role.PREFILL, pool_dir=str(tmp_path)) as a,
        rpc.channel(a.address) as channel,
    ):
        call = transfer_pb2_grpc.TransferServiceStub(channel).Stage()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await asyncio.wait_for(call.read(), 30)
        assert type(rpc.map_rpc_error(ended.value)) is RequestTimeout


async def test_a_call_that_rests_holds_up_no_end(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefill_svc.transfer.REST_S", 60.0)
    monkeypatch.setattr("eyas.worker.front.STOP_GRACE_S", 60.0)
    async with contextlib.AsyncExitStack() as longer:
        async with real_worker(config, Role.PREFILL, pool_dir=str(tmp_path)) as a:
            channel = await longer.enter_async_context(rpc.channel(a.address))
            owner, epoch = TransferClient(channel, a.address), a.engine._parts.ready.pools["target"].epoch
            async with owner.stage_proof(KvKind.TARGET, epoch, [128]) as staged:
                await staged.read()
            leaves = time.monotonic()
        assert time.monotonic() < leaves + 20


async def test_windows_of_a_call_follow_each_other(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that rested is used again, not for long, and never one whose window failed."""
    begun: list[object] = []
    stage = TransferServicer.Stage

    async def counted(servicer: Any, requests: Any, context: Any) -> Any:
        begun.append(context)
        async for answer in stage(servicer, requests, context):
            yield answer

    monkeypatch.setattr(TransferServicer, "Stage", counted)
    monkeypatch.setattr("prefill_svc.transfer.REST_S", 0.3)
    async with (
        real_worker(config, Role.PREFILL, pool_dir=str(tmp_path)) as a,
        rpc.channel(a.address) as channel,
    ):
        owner, pool = TransferClient(channel, a.address), a.engine._parts.pools[0]
        epoch = a.engine._parts.ready.pools["target"].epoch

        async def window(*, read: bool = True) -> None:
            async with owner.stage_proof(KvKind.TARGET, epoch, [128]) as staged:
                slot = a.engine._parts.stager.outlets["target"].staging.area.pages[staged.slots[0]]
                assert slot.tobytes() == pool.pages[128].numpy().tobytes()
                if read:
                    await staged.read()

        for _ in range(4):
            await window()
        assert len(begun) == 1
        await asyncio.gather(window(), window())
        assert len(begun) == 2, "two at once have two"
        await window(read=False)
        with pytest.raises(InvalidRequest):
            async with owner.stage_proof(KvKind.TARGET, epoch, [5]):
                pass
        await window()
        assert len(begun) == 3, "neither is used again"
        monkeypatch.setattr("eyas.common.wire.transfer.RESTS_S", 0.1)
        await asyncio.sleep(0.4)  # its owner has ended it

        async def ends(requests: Any) -> None:
            await anext(requests, None)

        monkeypatch.setattr(TransferServicer, "_another", lambda _, requests: ends(requests))
        await window()
        assert len(begun) == 4
        await window()
        assert len(begun) == 5, "its owner ended it as it was used again"
        async with asyncio.timeout(10):
            while slots_left(a) != SLOTS:
                await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_more_prompts_than_staging_holds_take_turns(
    config: EngineConfig, expected: dict[int, list[int]], tmp_path: Path
) -> None:
    """Prompts of 9 pages each against 4 slots; the callers of some leave."""
    async with contextlib.AsyncExitStack() as stack:
        a, b = await stack.enter_async_context(pair(config, tmp_path, "grpc"))
        decode = await stack.enter_async_context(decoding(b))
        channel = await stack.enter_async_context(rpc.channel(a.address))

        async def one(i: int) -> None:
            events = clients.PrefillClient(channel).prefill(request(i), 1, False)
            async with contextlib.aclosing(events):
                async for event in events:
                    if isinstance(event, message.PrefillStarted):
                        if i % 4 == 3:
                            return  # the caller leaves
                        decode.attach(request(i), event.handles)

        async with asyncio.timeout(60):
            prompts = asyncio.gather(*(one(i) for i in range(8)))
            answers = await collect(decode, {f"r{i}" for i in range(8) if i % 4 != 3})
            await prompts
        assert answers == {f"r{i}": expected[i] for i in range(8) if i % 4 != 3}
        await b.idle()
        await a.idle()
        assert slots_left(a) == slots_free(b) == SLOTS


async def collect(decode: Any, ids: set[str]) -> dict[str, list[int]]:
    """All tokens of these requests."""
    tokens: dict[str, list[int]] = {id: [] for id in ids}
    open_ids = set(ids)
    while open_ids:
        for entry in (await decode.next(message.StepReply)).entries:
            tokens[entry.id][entry.index :] = entry.tokens
            if entry.finish is not None:
                open_ids.discard(entry.id)
    return tokens


async def test_draft_pages_pass_through_staging_too(
    config: EngineConfig, expected: dict[int, list[int]], tmp_path: Path
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        start = stack.enter_async_context
        a = await start(real_worker(config, Role.PREFILL, pool_dir=str(tmp_path)))
        known = f"static:{a.address}"
        d = await start(real_worker(config, Role.DRAFT, registry=known, pool_dir=str(tmp_path)))
        known += f",{d.address}"
        b = await start(real_worker(config, Role.DECODE, registry=known, pool_dir=str(tmp_path)))
        decode = await start(decoding(b))
        arrived = d.engine._sequences.arrived
        pulled: list[bytes] = []

        def remember(owner: Any, arrival: Any) -> None:
            pages = d.engine._parts.runner.pool.tensor[arrival.pages]
            assert arrival.path == "shm"
            pulled.append(pages.numpy().tobytes())
            arrived(owner, arrival)

        d.engine._sequences.arrived = remember
        for turn in range(40):  # until decode has found its draft worker
            made = request(0, f"t{turn}")
            decode.attach(made, await prefill(a, made, draft=True))
            assert (await decode.tokens())[0] == expected[0]
            if pulled:
                break
        ours = draft_pages(a)
        assert len(ours) == 14 * d.engine._parts.runner.pool.shape.page_bytes
        assert pulled[0][: len(ours)] == ours


async def test_a_worker_that_decodes_and_drafts_goes_on_with_the_drafts_of_prefill(
    config: EngineConfig, expected: dict[int, list[int]], tmp_path: Path
) -> None:
    """The roles of a GPU in the split layout: draft KV comes into the same page numbers."""
    roles = (Role.DECODE, Role.DRAFT)
    async with pair(config, tmp_path, "auto", *roles) as (a, b), decoding(b) as decode:
        decode.attach(request(0), await prefill(a, request(0), draft=True))
        assert await decode.tokens() == (expected[0], "shm")
        await b.idle()
        await a.idle()
        theirs, ours = draft_pages(a), draft_pages(b)
        assert len(theirs) > 0 and ours == theirs


def draft_pages(worker: RealWorker) -> bytes:
    """The draft KV of the cached pages of the prompt."""
    cache, pages = worker.engine._parts.scheduler.cache, worker.engine._parts.scheduler.pool
    numbers = cache.match(PROMPT)
    pages.drop(numbers)
    return worker.engine._parts.pools[1].tensor[numbers].numpy().tobytes()


async def test_an_idle_owner_looks_after_pages_on_their_way_out(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its naps are long here, and its copies to staging end after its last step."""
    copy = PageStaging._copy_out

    def slowly(*args: Any) -> int:
        time.sleep(0.2)
        return copy(*args)

    async with pair(config, tmp_path, "grpc") as (a, b), decoding(b) as decode:
        monkeypatch.setattr(PageStaging, "_copy_out", slowly)
        monkeypatch.setattr(loop_engine, "IDLE_S", 8.0)
        began = time.monotonic()
        decode.attach(request(0), await prefill(a, request(0)))
        await decode.tokens()
        took = time.monotonic() - began
        monkeypatch.setattr(loop_engine, "IDLE_S", 0.1)
    assert took < 7.0
