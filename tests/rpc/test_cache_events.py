"""Gateways that hear from real workers what their prefix caches hold, and route by it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from real_cluster import RealCluster, real_cluster
from real_worker import tiny_config
from scripted_cluster import until

from eyas.common.errors import Unavailable
from eyas.common.page_names import CachedPages, CacheNews, PageShape
from eyas.common.types import Role
from eyas.common.wire import rpc
from eyas.common.wire.clients import InfoClient
from eyas.engine.kv.host_tier import HostTier
from eyas.engine.scheduling import host_loads
from gateway.routing.prefix_caches import CachedPrefixes, CacheWatch
from tests.rpc.real_cluster import BOTH, SPLIT, TURN, another_gateway, cached


async def say(cluster: RealCluster, prompt: list[int]) -> None:
    response = await cluster.http.post("/v1/completions", json=TURN | {"prompt": prompt})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("roles", [(BOTH, BOTH), SPLIT], ids=["unified", "split"])
async def test_two_gateways_agree_on_what_is_cached(
    tmp_path: Path, roles: tuple[tuple[Role, ...], ...]
) -> None:
    config = tiny_config(tmp_path)
    async with real_cluster(config, tmp_path, roles) as cluster, another_gateway(cluster) as other:
        prompt = [5 + i % 40 for i in range(100)]
        assert set(cached(other, prompt).values()) == {0}
        await say(cluster, prompt)
        # Six whole pages of 16; the last page needs the token after it, which the head's KV depends on.
        holders = [0, 96] if roles[0] == BOTH else [96, 96]
        for gateway in (other, cluster.cluster):
            await until(lambda gateway=gateway: sorted(cached(gateway, prompt).values()) == holders)
        assert cached(cluster.cluster, prompt) == cached(other, prompt)
        changed = [*prompt[:40], 1, *prompt[41:]]
        assert max(cached(other, changed).values()) == 32


async def test_what_is_evicted_is_heard_of(tmp_path: Path) -> None:
    config = dataclasses.replace(tiny_config(tmp_path), num_pages=32)
    async with real_cluster(config, tmp_path, (BOTH,)) as cluster, another_gateway(cluster) as other:
        first = [5 + i % 40 for i in range(100)]
        await say(cluster, first)
        await until(lambda: max(cached(other, first).values()) == 96)
        for number in range(4):  # of 32 pages each prompt takes 13
            await say(cluster, [(7 * number + i * (number + 3)) % 50 for i in range(200)])
        await until(lambda: max(cached(other, first).values()) == 0)


async def test_what_is_on_the_host_counts_as_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a conversation comes back to the worker whose memory has it."""
    monkeypatch.setattr(host_loads, "LEAST_TOKENS", 16)
    monkeypatch.setattr(HostTier, "load_s", lambda tier, pages: 0.0)
    config = dataclasses.replace(tiny_config(tmp_path), num_pages=32, host_cache_gb=0.02)
    async with real_cluster(config, tmp_path, (BOTH,)) as cluster, another_gateway(cluster) as other:
        first = [5 + i % 40 for i in range(100)]
        await say(cluster, first)
        (worker,) = cluster.workers
        for number in range(4):  # of 32 pages each prompt takes 13
            await say(cluster, [(7 * number + i * (number + 3)) % 50 for i in range(200)])
        await worker.idle()
        assert not worker.pages(tuple(first)), "it is still in the pool"
        await until(lambda: max(cached(other, first).values()) == 96)
        reply = await cluster.http.post("/v1/completions", json=TURN | {"prompt": first})
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        assert (await cluster.http.post("/flush_cache")).status_code == 200
        await until(lambda: max(cached(other, first).values()) == 0)


async def test_what_a_worker_holds_is_forgotten_with_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = CachedPages(3, PageShape())
    pages.change(b"12345678", b"")
    broken, opened = asyncio.Event(), 0

    async def cached_there(self: InfoClient) -> AsyncIterator[CacheNews]:
        nonlocal opened
        opened += 1
        news = pages.since(None)
        assert news is not None
        yield news
        await broken.wait()
        broken.clear()
        raise Unavailable("gone")

    monkeypatch.setattr(InfoClient, "cached", cached_there)
    monkeypatch.setattr("gateway.routing.prefix_caches.AGAIN_S", 0.2)
    holdings, channels = CachedPrefixes(), rpc.ChannelPool()
    watch = CacheWatch(channels, holdings)
    watch.follow(["127.0.0.1:1"])
    await until(lambda: holdings.of("127.0.0.1:1", 3) is not None)
    broken.set()
    await until(lambda: holdings.of("127.0.0.1:1", 3) is None)
    await until(lambda: holdings.of("127.0.0.1:1", 3) is not None)
    assert opened == 2
    watch.follow([])
    await until(lambda: holdings.of("127.0.0.1:1", 3) is None)
    await watch.aclose()
    await channels.close()
