"""A server tells by which arithmetic it computes answers, and no cluster mixes two."""

from __future__ import annotations

import msgspec
import pytest
from fake_engine import Traits, worker
from http_client import CHAT, client_of
from scripted_backend import INFO, ScriptedBackend, nano_tokenizer
from scripted_cluster import DECODE, PREFILL
from scripted_worker import ScriptedWorker

from eyas.common.cluster.discovery import registry
from eyas.common.types import Role
from eyas.common.wire import rpc
from eyas.common.wire.clients import InfoClient
from gateway.backends.generate import ClusterBackend
from gateway.routing.cluster import Cluster
from tests.rpc.scripted_worker import started


@pytest.mark.parametrize(
    ("arithmetic", "fingerprint"), [("exact", "fp_0123456789ab_exact"), ("fast", "fp_0123456789ab")]
)
async def test_pages_and_answers_say_it(arithmetic: str, fingerprint: str) -> None:
    info = msgspec.structs.replace(INFO, arithmetic=arithmetic)
    async with client_of(ScriptedBackend(nano_tokenizer(), infos=[info])) as client:
        for page in ("/get_model_info", "/health"):
            assert (await client.get(page)).json()["arithmetic"] == arithmetic
        assert (await client.get("/cluster")).json()["workers"][0]["arithmetic"] == arithmetic
        answer = (await client.post("/v1/chat/completions", json=CHAT)).json()
        assert answer["system_fingerprint"] == fingerprint


async def test_a_worker_says_what_its_engine_does() -> None:
    async with worker(Role.DECODE, traits=Traits(arithmetic="exact")) as told:
        async with rpc.channel(told.address) as channel:
            assert (await InfoClient(channel).info(5)).arithmetic == "exact"


async def test_no_request_goes_to_another_arithmetic() -> None:
    """The first target worker decides, for prompts too: their pages could not be taken."""
    workers = (
        ScriptedWorker(DECODE, arithmetic="exact"),
        ScriptedWorker(DECODE),
        ScriptedWorker(PREFILL),
        ScriptedWorker(PREFILL, arithmetic="exact"),
    )
    async with started(*workers) as listed:
        cluster = Cluster(registry("static:" + ",".join(each.address for each in listed)))
        await cluster.start()
        try:
            known = [info.worker for info in await ClusterBackend(cluster).models()]
            assert known == [listed[0].address, listed[3].address]
        finally:
            await cluster.aclose()
