"""Discovery through a real Redis: who is found, who is forgotten, and that no request ever notices Redis."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
from fake_engine import FakeWorker, Traits, request, token, worker
from redis_server import RedisServer, redis_server
from scripted_backend import each
from scripted_worker import workers

from eyas.common.cluster import discovery, roster
from eyas.common.cluster.discovery import WorkerKeys, WorkerPresence, registry
from eyas.common.config import GatewayConfig
from eyas.common.errors import Unavailable
from eyas.common.types import GenerationRequest, Role, WorkerInfo
from eyas.engine.ipc.messages import DraftDown
from gateway.backends.admission import served_model
from gateway.backends.generate import ClusterBackend
from gateway.routing import cluster
from gateway.routing.cluster import Cluster

UNIFIED = (Role.PREFILL, Role.DECODE)
GHOST = WorkerInfo("127.0.0.1:1", (Role.DRAFT,), 1, "m", "f", "g", 128, 1000, 8)  # no worker is at port 1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the usual times."""
    for name in ("POLL_S", "TTL_S", "REFRESH_S"):
        monkeypatch.setattr(discovery, name, getattr(discovery, name) / 5)


async def until(condition: Callable[[], Awaitable[bool] | bool], within_s: float = 30.0) -> None:
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
    ids = [id async for entry in each(stream) for id in entry.tokens]
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


async def test_a_worker_is_found_serves_and_takes_its_key_away() -> None:
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
        await until(lambda: not known(cluster))


async def test_clusters_of_two_names_in_one_database_see_nothing_of_each_other() -> None:
    """Also where one name begins, or ends, as the other."""
    async with redis_server() as redis, contextlib.AsyncExitStack() as stack:
        names = ("eyas", "blue", "eyas-blue", "blue.eyas")
        clusters = [Cluster(registry(redis.url, cluster=name)) for name in names]
        for cluster in clusters:
            await cluster.start()
            stack.push_async_callback(cluster.aclose)
        own = [
            await stack.enter_async_context(worker(*UNIFIED, registry=redis.url, cluster=name))
            for name in names
        ]
        for cluster, w in zip(clusters, own, strict=True):
            await until(lambda cluster=cluster, w=w: known(cluster) == {w.address})  # type: ignore[misc]
        keys = {key.decode() async for key in redis.client.scan_iter("*")}
        assert keys == {f"{name}:worker:{w.address}" for name, w in zip(names, own, strict=True)}
        await asyncio.sleep(2 * discovery.REFRESH_S)  # every key has been read by every cluster
        assert [known(cluster) for cluster in clusters] == [{w.address} for w in own]


async def test_a_loading_worker_says_that_it_starts() -> None:
    """It is expected, and does not serve yet."""
    async with redis_server() as redis, gateway(redis.url) as (_, cluster), workers(UNIFIED) as (loading,):
        loading.script.starting = True
        presence = WorkerPresence(redis.url, lambda: msgspec.structs.replace(GHOST, worker=loading.address))
        presence.start()
        await until(lambda: [c.info.worker for c in cluster.returning()] == [loading.address])
        assert not known(cluster)
        loading.script.starting = False
        await until(lambda: known(cluster) == {loading.address} and not cluster.returning())
        await presence.aclose()
        assert await redis.workers() == set()


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
        await until(lambda: not known(cluster))


async def test_a_worker_that_died_is_forgotten_though_its_key_lives() -> None:
    async with redis_server() as redis, gateway(redis.url) as (_, cluster):
        w = await FakeWorker(UNIFIED, registry=redis.url).start()
        await until(lambda: known(cluster) == {w.address})
        await redis.client.persist(f"eyas:worker:{w.address}")
        await w.front._membership._presence._keys.aclose()
        await w.front._server.stop(None)
        await until(lambda: not known(cluster))
        await w.stop()


# --- what a key says is not believed ---------------------------------------------------------------------


async def poison(redis: RedisServer, *addresses: str) -> None:
    """Keys at these addresses that claim to be the best worker of the cluster, with a tiny context."""
    for address in addresses:
        claim = msgspec.structs.replace(GHOST, worker=address, roles=UNIFIED, context_length=1)
        await redis.client.set(f"eyas:worker:{address}", msgspec.json.encode(claim))


async def test_a_key_counts_only_if_a_worker_answers_at_its_address(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first address is empty, something else is at the second, a worker of another name at the third."""
    monkeypatch.setattr(roster, "COMPLAIN_S", 1.0)
    async with contextlib.AsyncExitStack() as stack:
        redis = await stack.enter_async_context(redis_server())
        other = await asyncio.start_server(lambda _, writer: writer.write(b"HTTP/1.1 200 OK"), "127.0.0.1")
        stack.push_async_callback(other.wait_closed)
        stack.callback(other.close)
        w = await stack.enter_async_context(worker(*UNIFIED, registry=redis.url))
        something = other.sockets[0].getsockname()[1]
        await poison(redis, GHOST.worker, f"127.0.0.1:{something}", f"localhost:{w.port}")
        backend, cluster = await stack.enter_async_context(gateway(redis.url))

        def said(words: str) -> int:
            return sum(words in line for line in caplog.messages)

        await until(lambda: serves(backend))
        async with asking(backend):
            await asyncio.sleep(5 * roster.POLL_S)
            assert known(cluster) == {w.address}
        assert served_model(GatewayConfig(), await backend.models()).context_length == 128
        await until(lambda: said("does not count") >= 6)
        await asyncio.sleep(5 * roster.POLL_S)
        assert said("does not count") == 6, caplog.messages  # of each, by the gateway and by the worker


async def test_values_of_any_kind_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Wrong types, wrong numbers, too much of it, and keys that are no addresses: told once."""
    async with redis_server() as redis:
        await redis.client.rpush("eyas:worker:127.0.0.1:2", "a list")
        await redis.client.hset("eyas:worker:127.0.0.1:3", "a", "hash")
        await redis.client.setrange("eyas:worker:127.0.0.1:4", 199_999_999, b"x")  # 200 MB
        await redis.client.set("eyas:worker:127.0.0.1:5", b'{"context_length": NaN, "roles": ["cook"]}')
        for name in (b"unix:/tmp/socket:1", b"dns://elsewhere/a:1", b"a:0", b"a:99999", b"\xff:1", b""):
            await redis.client.set(b"eyas:worker:" + name, b"{}")
        async with gateway(redis.url) as (backend, cluster), worker(*UNIFIED, registry=redis.url) as w:
            await until(lambda: serves(backend))
            async with asking(backend):
                await asyncio.sleep(3 * roster.POLL_S)
            assert known(cluster) == {w.address}
        odd = [line for line in caplog.messages if "6 keys eyas:worker:* are ignored" in line]
        assert len(odd) == 2, caplog.messages  # the gateway, and the worker itself


async def test_the_number_of_addresses_is_bounded() -> None:
    async with redis_server() as redis:
        await redis.client.mset({f"eyas:worker:10.0.0.1:{port}": b"" for port in range(1, 3000)})
        keys = WorkerKeys(redis.url, "")
        assert len(await keys.read()) == discovery.MAX_KEYS
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
                await asyncio.sleep(3 * roster.POLL_S)
                assert known(cluster) == {prefill.address, decode.address}
            assert max(took) < 2.5
        said = [record.message for record in caplog.records]
        for change in ("is away", "is back"):  # once each: the gateway, three presences and registries
            assert sum(change in line for line in said) == 4, said
        assert not any("is gone" in line for line in said[: said.index(next(x for x in said if "back" in x))])


async def test_a_gateway_without_redis_says_why_it_has_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PATIENCE_S", 0.1)
    lacks = r"no decode worker is serving \(redis 127\.0\.0\.1:1/0 has been unreachable since 20.* UTC: .*\)"
    async with gateway("redis://127.0.0.1:1/0") as (backend, _):
        assert re.search(lacks, problem := backend.health().problem)
        with pytest.raises(Unavailable, match=lacks):
            await backend.start(request())
        assert backend.health().problem == problem, "the time is that of the first failure"


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
                await asyncio.sleep(3 * roster.POLL_S)
                assert known(cluster) == {w.address}
            assert max(took) < 2.5


async def test_stopping_does_not_wait_for_a_redis_that_hangs() -> None:
    async with redis_server() as redis:
        w = await FakeWorker((Role.DECODE,), registry=redis.url).start()
        await until(lambda: is_written(redis, w))
        redis.signal(signal.SIGSTOP)
        began = time.monotonic()
        await w.stop()
        assert time.monotonic() - began < 20


async def test_while_redis_is_away_the_dead_are_forgotten_and_found_again() -> None:
    async with redis_server() as redis, gateway(redis.url) as (backend, cluster):
        async with worker(*UNIFIED, registry=redis.url) as w:
            await until(lambda: serves(backend))
            redis.kill()
            await asyncio.sleep(2 * roster.POLL_S)
            assert known(cluster) == {w.address}
        await until(lambda: not known(cluster))
        again = await FakeWorker(UNIFIED, registry=redis.url, port=w.port).start()
        await until(lambda: known(cluster) == {w.address})
        await until(lambda: serves(backend))
        await answers(backend, request(5))
        await again.stop()


async def test_a_gateway_that_starts_before_redis_learns_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PATIENCE_S", 0.2)
    async with redis_server() as redis:
        redis.kill()
        began = time.monotonic()
        async with gateway(redis.url) as (backend, _), worker(*UNIFIED, registry=redis.url):
            assert time.monotonic() - began < 20
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
            await until(lambda: decode.front._drafts._streams.keys() == {first.address})
        await until(lambda: falls(decode) == [second.address, first.address])
        await until(lambda: not decode.front._drafts._streams and not decode.front._drafts._ending)


@pytest.mark.parametrize(
    ("roles", "traits"),
    [
        ((Role.DECODE, Role.DRAFT), {}),
        ((Role.DRAFT,), {"fingerprint": "x"}),
        ((Role.DRAFT,), {"draft_fingerprint": "x"}),
    ],
)
async def test_only_draft_workers_of_the_same_model_and_head_are_followed(
    roles: tuple[Role, ...], traits: dict[str, str]
) -> None:
    async with (
        redis_server() as redis,
        worker(Role.DECODE, registry=redis.url) as decode,
        worker(*roles, registry=redis.url, traits=Traits(**traits)) as other,
        worker(Role.DRAFT, registry=redis.url) as drafter,
    ):
        all_three = {decode.address, other.address, drafter.address}
        await until(lambda: decode.front._membership.addresses() == all_three)
        await until(lambda: bool(decode.front._drafts._streams))
        assert decode.front._drafts._streams.keys() == {drafter.address}
