"""What a worker measures of its links: the way that pages take, and why; and no request notices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import staged_rig
from real_worker import RealWorker, decoding, prefill, real_worker, tiny_config

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError, TransferFailed
from eyas.common.types import Role
from eyas.common.wire import message, rpc
from eyas.common.wire.clients import InfoClient
from eyas.common.wire.links import PageLink
from eyas.engine.kv import probe
from eyas.engine.kv.pages import PagePool
from kv_transfer.backends import table
from prefill_svc import transfer
from tests.rpc.free_pages import PAGE_BYTES, Poison, request

Pair = tuple[RealWorker, RealWorker]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return tiny_config(tmp_path_factory.mktemp("models"))


@pytest.fixture
def pair(config: EngineConfig, tmp_path: Path) -> Any:
    """A prefill worker `here`, and a puller beside it or on what looks like another host, `there`."""

    @contextlib.asynccontextmanager
    async def start(place: str, role: Role = Role.DECODE, **changes: Any) -> AsyncIterator[Pair]:
        async with real_worker(config, Role.PREFILL, pool_dir=str(tmp_path / "here")) as a:
            puller = {"pool_dir": str(tmp_path / place), "registry": f"static:{a.address}"}
            async with real_worker(config, role, **puller, **changes) as b:
                yield a, b

    return start


async def links(puller: RealWorker, owner: str) -> list[PageLink]:
    async with rpc.channel(puller.address) as channel:
        return await InfoClient(channel).probe_links(owner, 15.0)


async def pulled(a: RealWorker, b: RealWorker) -> str:
    """One request through both; the path of its pages."""
    async with decoding(b) as decode:
        decode.attach(request(), await prefill(a, request()))
        return (await decode.tokens())[1]


BY_NIXL = ("rdma", "rdma_slots", "nixl")  # which not every machine has
NOT_OFFERED = "does not offer its KV by cuda_ipc"


@pytest.mark.parametrize(
    ("place", "transfer_by", "path", "reasons"),
    [
        ("here", "auto", "shm", {"cuda_ipc": NOT_OFFERED}),
        ("there", "auto", "tcp", {"cuda_ipc": NOT_OFFERED, "shm": "is not a file in"}),
        pytest.param(
            "here",
            "grpc",
            "grpc",
            {"cuda_ipc": "transfer is grpc", "shm": "transfer is grpc", "tcp": "transfer is grpc"},
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_a_link_is_measured_by_the_way_that_requests_take(
    pair: Any, place: str, transfer_by: str, path: str, reasons: dict[str, str]
) -> None:
    async with pair(place, transfer=transfer_by) as (a, b):
        (before,) = await links(b, a.address)
        assert await pulled(a, b) == path
        (after,) = await links(b, a.address)
        for link in (before, after):
            assert (link.path, link.problem) == (path, "")
            passed_over = {name: why for name, why in link.passed_over.items() if name not in BY_NIXL}
            assert list(passed_over) == list(reasons)
            assert all(reasons[name] in why for name, why in passed_over.items())
            assert 0 < link.latency_s < 1 and link.bytes_per_s > PAGE_BYTES
        assert (before.pulls, before.pulled_bytes) == (0, 0)
        assert (after.pulls, after.pulled_bytes) == (1, 9 * PAGE_BYTES)
        await b.idle()


async def test_a_draft_worker_measures_draft_pages(pair: Any) -> None:
    async with pair("here", Role.DRAFT) as (a, b):
        (link,) = await links(b, a.address)
        assert (link.path, link.problem) == ("shm", "") and link.bytes_per_s > 0
        assert b.engine._sequences._pool.used == 0


@pytest.mark.parametrize(("by", "path"), [("grpc", "grpc"), ("memory", "memory")])
async def test_pages_of_a_device_are_measured_with_staging_and_without(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, path: str
) -> None:
    staged_rig.pretend(monkeypatch)
    monkeypatch.setattr(table, "BACKENDS", {"memory": "plain_device:MemoryBackend", **table.BACKENDS})
    async with staged_rig.pair(config, tmp_path, by) as (a, b):
        (link,) = await links(b, a.address)
        assert (link.path, link.problem) == (path, "") and link.bytes_per_s > PAGE_BYTES
        await b.idle()
        assert staged_rig.slots_free(b) == staged_rig.SLOTS == staged_rig.slots_left(a)


async def test_a_way_that_does_not_lead_there_is_told(pair: Any) -> None:
    async with pair("there", transfer="shm") as (a, b):
        (link,) = await links(b, a.address)
        assert (link.path, link.latency_s, link.bytes_per_s) == ("", 0.0, 0.0)
        assert "is not a file in" in link.problem and "transfer is shm" in link.problem
        await b.idle()


async def test_whom_a_worker_does_not_know_it_does_not_dial(pair: Any) -> None:
    async with pair("here") as (_, b):
        with pytest.raises(TransferFailed, match="is not found"):
            await links(b, "127.0.0.1:1")


async def test_a_worker_whose_pages_stay_says_so(config: EngineConfig, tmp_path: Path) -> None:
    async with real_worker(config, *Role, transfer="none", pool_dir=str(tmp_path)) as alone:
        with pytest.raises(ConfigError, match="stays"):
            await links(alone, "127.0.0.1:1")


async def test_no_page_of_a_request_is_taken_or_written(pair: Any) -> None:
    """Cached pages make room; with every page in use, nothing is measured."""
    async with pair("there") as (a, b):
        assert await pulled(a, b) == "tcp"
        await b.idle()
        pool, cache = b.engine._parts.scheduler.pool, b.engine._parts.scheduler.cache
        poison = Poison(b)
        mine = pool.take(pool.free)  # what is left is the cache's
        assert (held := cache.cached_pages) > 1
        (link,) = await links(b, a.address)
        assert link.problem == "" and cache.cached_pages < held
        mine += pool.take(pool.free)
        cache.evict(held)
        mine += pool.take(pool.free)
        content = b.engine._parts.pools[0].tensor[mine].clone()
        (link,) = await links(b, a.address)
        assert link.problem == "no pages are free to copy into"
        assert (content == b.engine._parts.pools[0].tensor[mine]).all()
        pool.drop(mine)
        poison.check()


def test_half_of_the_free_pages_are_left_to_requests() -> None:
    pool = PagePool(64)
    pool.take(57)
    assert len(probe.spare(pool, None, 100)) == 3
    assert len(probe.spare(PagePool(64), None, 100)) == 8 and len(probe.spare(PagePool(64), None, 2)) == 2


class Stuck(transfer.TransferServicer):
    """Sends no byte."""

    async def Fetch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield b""


async def test_a_probe_that_does_not_end_is_given_up_and_harms_no_request(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "LIMIT_S", 0.3)
    monkeypatch.setattr(transfer, "TransferServicer", Stuck)
    async with pair("there", transfer="grpc") as (a, b), decoding(b) as decode:
        running = asyncio.create_task(links(b, a.address))
        decode.session.submit(request(), attempt=1, attach=False)
        await decode.next(message.StepReply)
        (link,) = await running
        assert link.problem == "its copies have not ended within 0.3 s" and link.path == ""
        await decode.tokens()
        await b.idle()


async def test_links_are_measured_one_after_the_other(pair: Any) -> None:
    async with pair("here") as (a, b):
        both = await asyncio.gather(links(b, a.address), links(b, a.address))
        assert [link.problem for (link,) in both] == ["", ""]
