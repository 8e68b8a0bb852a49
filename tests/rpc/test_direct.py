"""Ways from one device's pool into another's, beside those through host memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from real_worker import RealWorker, alone, decoding, prefill, real_worker, tiny_config
from staged_rig import SLOTS, pair, pretend, request, same_pages, slots_free

from eyas.common.config import EngineConfig
from eyas.common.types import Role
from eyas.engine.kv.staging import PageStaging
from kv_transfer.backends import table


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return tiny_config(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What a worker says that computes everything itself."""
    (answer,) = asyncio.run(alone(config, tmp_path_factory.mktemp("pools"), request()))
    return answer


def add(patch: pytest.MonkeyPatch, name: str) -> None:
    """A backend of `plain_device` is the best of the table."""
    backends = {"memory": f"plain_device:{name}", **table.BACKENDS}
    patch.setattr(table, "BACKENDS", backends)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways that pages went through staging."""
    found: list[str] = []
    for way in ("copy_in", "copy_out"):
        plain = getattr(PageStaging, way)

        def counted(staging: PageStaging, *args: Any, way: str = way, plain: Any = plain) -> None:
            found.append(way)
            plain(staging, *args)

        monkeypatch.setattr(PageStaging, way, counted)
    return found


@pytest.mark.parametrize("by", ["auto", pytest.param("memory", marks=pytest.mark.slow)])
async def test_a_direct_way_goes_from_pool_to_pool(
    config: EngineConfig,
    expected: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    copies: list[str],
    by: str,
) -> None:
    """No slot is used, on either side; the proof page is the pool's own."""
    pretend(monkeypatch)
    add(monkeypatch, "MemoryBackend")
    async with pair(config, tmp_path, by) as (a, b), decoding(b) as decode:
        decode.attach(request(), await prefill(a, request()))
        assert await decode.tokens() == (expected, "memory")
        assert await same_pages(a, b)
        assert copies == [] and slots_free(b) == SLOTS


async def test_a_direct_way_that_brings_other_bytes_proves_nothing(
    config: EngineConfig, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next way is taken, through staging, to the same proof page."""
    pretend(monkeypatch)
    add(monkeypatch, "OffByOne")
    async with pair(config, tmp_path, "auto") as (a, b), decoding(b) as decode:
        decode.attach(request(), await prefill(a, request()))
        assert await decode.tokens() == (expected, "shm")


async def test_draft_pages_come_the_same_way(
    config: EngineConfig,
    expected: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    copies: list[str],
) -> None:
    pretend(monkeypatch)
    add(monkeypatch, "MemoryBackend")
    roles = (Role.DECODE, Role.DRAFT)
    async with pair(config, tmp_path, "auto", *roles) as (a, b), decoding(b) as decode:
        decode.attach(request(), await prefill(a, request(), draft=True))
        assert await decode.tokens() == (expected, "memory")
        await b.idle()
        await a.idle()
        assert copies == [] and b.load.moved["memory"].pulls == 2


async def test_a_pool_in_a_file_has_no_direct_way(
    config: EngineConfig, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(monkeypatch, "MemoryBackend")
    async with pair(config, tmp_path, "auto") as (a, b), decoding(b) as decode:
        assert exports(a) == {"shm", "tcp", "grpc"}
        decode.attach(request(), await prefill(a, request()))
        assert await decode.tokens() == (expected, "shm")


async def test_what_each_pool_offers(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared memory leads to no pool that is in no file; and nothing travels where nothing may."""
    pretend(monkeypatch)
    add(monkeypatch, "MemoryBackend")
    async with real_worker(config, *Role, pool_dir=str(tmp_path)) as w:
        assert exports(w) == {"memory", "shm", "tcp", "grpc"}, "no other process can map plain memory"
        assert w.engine._parts.ready.staged
        assert len(list(tmp_path.glob("*t"))) == 2, "all roles: pages may leave and come"
        pool = w.engine._parts.pools[0]
        (rank,) = w.engine._parts.ready.pools["target"].ranks
        assert rank.checksum == pool.checksum
    async with real_worker(config, *Role, pool_dir=str(tmp_path), transfer="none") as w:
        assert w.engine._parts.ready.pools == {} and w.engine._parts.ready.files == {}
        assert {path.suffix for path in tmp_path.iterdir()} <= {".lock"}


def exports(worker: RealWorker) -> set[str]:
    """The backends that reach a worker's target KV."""
    (rank,) = worker.engine._parts.ready.pools["target"].ranks
    return set(rank.exports)
