"""Discovery through a real Redis: who is found, who is forgotten, and that no request ever notices Redis."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
from fake_engine import FakeWorker, request, token, worker
from redis_server import RedisServer, redis_server

from eyas.common import discovery
from eyas.common.discovery import Presence, RedisRegistry, WorkerKeys, registry
from eyas.common.errors import Unavailable
from eyas.common.types import GenerationRequest, Role, WorkerInfo
from eyas.engine.messages import DraftDown
from gateway import search
from gateway.cluster import Cluster
from gateway.generate import ClusterBackend

UNIFIED = (Role.PREFILL, Role.DECODE)
GHOST = WorkerInfo("127.0.0.1:1", (Role.DRAFT,), 1, "m", "f", "g", 128, 1000, 8)  # nobody is at port 1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the usual times."""
    for name in ("POLL_S", "TTL_S", "REFRESH_S"):
        monkeypatch.setattr(discovery, name, getattr(discovery, name) / 5)


async def until(condition: Callable[[], Awaitable[bool] | bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while True:
            result = condition()
            if result if isinstance(result, bool) else await result:
                return
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def gateway(url: str) -> AsyncIterator[tuple[ClusterBackend, Cluster]]:
    cluster = Cluster(registry(url))
    await cluster.start()
    try:
        yield ClusterBackend(cluster), cluster
    finally:
        await cluster.aclose()


def serves(backend: ClusterBackend) -> bool:
    return not backend.health().problem


def known(cluster: Cluster) -> set[str]:
    return {info.worker for info in cluster.workers()}


async def answers(backend: ClusterBackend, asked: GenerationRequest) -> None:
    stream = await backend.start(asked)
    ids = [id async for entry in stream for id in entry.tokens]
    assert ids == [token(asked.prompt_ids, 0, i) for i in range(asked.params.max_tokens)]


@contextlib.asynccontextmanager
async def asking(backend: ClusterBackend) -> AsyncIterator[list[float]]:
    """One request after another, each of which must succeed; the seconds that they took."""
    took: list[float] = []

    async def ask() -> None:
        while True:
            began = time.monotonic()
            await answers(backend, request(5, id=f"r{len(took)}"))
            took.append(time.monotonic() - began)
            await asyncio.sleep(0.01)

    task = asyncio.create_task(ask())
    try:
        yield took
        assert not task.done() and took
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def is_written(redis: RedisServer, *workers: FakeWorker) -> bool:
    return await redis.workers() == {w.address for w in workers}


# --- coming and going ------------------------------------------------------------------------------------


async def test_a_worker_is_found_serves_and_says_goodbye() -> None:
    async with redis_server() as redis, gateway(redis.url) as (backend, cluster):
        assert not serves(backend)
        async with worker(*UNIFIED, registry=redis.url) as w:
            await until(lambda: serves(backend))
            await answers(backend, request(5))
            value = await redis.client.get(f"eyas:worker:{w.address}")
            info = msgspec.json.decode(value, type=WorkerInfo)
            assert (info.roles, info.epoch, info.fingerprint, info.pages_total) == (UNIFIED, 5, "f", 8)
            assert 0 < await redis.client.pttl(f"eyas:worker:{w.address}") <= 1000 * discovery.TTL_S
        assert await redis.workers() == set()
        await until(lambda: not known(cluster), within_s=1)


async def test_a_loading_worker_says_that_it_starts() -> None:
    """It is expected, and not yet one of those who serve."""
    async with redis_server() as redis, gateway(redis.url) as (_, cluster):
        info = msgspec.structs.replace(GHOST, serving=False, starting=True)
        presence = Presence(redis.url, lambda: info)
        presence.start()
        await until(lambda: _has(redis, GHOST.worker), within_s=1)
        await until(lambda: [c.info.worker for c in cluster.returning()] == [GHOST.worker])
        assert not known(cluster)
        info = GHOST
        await until(lambda: known(cluster) == {GHOST.worker} and not cluster.returning())
        await presence.aclose()
        assert await redis.workers() == set()


async def _has(redis: RedisServer, address: str) -> bool:
    return address in await redis.workers()


async def test_without_its_key_a_worker_stays_for_as_long_as_it_answers() -> None:
    async with redis_server() as redis, gateway(redis.url) as (backend, cluster):
        w = await FakeWorker(UNIFIED, registry=redis.url).start()
        await until(lambda: serves(backend))
        await w.front._membership.close()  # it says nothing more to Redis
        assert await redis.workers() == set()
        await asyncio.sleep(2 * discovery.TTL_S)
        assert known(cluster) == {w.address}
        await answers(backend, request(5))
        await w.stop()
        await until(lambda: not known(cluster), within_s=2)


async def test_a_worker_that_died_is_forgotten_when_its_key_ends() -> None:
    async with redis_server() as redis, gateway(redis.url) as (_, cluster):
        keys = WorkerKeys(redis.url, "")
        await keys.write(GHOST)
        await until(lambda: known(cluster) == {GHOST.worker})
        await until(lambda: not known(cluster), within_s=discovery.TTL_S + 1)
        await keys.aclose()


async def test_what_is_no_worker_is_passed_over() -> None:
    async with redis_server() as redis:
        await redis.client.set("eyas:worker:a:1", b"{not json")
        await redis.client.set("eyas:worker:b:1", b'{"worker": "b:1", "roles": ["cook"]}')
        await redis.client.set("eyas:worker:c:1", msgspec.json.encode(GHOST))  # another's description
        await redis.client.set("other", b"x")
        keys = WorkerKeys(redis.url, "")
        assert await keys.read() == []
        await keys.write(GHOST)
        assert await keys.read() == [GHOST]
        await keys.aclose()


# --- Redis itself fails ----------------------------------------------------------------------------------


async def test_no_request_notices_that_redis_dies_and_comes_back_empty(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="eyas.discovery")
    async with redis_server() as redis, gateway(redis.url) as (backend, cluster):
        async with (
            worker(Role.PREFILL, registry=redis.url) as prefill,
            worker(Role.DECODE, registry=redis.url) as decode,
        ):
            await until(lambda: serves(backend))
            caplog.clear()
            async with asking(backend) as took:
                redis.kill()
                await asyncio.sleep(2 * discovery.TTL_S)
                assert known(cluster) == {prefill.address, decode.address}
                await redis.start()
                await until(lambda: is_written(redis, prefill, decode))
                await asyncio.sleep(3 * discovery.POLL_S)
                assert known(cluster) == {prefill.address, decode.address}
            assert max(took) < 1.0
        said = [record.message for record in caplog.records]
        for change in ("is away", "is back"):  # once each: the gateway, three presences and registries
            assert sum(change in line for line in said) == 4, said
        assert not any("is gone" in line for line in said[: said.index(next(x for x in said if "back" in x))])


async def test_no_request_waits_for_a_redis_that_hangs() -> None:
    async with redis_server() as redis, gateway(redis.url) as (backend, cluster):
        async with worker(*UNIFIED, registry=redis.url) as w:
            await until(lambda: serves(backend))
            async with asking(backend) as took:
                redis.signal(signal.SIGSTOP)
                await asyncio.sleep(3.0)
                assert known(cluster) == {w.address}
                redis.signal(signal.SIGCONT)
                await until(lambda: is_written(redis, w))
                await asyncio.sleep(3 * discovery.POLL_S)
                assert known(cluster) == {w.address}
            assert max(took) < 1.0


async def test_stopping_does_not_wait_for_a_redis_that_hangs() -> None:
    async with redis_server() as redis:
        w = await FakeWorker((Role.DECODE,), registry=redis.url).start()
        await until(lambda: is_written(redis, w))
        redis.signal(signal.SIGSTOP)
        began = time.monotonic()
        await w.stop()
        assert time.monotonic() - began < 5


async def test_while_redis_is_away_the_dead_are_forgotten_and_found_again() -> None:
    async with redis_server() as redis, gateway(redis.url) as (backend, cluster):
        async with worker(*UNIFIED, registry=redis.url) as w:
            await until(lambda: serves(backend))
            redis.kill()
            await asyncio.sleep(2 * discovery.POLL_S)
            assert known(cluster) == {w.address}
        await until(lambda: not known(cluster))
        port = int(w.address.rpartition(":")[2])
        again = await FakeWorker(UNIFIED, registry=redis.url, port=port).start()
        await until(lambda: known(cluster) == {w.address})
        await until(lambda: serves(backend))
        await answers(backend, request(5))
        await again.stop()


async def test_a_gateway_that_starts_before_redis_learns_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "PATIENCE_S", 0.2)
    async with redis_server() as redis:
        redis.kill()
        began = time.monotonic()
        async with gateway(redis.url) as (backend, _), worker(*UNIFIED, registry=redis.url):
            assert time.monotonic() - began < 3
            with pytest.raises(Unavailable, match="no worker can serve"):
                await backend.start(request(5))
            await redis.start()
            await until(lambda: serves(backend))
            await answers(backend, request(5))


# --- draft workers ---------------------------------------------------------------------------------------


def falls(decode: FakeWorker) -> list[str]:
    return [d.worker for d in decode.engine.of(DraftDown) if any(c.seq == 0 for c in d.closed)]


def greetings(decode: FakeWorker) -> list[str]:
    return [d.worker for d in decode.engine.of(DraftDown) if not d.closed and not d.proposals]


async def test_draft_workers_come_and_go() -> None:
    async with redis_server() as redis, worker(Role.DECODE, registry=redis.url) as decode:
        async with worker(Role.DRAFT, registry=redis.url) as first:
            await until(lambda: greetings(decode) == [first.address])
            async with worker(Role.DRAFT, registry=redis.url) as second:
                await until(lambda: greetings(decode) == [first.address, second.address])
                redis.kill()
                await asyncio.sleep(2 * discovery.TTL_S)
                assert falls(decode) == []
                await redis.start()
                await until(lambda: is_written(redis, decode, first, second))
            await until(lambda: falls(decode) == [second.address])
            assert decode.front._drafts._streams.keys() == {first.address}
        await until(lambda: falls(decode) == [second.address, first.address])
        await until(lambda: not decode.front._drafts._streams and not decode.front._drafts._ending)


@pytest.mark.parametrize(
    "other", [{"roles": (Role.DECODE, Role.DRAFT)}, {"fingerprint": "x"}, {"draft_fingerprint": "x"}]
)
async def test_only_draft_workers_of_the_same_model_and_head_are_followed(other: dict[str, object]) -> None:
    async with redis_server() as redis, worker(Role.DECODE, registry=redis.url) as decode:
        everybody = RedisRegistry(redis.url)
        keys = WorkerKeys(redis.url, "")
        await keys.write(msgspec.structs.replace(GHOST, worker="127.0.0.1:2", **other))
        await keys.write(GHOST)
        await everybody.start()
        assert {"127.0.0.1:1", "127.0.0.1:2"} <= {info.worker for info in everybody.workers()}
        await until(lambda: bool(decode.front._drafts._streams))
        assert decode.front._drafts._streams.keys() == {GHOST.worker}
        await everybody.aclose()
        await keys.aclose()
