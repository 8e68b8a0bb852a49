"""Pauses and sleep of whole clusters, by HTTP: every worker, honest health, and the same answers after it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from http_client import client_of, refused
from real_cluster import RealCluster, real_cluster
from real_worker import tiny_config
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.client import AsyncClient, EyasError, InvalidRequest
from eyas.common.config import EngineConfig
from eyas.common.types import Role
from eyas.common.wire.control import (
    ContinueGeneration,
    MemoryTag,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
)
from eyas.common.wire.control_service import ControlClient
from gateway.grpc.weights import join_of, update_of
from protos import eyas_pb2
from tests.rpc.real_cluster import SPLIT

BOTH = (Role.PREFILL, Role.DECODE)
PROMPT = [5 + i % 40 for i in range(40)]


def body(tokens: int, seed: int = 3) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0.7, "sampling_seed": seed, "ignore_eos": True}
    return {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return tiny_config(tmp_path_factory.mktemp("models"))


async def post(cluster: RealCluster, path: str, **fields: Any) -> dict[str, Any]:
    response = await cluster.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    said: dict[str, Any] = response.json()
    return said


async def generate(cluster: RealCluster, tokens: int, seed: int = 3) -> dict[str, Any]:
    return await post(cluster, "/generate", **body(tokens, seed))


@pytest.mark.parametrize(
    "roles",
    [pytest.param((BOTH, BOTH), id="two unified", marks=pytest.mark.slow), pytest.param(SPLIT, id="split")],
)
async def test_a_cluster_pauses_sleeps_and_goes_on_to_the_same_answers(
    config: EngineConfig, tmp_path: Path, roles: tuple[tuple[Role, ...], ...]
) -> None:
    async with real_cluster(config, tmp_path, roles) as cluster:
        undisturbed = await generate(cluster, 40)

        async def health() -> tuple[int, str]:
            response = await cluster.http.get("/health")
            return response.status_code, response.text

        for mode in ("in_place", "retract"):
            running = [asyncio.create_task(generate(cluster, 40)) for _ in range(2)]
            await asyncio.sleep(0.15)
            await post(cluster, "/pause_generation", mode=mode)
            late = asyncio.create_task(generate(cluster, 40))
            await asyncio.sleep(0.3)
            assert not late.done()
            status, text = await health()
            assert status == 200 and '"paused"' in text and "/continue_generation" in text
            if mode == "retract":
                moved = (await post(cluster, "/release_memory_occupation", tags=["kv_cache"]))["moved"]
                targets = {
                    w.address for w, own in zip(cluster.workers, roles, strict=True) if own != (Role.DRAFT,)
                }
                assert moved.keys() == targets
                assert all(one["bytes"] > 0 for (one,) in moved.values())
                response = await cluster.http.post("/continue_generation")
                assert response.status_code == 400 and "resumed first" in response.text
                await post(cluster, "/resume_memory_occupation", tags=["kv_cache"])
            await post(cluster, "/continue_generation")
            for answer in await asyncio.gather(*running, late):
                assert answer["output_ids"] == undisturbed["output_ids"]
        running = [asyncio.create_task(generate(cluster, 40)) for _ in range(2)]
        await asyncio.sleep(0.1)
        await post(cluster, "/pause_generation")
        for answer in await asyncio.gather(*running):
            ended, ids = answer["meta_info"]["finish_reason"]["type"], answer["output_ids"]
            assert ended == "abort" and len(ids) < 40 and ids == undisturbed["output_ids"][: len(ids)]
        await post(cluster, "/continue_generation")
        assert (await health())[0] == 200
        await post(cluster, "/release_memory_occupation")
        assert (await health())[0] == 503
        response = await cluster.http.post("/generate", json=body(4))
        assert response.status_code == 503 and "/resume_memory_occupation" in response.text
        await post(cluster, "/resume_memory_occupation")
        assert (await generate(cluster, 40))["output_ids"] == undisturbed["output_ids"]
        await _sleeps_as_in_vllm(cluster)
        assert (await generate(cluster, 40))["output_ids"] == undisturbed["output_ids"]


async def test_all_workers_sleep_or_none(config: EngineConfig, tmp_path: Path) -> None:
    """One still has a request: the other takes back what it had let go, and answers go on."""
    async with real_cluster(config, tmp_path, SPLIT) as cluster:
        undisturbed = await generate(cluster, 40)
        running = asyncio.create_task(generate(cluster, 40))
        decode = next(worker for worker in cluster.workers if Role.DECODE in worker.front.describe().roles)
        async with asyncio.timeout(20):
            while not decode.engine._scheduler.running:
                await asyncio.sleep(0.001)
        await post(cluster, "/pause_generation", mode="in_place")
        response = await cluster.http.post("/release_memory_occupation")
        assert response.status_code == 400 and "1 of 2 workers" in response.text
        await post(cluster, "/continue_generation")
        for answer in (await running, await generate(cluster, 40)):
            assert answer["output_ids"] == undisturbed["output_ids"]


async def _sleeps_as_in_vllm(cluster: RealCluster) -> None:
    """In two steps, as trainers wake it: new weights may come between."""

    async def sleeps() -> bool:
        return bool((await cluster.http.get("/is_sleeping")).json()["is_sleeping"])

    assert not await sleeps()
    await post(cluster, "/sleep?level=2")
    assert await sleeps()
    assert (await cluster.http.post("/generate", json=body(4))).status_code == 503
    await post(cluster, "/wake_up?tags=weights")
    assert await sleeps()
    await post(cluster, "/wake_up?tags=weights&tags=kv_cache")
    assert not await sleeps()


async def test_the_sdk_pauses_and_wakes_a_cluster(config: EngineConfig, tmp_path: Path) -> None:
    async with (
        real_cluster(config, tmp_path, (BOTH,)) as cluster,
        AsyncClient(cluster.grpc, timeout_s=20) as client,
    ):
        options = {"seed": 5, "temperature": 0.7, "ignore_eos": True, "max_tokens": 40}
        undisturbed = (await client.generate(PROMPT, **options)).choices[0].tokens
        running = asyncio.create_task(client.generate(PROMPT, **options))
        async with asyncio.timeout(20):
            while not cluster.workers[0].engine._scheduler.running:
                await asyncio.sleep(0.001)
        assert await client.pause_generation("in_place") == 0
        assert await client.pause_generation() == 1
        (choice,) = (await running).choices
        assert choice.finish_reason == "abort" and choice.tokens == undisturbed[: len(choice.tokens)]
        left = await client.release_memory()
        assert {one.tag for one in left} == {"weights", "kv_cache"}
        with pytest.raises(EyasError, match="resumed first"):
            await client.continue_generation()
        (back,) = await client.resume_memory(["kv_cache"])
        assert back.worker == cluster.workers[0].address and back.bytes > 0
        await client.resume_memory()
        await client.continue_generation()
        assert (await client.generate(PROMPT, **options)).choices[0].tokens == undisturbed
        with pytest.raises(InvalidRequest, match="mode must be one of"):
            await client.pause_generation("gently")  # type: ignore[arg-type]
        client._metadata = (("x-forwarded-for", "203.0.113.7"),)
        with pytest.raises(EyasError, match="behind no proxy"):
            await client.pause_generation()


async def test_bad_bodies_are_refused_by_name() -> None:
    group = {"master_address": "127.0.0.1", "master_port": 1}
    tensors = {"names": ["a"], "dtypes": ["float32"]}
    async with client_of(ScriptedBackend(nano_tokenizer())) as http:
        for path, fields, name in (
            ("/pause_generation", {"mode": "gently"}, "mode"),
            ("/release_memory_occupation", {"tags": ["cuda_graph"]}, "tags[0]"),
            ("/resume_memory_occupation", {"tags": "weights"}, "tags"),
            ("/sleep?level=0", {}, "level"),
            ("/wake_up?tags=scheduling", {}, "tags"),
            ("/init_weights_update_group", group | {"world_size": 2**64}, "world_size"),
            ("/init_weights_update_group", group | {"world_size": 2, "timeout": 0}, "timeout"),
            ("/update_weights_from_distributed", tensors | {"shapes": [[2**64]]}, "shapes[0][0]"),
            ("/update_weights_from_distributed", tensors | {"shapes": [[-1]]}, "shapes[0][0]"),
        ):
            refused(await http.post(path, json=fields), name)
        evil = {"sec-fetch-site": "cross-site"}
        assert (await http.post("/pause_generation", headers=evil)).status_code == 403
        for path in ("/sleep", "/pause_generation", "/update_weights_from_disk"):
            for name in ("X-Forwarded-For", "X-Forwarded-Proto", "Forwarded", "Via"):
                passed_on = await http.post(path, headers={name: "203.0.113.7"})
                assert passed_on.status_code == 403 and "server's machine" in passed_on.text


def test_bad_messages_of_weights_are_refused_by_name() -> None:
    group: dict[str, Any] = {"group": "g", "address": "127.0.0.1:1", "size": 2}
    assert join_of(eyas_pb2.JoinWeightsGroupRequest(**group)).group == "g"
    for fields, name in (
        ({"group": ""}, "group"),
        ({"group": "g" * 257}, "group"),
        ({"address": "here"}, "address"),
        ({"backend": "mpi"}, "backend"),
        ({"first_rank": 0}, "first_rank"),
        ({"size": 1}, "size"),
    ):
        with pytest.raises(InvalidRequest, match=name) as caught:
            join_of(eyas_pb2.JoinWeightsGroupRequest(**(group | fields)))
        assert caught.value.param == name
    with pytest.raises(InvalidRequest, match="version has more than 256 characters"):
        update_of(eyas_pb2.UpdateWeightsRequest(folder="/new", version="v" * 257))


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
async def test_no_pages_come_where_memory_is_away(config: EngineConfig, tmp_path: Path, mode: str) -> None:
    """Decode sleeps in a pause while prefill, which hears of both a little later, offers it a prompt."""
    async with real_cluster(config, tmp_path, SPLIT) as cluster:
        undisturbed = await generate(cluster, 8)
        assert (await cluster.http.post("/flush_cache")).status_code == 200
        decode = next(worker for worker in cluster.workers if Role.DECODE in worker.front.describe().roles)
        async with decode.dial(decode.address) as channel:
            client = ControlClient(channel)
            await client.control(PauseGeneration(PauseMode(mode)))
            if mode != "in_place":
                early = asyncio.create_task(generate(cluster, 8))
                await asyncio.sleep(0.2)  # its pages might be here by now
            (moved,) = (await client.control(ReleaseMemory((MemoryTag.KV_CACHE,)))).moved
            assert moved.bytes > 0
            late = asyncio.create_task(generate(cluster, 8))
            await asyncio.sleep(0.2)
            await client.control(ResumeMemory((MemoryTag.KV_CACHE,)))
            await client.control(ContinueGeneration())
        for answer in [await late] if mode == "in_place" else await asyncio.gather(early, late):
            assert answer["output_ids"] == undisturbed["output_ids"]
