"""/flush_cache empties every worker's prefix cache while nothing runs, and disturbs nothing that does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from http_client import client_of, refused
from real_cluster import real_cluster
from real_worker import RealWorker, alone, decoding, prefill, real_worker, tiny_config
from scripted_backend import ScriptedBackend, nano_tokenizer
from scripted_cluster import until

from eyas.common.config import EngineConfig, GatewayConfig
from eyas.common.errors import Busy, InvalidRequest
from eyas.common.types import Role
from eyas.common.wire import message, rpc
from eyas.common.wire.clients import InfoClient
from prefill_svc import transfer
from tests.rpc.free_pages import request
from tests.rpc.real_cluster import BOTH, SPLIT, TURN, another_gateway, cached

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return tiny_config(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    (answer,) = asyncio.run(alone(config, tmp_path_factory.mktemp("pools"), request()))
    return answer


async def flush(worker: RealWorker, wait_s: float = 0.0) -> int:
    async with rpc.channel(worker.address) as channel:
        return await InfoClient(channel).flush_cache(wait_s)


@pytest.mark.parametrize(
    "roles",
    [pytest.param((BOTH, BOTH), id="unified", marks=pytest.mark.slow), pytest.param(SPLIT, id="split")],
)
async def test_a_prompt_that_comes_again_is_computed_again(
    config: EngineConfig,
    tmp_path: Path,
    roles: tuple[tuple[Role, ...], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And every gateway hears of it: also what it sent lately is not taken for cached."""
    monkeypatch.setattr("gateway.routing.cluster.SENT_S", 1e6)
    prompt = [5 + i % 40 for i in range(100)]
    async with real_cluster(config, tmp_path, roles) as cluster, another_gateway(cluster) as other:

        async def say() -> tuple[int, list[int]]:
            body = TURN | {"prompt": prompt, "prompt_cache_key": "one home"}
            response = await cluster.http.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            (choice,) = response.json()["choices"]
            return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"], choice["token_ids"]

        first, answer = await say()
        await until(lambda: max(cached(other, prompt).values()) == 96, PATIENCE_S)
        assert first == 0 and await say() == (96, answer)
        for method in ("POST", "GET"):
            response = await cluster.http.request(method, "/flush_cache")
            assert response.status_code == 200, response.text
            flushed = response.json()["flushed"]
            assert flushed.keys() == {worker.address for worker in cluster.workers}
            assert max(flushed.values()) >= 6
            for gateway in (other, cluster.cluster):
                await until(lambda gateway=gateway: max(cached(gateway, prompt).values()) == 0, PATIENCE_S)
            assert await say() == (0, answer)


async def test_a_request_that_waits_is_not_disturbed_and_a_flush_may_wait_for_it(
    config: EngineConfig, tmp_path: Path, expected: list[int]
) -> None:
    async with real_worker(config, *Role, pool_dir=str(tmp_path)) as worker, decoding(worker) as decode:
        decode.session.submit(request("before"), attempt=1, attach=False)
        await decode.tokens()
        decode.session.submit(request("waits"), attempt=1, attach=True)
        await decode.next(message.RequestAdmitted)
        held = worker.engine._parts.scheduler.cache.cached_pages
        with pytest.raises(Busy, match="it still has 1 request"):
            await flush(worker)
        assert worker.engine._parts.scheduler.cache.cached_pages == held > 0, "all or nothing"
        flushing = asyncio.create_task(flush(worker, PATIENCE_S))
        decode.session.attach("waits", 2, (), ())
        assert (await decode.tokens())[0] == expected
        assert await flushing >= held
        await worker.idle()
        assert worker.engine._parts.scheduler.cache.cached_pages == 0


async def test_leased_pages_stay_until_they_were_pulled(
    config: EngineConfig, tmp_path: Path, expected: list[int]
) -> None:
    async with real_worker(config, Role.PREFILL, pool_dir=str(tmp_path)) as a:
        there = {"pool_dir": str(tmp_path), "registry": f"static:{a.address}"}
        async with real_worker(config, Role.DECODE, **there) as b, decoding(b) as decode:
            handles = await prefill(a, request())
            with pytest.raises(Busy, match="it still has 1 lease"):
                await flush(a)
            decode.attach(request(), handles)
            assert (await decode.tokens())[0] == expected
            assert await flush(a, PATIENCE_S) >= 8
            assert await flush(b, PATIENCE_S) > 0


class Gated(transfer.TransferServicer):
    """Sends bytes once it may."""

    asked, may = asyncio.Event(), asyncio.Event()

    async def Fetch(self, request: Any, context: Any) -> Any:
        self.asked.set()
        await self.may.wait()
        async for part in super().Fetch(request, context):
            yield part


async def test_pulls_that_are_open_go_on(
    config: EngineConfig, tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gated, "asked", asyncio.Event())
    monkeypatch.setattr(Gated, "may", asyncio.Event())
    monkeypatch.setattr(transfer, "TransferServicer", Gated)
    async with real_worker(config, Role.PREFILL, pool_dir=str(tmp_path / "here")) as a:
        there = {"pool_dir": str(tmp_path / "there"), "registry": f"static:{a.address}", "transfer": "grpc"}
        async with real_worker(config, Role.DECODE, **there) as b, decoding(b) as decode:
            decode.attach(request(), await prefill(a, request()))
            await asyncio.wait_for(Gated.asked.wait(), PATIENCE_S)
            for worker, why in ((a, "1 lease"), (b, "1 request, 1 pull")):
                with pytest.raises(Busy, match=f"it still has {why}"):
                    await flush(worker)
            Gated.may.set()
            assert await decode.tokens() == (expected, "grpc")
            assert await flush(a, PATIENCE_S) > 0 and await flush(b, PATIENCE_S) > 0
            await b.idle()


async def test_a_worker_for_drafts_has_nothing_to_flush(config: EngineConfig, tmp_path: Path) -> None:
    async with real_worker(config, Role.DRAFT, pool_dir=str(tmp_path)) as drafter:
        assert await flush(drafter) == 0
        with pytest.raises(InvalidRequest, match="wait_s must be from 0 to 600"):
            await flush(drafter, -1.0)


async def test_a_cluster_names_the_workers_that_are_busy(config: EngineConfig, tmp_path: Path) -> None:
    async with real_cluster(config, tmp_path, (BOTH, BOTH)) as cluster:
        first, second = cluster.workers
        async with decoding(first) as decode:
            decode.session.submit(request(), attempt=1, attach=True)
            await decode.next(message.RequestAdmitted)
            response = await cluster.http.post("/flush_cache?timeout=0")
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["code"] == "busy" and "1 of 2 workers flushed" in error["message"]
            assert f"not {first.address}: it still has 1 request" in error["message"]
            assert second.address not in error["message"]
            decode.session.cancel("r")
        assert (await cluster.http.get(f"/flush_cache?timeout={PATIENCE_S}")).status_code == 200


async def test_it_asks_for_a_key_and_not_for_another_site_s_page() -> None:
    backend = ScriptedBackend(nano_tokenizer())
    async with client_of(backend, GatewayConfig(api_keys=("k",))) as client:
        for method in ("GET", "POST"):
            assert (await client.request(method, "/flush_cache")).status_code == 401
            key = {"authorization": "Bearer k"}
            response = await client.request(method, "/flush_cache", headers=key)
            assert response.json() == {"flushed": {backend.infos[0].worker: 7}}
            foreign = await client.request(
                method, "/flush_cache", headers=key | {"sec-fetch-site": "cross-site"}
            )
            assert foreign.status_code == 403
        assert backend.flushes == [1.0, 1.0]


@pytest.mark.parametrize("timeout", ["x", "nan", "-1", "601", ""])
async def test_a_wrong_timeout_is_named(timeout: str) -> None:
    backend = ScriptedBackend(nano_tokenizer())
    async with client_of(backend) as client:
        refused(await client.post(f"/flush_cache?timeout={timeout}"), "timeout")
        assert (await client.post("/flush_cache?timeout=2.5")).status_code == 200
    assert backend.flushes == [2.5]
