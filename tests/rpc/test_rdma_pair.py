"""`rdma` between workers whose pools pretend to be GPUs', the library played: cards serve, vanish, and crawl.

Time may be lost, an answer never is; each fault has its name in the metrics and in what `eyas doctor` shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from real_worker import Decode, RealWorker, alone, decoding, prefill, real_worker, tiny_config
from staged_rig import pretend, request, same_pages

from eyas.common.config import EngineConfig
from eyas.common.types import Role
from eyas.common.wire import message, rpc
from eyas.common.wire.clients import InfoClient
from eyas.common.wire.links import PageLink
from eyas.engine.kv.pool import KvPool
from kv_transfer import nics
from kv_transfer.area import DeviceArea
from kv_transfer.backends import nixl_agent, rdma, table
from kv_transfer.backends.rdma import RdmaBackend
from kv_transfer.gpu.driver import DeviceAllocation, GpuMemory
from kv_transfer.nics import RdmaCard
from tests.unit.fake_gpu import FakeDriver
from tests.unit.fake_nixl import FakeNixl

JUDGED = 4096
CRAWL = 1e15  # bytes per second that nothing reaches


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return tiny_config(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What a worker says of each prompt that computes everything itself."""
    return asyncio.run(alone(config, tmp_path_factory.mktemp("pools"), *map(request, range(3))))


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> FakeNixl:
    """The library, a card near every GPU, and pools that a driver knows."""
    pretend(monkeypatch)
    played, plain = FakeNixl(), KvPool.device_area

    def device_area(pool: KvPool) -> DeviceArea:
        area = plain(pool)
        memory = GpuMemory(area.address, pool.pages.nbytes)
        return dataclasses.replace(area, allocation=DeviceAllocation(FakeDriver(), memory))

    monkeypatch.setattr(KvPool, "device_area", device_area)
    monkeypatch.setattr(nics, "near", lambda gpu: [RdmaCard("mlx5_0", 1.0)])
    monkeypatch.setattr(table, "missing", lambda name: "" if name != "nixl" else "nixl is not here")
    monkeypatch.setattr(rdma, "RdmaBackend", partial(RdmaBackend, bindings=lambda: played))
    for name in ("JUDGED_BYTES", "LONG_BYTES"):
        monkeypatch.setattr(nixl_agent, name, JUDGED)
    return played


Pair = Callable[[], contextlib.AbstractAsyncContextManager[tuple[RealWorker, RealWorker]]]


@pytest.fixture
def pair(config: EngineConfig, tmp_path: Path) -> Pair:
    """A prefill worker, and one that decodes on what looks like another host."""

    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[tuple[RealWorker, RealWorker]]:
        async with real_worker(config, Role.PREFILL, pool_dir=str(tmp_path / "there")) as a:
            puller = {"pool_dir": str(tmp_path / "here"), "registry": f"static:{a.address}"}
            async with real_worker(config, Role.DECODE, **puller) as b:
                yield a, b

    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    return start


async def link(a: RealWorker, b: RealWorker) -> PageLink:
    """As `eyas doctor` has it measured."""
    async with rpc.channel(b.address) as channel:
        (found,) = await InfoClient(channel).probe_links(a.address, 15.0)
    return found


async def test_cards_read_from_pool_to_pool(nixl: FakeNixl, pair: Pair, expected: list[list[int]]) -> None:
    async with pair() as (a, b), decoding(b) as decode:
        decode.attach(request(0), await prefill(a, request(0)))
        assert await decode.tokens() == (expected[0], "rdma")
        assert await same_pages(a, b) and nixl.wrong == []
        measured = await link(a, b)
        assert (measured.path, measured.problem) == ("rdma", "") and measured.bytes_per_s > 0


async def test_a_card_that_vanishes_costs_time_and_has_a_name(
    nixl: FakeNixl, pair: Pair, expected: list[list[int]]
) -> None:
    async with pair() as (a, b), decoding(b) as decode:
        decode.attach(request(0), await prefill(a, request(0)))
        assert await decode.tokens() == (expected[0], "rdma")
        nixl.faults = 1000  # every READ from now on ends in an error
        assert await answered(decode, request(1), await prefill(a, request(1))) == (expected[1], "")
        decode.attach(request(2), await prefill(a, request(2)))
        assert await decode.tokens() == (expected[2], "tcp")
        measured = await link(a, b)
        assert measured.path == "tcp" and "a NIXL READ failed: BACKEND" in measured.passed_over["rdma"]
        await refused(b, "rdma")


async def test_a_library_that_fell_back_to_tcp_is_not_called_rdma(
    nixl: FakeNixl, pair: Pair, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma, "least_rate", lambda card: CRAWL)
    async with pair() as (a, b), decoding(b) as decode:
        decode.attach(request(0), await prefill(a, request(0)))
        assert await decode.tokens() == (expected[0], "tcp")
        measured = await link(a, b)
        assert measured.path == "tcp" and "the library takes another way" in measured.passed_over["rdma"]
        await refused(b, "rdma")


@pytest.mark.slow
async def test_a_link_that_grows_slow_is_left(
    nixl: FakeNixl, pair: Pair, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The copy that was slow counts; those after it, of any prompt, do not begin over that link."""
    async with pair() as (a, b), decoding(b) as decode:
        monkeypatch.setattr(nixl_agent.NixlLink, "judge", _well)
        decode.attach(request(0), await prefill(a, request(0)))
        assert await decode.tokens() == (expected[0], "rdma")
        monkeypatch.setattr(nixl_agent.NixlLink, "judge", _ill)
        for number in (1, 2):
            tokens, _ = await answered(decode, request(number), await prefill(a, request(number)))
            assert tokens == expected[number] and "READs crawl" in caplog.text
        measured = await link(a, b)
        assert measured.path == "tcp" and "READs crawl" in measured.passed_over["rdma"]
        await refused(b, "rdma")


async def answered(decode: Decode, made: Any, handles: Any) -> tuple[list[int], str]:
    """All tokens of a request, computed by its worker if its pages are lost, and their path."""
    decode.attach(made, handles)
    tokens: list[int] = []
    path = ""
    while True:
        event = await decode.next(message.StepReply, message.PagesLost)
        if isinstance(event, message.PagesLost):
            decode.session.attach(made.id, 3, (), ())
            continue
        for entry in event.entries:
            tokens[entry.index :] = entry.tokens
            path = entry.timings.transfer_path if entry.timings else path
            if entry.finish is not None:
                return tokens, path


def _well(link: nixl_agent.NixlLink, size: int, seconds: float) -> None:
    return None


def _ill(link: nixl_agent.NixlLink, size: int, seconds: float) -> Exception:
    return nixl_agent.TransferFailed("READs crawl")


async def refused(b: RealWorker, way: str) -> None:
    """The puller's load says that `way` failed."""
    async with asyncio.timeout(10):
        while not b.load.ways_refused.get(way):
            await asyncio.sleep(0.02)
