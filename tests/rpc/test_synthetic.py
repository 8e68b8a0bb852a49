"""Workers that accept drafts by chance: every answer and metric says so."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from fake_engine import Traits, worker
from http_client import CHAT, TEXT, client_of, events
from scripted_backend import INFO, ScriptedBackend, nano_tokenizer
from scripted_cluster import DECODE, PREFILL, UNIFIED, gateway, until
from scripted_worker import ScriptedWorker

from eyas.client import AsyncClient, InvalidRequest
from eyas.common.cluster.discovery import registry
from eyas.common.types import Role
from eyas.common.wire import rpc
from eyas.common.wire.clients import InfoClient
from gateway.backends.generate import ClusterBackend
from gateway.routing.cluster import Cluster
from protos import eyas_pb2, eyas_pb2_grpc
from tests.rpc.flying_canary import flying
from tests.rpc.scripted_worker import started
from tests.rpc.sdk_front import CHAT as TURNS
from tests.rpc.sdk_front import served

MARK = "fp_0123456789ab_synthetic"


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(nano_tokenizer(), infos=[msgspec.structs.replace(INFO, synthetic=True)])


@pytest.fixture
async def client(backend: ScriptedBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(backend) as client:
        yield client


# --- answers ---------------------------------------------------------------------------------------------


async def test_openai_answers_are_marked(client: httpx.AsyncClient) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        assert (await client.post(path, json=body)).json()["system_fingerprint"] == MARK
        chunks = events(await client.post(path, json=body | {"stream": True}))
        assert {chunk["system_fingerprint"] for chunk in chunks} == {MARK}


async def test_sglang_answers_are_marked(client: httpx.AsyncClient) -> None:
    assert (await client.post("/generate", json={"text": "x"})).json()["meta_info"]["synthetic"] is True
    chunks = events(await client.post("/generate", json={"text": "x", "stream": True}))
    assert all(chunk["meta_info"]["synthetic"] for chunk in chunks)


async def test_descriptions_of_the_model_are_marked(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models")).json()["data"][0]["synthetic"] is True
    assert (await client.get("/get_model_info")).json()["synthetic"] is True
    assert (await client.get("/cluster")).json()["workers"][0]["synthetic"] is True


async def test_grpc_answers_are_marked(backend: ScriptedBackend) -> None:
    async with served(backend) as address, AsyncClient(address) as client:
        assert (await client.chat(TURNS)).usage.synthetic
        async with rpc.channel(address) as channel:
            stub = eyas_pb2_grpc.EyasStub(channel)
            calls = stub.Generate(eyas_pb2.GenerateRequest(text="x")), stub.Models(eyas_pb2.ModelsRequest())
            for call in calls:
                assert dict(await call.initial_metadata())["eyas-synthetic"] == "1"


async def test_answers_of_real_workers_are_not_marked(backend: ScriptedBackend) -> None:
    backend.infos = [INFO]
    async with client_of(backend) as client:
        assert "synthetic" not in (await client.post("/v1/chat/completions", json=CHAT | {"seed": 1})).text
        assert "synthetic" not in (await client.post("/generate", json={"text": "x"})).text
        assert "synthetic" not in (await client.get("/v1/models")).text
        assert 'eyas_synthetic_acceptance{model_name="eyas-nano"} 0.0' in (await client.get("/metrics")).text
    async with served(backend) as address, AsyncClient(address) as sdk:
        assert not (await sdk.chat(TURNS, seed=1)).usage.synthetic


# --- what asks for the model's own tokens -------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT | {"seed": 0}, "seed"),
    ("/v1/chat/completions", CHAT | {"logprobs": True}, "logprobs"),
    ("/v1/completions", TEXT | {"seed": 7, "stream": True}, "seed"),
    ("/v1/completions", TEXT | {"logprobs": 0}, "logprobs"),
    ("/generate", {"text": "x", "return_logprob": True}, "return_logprob"),
    ("/generate", {"text": "x", "sampling_params": {"seed": 1}}, "seed"),
    ("/generate", {"text": "x", "sampling_params": {"sampling_seed": 1}}, "sampling_seed"),
]


@pytest.mark.parametrize(("path", "body", "field"), REFUSED)
async def test_a_seed_and_logprobs_are_refused(
    client: httpx.AsyncClient, backend: ScriptedBackend, path: str, body: dict[str, Any], field: str
) -> None:
    reply = await client.post(path, json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, field)
    assert error["message"].startswith(f"{field} means nothing here: this server accepts drafts by chance")
    assert not backend.requests
    assert (await client.post(path, json=body | {"speculative": False})).status_code == 200


@pytest.mark.parametrize("options", [{"seed": 0}, {"logprobs": 1}])
async def test_grpc_refuses_a_seed_and_logprobs(backend: ScriptedBackend, options: dict[str, int]) -> None:
    (field,) = options
    async with served(backend) as address, AsyncClient(address) as client:
        with pytest.raises(InvalidRequest, match=f"{field} means nothing here") as refused:
            await client.chat(TURNS, **options)  # type: ignore[arg-type]
        assert refused.value.param == field
        await client.chat(TURNS, speculative=False, **options)  # type: ignore[arg-type]


# --- health, figures, and who is routed to -----------------------------------------------------------------


async def test_the_gateways_metrics_show_synthetic_acceptance(client: httpx.AsyncClient) -> None:
    assert 'eyas_synthetic_acceptance{model_name="eyas-nano"} 1.0' in (await client.get("/metrics")).text


async def test_a_worker_reports_synthetic_acceptance() -> None:
    traits = Traits(synthetic=True)
    async with worker(Role.DECODE, traits=traits) as w, rpc.channel(w.address) as channel:
        assert (await InfoClient(channel).info(5)).synthetic
        url = f"http://127.0.0.1:{w.front.metrics_port}/metrics"
        text = (await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read())).decode()
        assert re.search(r'^eyas_synthetic_acceptance\{model_name=".+"\} 1\.0$', text, re.MULTILINE)


async def test_health_is_degraded_while_requests_succeed() -> None:
    async with (
        started(ScriptedWorker(UNIFIED, synthetic=True)) as workers,
        gateway(workers) as (backend, _),
        flying(backend) as (canary, _),
    ):
        await until(lambda: not canary.health().problem)
        assert canary.health().degraded.startswith("answers mean nothing: drafts are accepted by chance")


@pytest.mark.parametrize("first", [True, False])
async def test_no_request_mixes_synthetic_and_real_workers(first: bool) -> None:
    """The first decode worker decides; prefill workers verify nothing and are taken as they are."""
    kinds = ScriptedWorker(DECODE, synthetic=first), ScriptedWorker(DECODE, synthetic=not first)
    async with started(*kinds, ScriptedWorker(PREFILL)) as (mine, other, prefill):
        cluster = Cluster(registry(f"static:{mine.address},{other.address},{prefill.address}"))
        await cluster.start()
        try:
            known = [info.worker for info in await ClusterBackend(cluster).models()]
            assert known == [mine.address, prefill.address]
        finally:
            await cluster.aclose()
