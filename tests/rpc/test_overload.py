"""More requests than a cluster can hold: bounded queues on both tiers, and 429 before any token."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from real_worker import RealWorker, real_worker, tiny_config

from eyas.common.cluster.discovery import registry
from eyas.common.cluster.listening import free_ports
from eyas.common.config import NANO, EngineConfig, GatewayConfig
from eyas.common.types import Role
from gateway.backends.generate import ClusterBackend
from gateway.http.front import create_app
from gateway.http.protocol import HttpLimits
from gateway.http.server import HttpServer
from gateway.observe.metrics import GatewayMetrics
from gateway.routing.cluster import Cluster
from gateway.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return tiny_config(tmp_path_factory.mktemp("models"))


@contextlib.asynccontextmanager
async def gateway(*workers: RealWorker) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway that routes to `workers`."""
    port = next(free_ports())
    cluster = Cluster(registry("static:" + ",".join(worker.address for worker in workers)))
    app = create_app(
        GatewayConfig(),
        ClusterBackend(cluster),
        Tokenizer.load(str(NANO)),
        GatewayMetrics(CollectorRegistry()),
    )
    http = HttpServer(app, "127.0.0.1", port, HttpLimits())
    await cluster.start()
    await http.start()
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30, limits=httpx.Limits()
    ) as client:
        async with asyncio.timeout(30):
            while (await client.get("/health")).status_code != 200:
                await asyncio.sleep(0.02)
        yield client
    await http.aclose()
    await cluster.aclose()


async def complete(client: httpx.AsyncClient, length: int, tokens: int, **more: Any) -> httpx.Response:
    """The reply, read to its end, to a prompt of `length` ids."""
    prompt = [3 + i % 40 for i in range(length)]
    body: dict[str, Any] = {
        "model": "eyas-nano",
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    return await client.post("/v1/completions", json=body | more)


def is_told_to_come_back(reply: httpx.Response) -> bool:
    told = reply.json()["error"]
    return reply.status_code == 429 and int(reply.headers["retry-after"]) >= 1 and bool(told["message"])


def decoder_of(prefill: RealWorker, config: EngineConfig, **changes: int) -> Any:
    return real_worker(config, Role.DECODE, registry=f"static:{prefill.address}", **changes)


@pytest.mark.parametrize("full", [Role.PREFILL, Role.DECODE])
async def test_a_full_tier_refuses_before_any_token(config: EngineConfig, full: Role) -> None:
    """One tier has no queue place; whatever the other one admitted meanwhile is given up."""
    waiting = {role: 0 if role is full else 256 for role in (Role.PREFILL, Role.DECODE)}
    async with (
        real_worker(config, Role.PREFILL, max_waiting=waiting[Role.PREFILL]) as prefill,
        decoder_of(prefill, config, max_waiting=waiting[Role.DECODE]) as decode,
        gateway(prefill, decode) as client,
    ):
        for stream in (False, True):
            assert is_told_to_come_back(await complete(client, 40, 8, stream=stream))
        await prefill.idle()
        await decode.idle()


@pytest.mark.slow
async def test_a_stream_that_has_begun_goes_on_where_the_queue_is_full(config: EngineConfig) -> None:
    """Its decode worker leaves, and the only other one takes no new request."""
    async with (
        real_worker(config, Role.PREFILL) as prefill,
        real_worker(config, Role.DECODE, max_waiting=0) as full,
    ):
        leaving = RealWorker(dataclasses.replace(config, roles=(Role.DECODE,)), f"static:{prefill.address}")
        await leaving.start()
        async with gateway(prefill, leaving, full) as client:
            alone = (await complete(client, 40, 150)).json()["choices"][0]["text"]
            asking = asyncio.create_task(complete(client, 40, 150))
            async with asyncio.timeout(30):
                while not leaving.load.running:
                    await asyncio.sleep(0.005)
            await leaving.stop()
            assert (await asking).json()["choices"][0]["text"] == alone
            assert is_told_to_come_back(await complete(client, 40, 8))
            await prefill.idle()
            await full.idle()


async def test_a_crowd_is_served_or_gets_a_429(config: EngineConfig) -> None:
    """Pages for one and a half requests, one slot and two queue places on each tier: none of 12 hangs.

    A prompt that is done before decode refuses its request is held until its lease ends.
    """
    small = {"max_running": 1, "max_waiting": 2, "num_pages": 12, "lease_s": 5.0}
    async with (
        real_worker(config, Role.PREFILL, **small) as prefill,
        decoder_of(prefill, config, **small) as decode,
        gateway(prefill, decode) as client,
    ):
        alone = (await complete(client, 100, 30)).json()["choices"][0]["text"]
        replies = await asyncio.gather(*(complete(client, 100, 30) for _ in range(12)))
        statuses = Counter(reply.status_code for reply in replies)
        assert statuses[200] >= 1 and statuses[429] >= 1 and statuses.total() == 12, statuses
        for reply in replies:
            if reply.status_code == 200:
                assert reply.json()["choices"][0]["text"] == alone
            else:
                assert is_told_to_come_back(reply)
        assert (await complete(client, 100, 30)).status_code == 200, "who comes back is served"
        await prefill.idle()
        await decode.idle()
