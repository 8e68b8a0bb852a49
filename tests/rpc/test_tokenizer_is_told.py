"""Workers say which tokenizer they follow grammars by, and none of another one gets requests."""

from __future__ import annotations

import pytest
from http_client import client_of
from scripted_backend import ScriptedBackend, nano_tokenizer
from scripted_cluster import DECODE, PREFILL
from scripted_worker import ScriptedWorker

from eyas.common.cluster.discovery import registry
from eyas.common.config import GatewayConfig
from gateway.backends.generate import ClusterBackend
from gateway.routing.cluster import Cluster
from tests.rpc.scripted_worker import started


@pytest.mark.parametrize(("own", "served"), [("a", [0, 2, 3]), ("b", [1, 2]), ("", [0, 1, 2, 3])])
async def test_no_request_goes_to_another_tokenizer(own: str, served: list[int]) -> None:
    """A worker that has none, and a gateway that says none, are not compared."""
    workers = [
        ScriptedWorker(DECODE, tokenizer="a"),
        ScriptedWorker(DECODE, tokenizer="b"),
        ScriptedWorker(DECODE),
        ScriptedWorker(PREFILL, tokenizer="a"),
    ]
    async with started(*workers) as listed:
        names = [each.address for each in listed]
        cluster = Cluster(registry("static:" + ",".join(names)), tokenizer=own)
        await cluster.start()
        try:
            known = {info.worker for info in await ClusterBackend(cluster).models()}
            assert known == {names[number] for number in served}
        finally:
            await cluster.aclose()


async def test_the_page_of_the_model_names_its_folder() -> None:
    config = GatewayConfig(tokenizer="/t")
    async with client_of(ScriptedBackend(nano_tokenizer()), config) as client:
        told = (await client.get("/get_model_info")).json()
        assert (told["model_path"], told["tokenizer_path"]) == (config.model, "/t")
