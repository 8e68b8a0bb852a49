"""Loads as routers of others read them: the reader of SGLang's is written from its router's own rules."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from http_client import client_of
from real_cluster import real_cluster
from real_worker import tiny_config
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.common.types import Role, WorkerBacklog, WorkerInfo
from gateway.http.loads import loads


@dataclass
class ForeignLoad:
    """What a router of SGLang's holds of a server: none if ranks are of different generations."""

    requests: int
    usage: float
    generation: str

    @classmethod
    def read(cls, answer: dict[str, Any]) -> ForeignLoad | None:
        ranks = answer["loads"]
        generations = {rank.get("worker_generation", "") for rank in ranks}
        if len(generations) != 1 or "" in generations:
            return None
        if not all(0 <= rank["token_usage"] <= 1 for rank in ranks):
            return None
        counts = [rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in ranks]
        return cls(sum(counts), max(rank["token_usage"] for rank in ranks), generations.pop())


def worker(number: int, *roles: Role, **changes: Any) -> WorkerInfo:
    plain = WorkerInfo(f"w{number}", roles or (Role.PREFILL, Role.DECODE), number, "m", "f", "", 128, 64, 100)
    return msgspec.structs.replace(plain, **changes)


def test_a_router_of_sglangs_reads_all_workers_as_one_server() -> None:
    workers = [
        worker(1, running=3, waiting=2, pages_used=50, backlog=WorkerBacklog(queued=700)),
        worker(2, running=1, pages_used=25),
        worker(3, Role.DRAFT),
        worker(4, serving=False, running=9),
    ]
    answer = loads(workers, 5.0)
    assert ForeignLoad.read(answer) == ForeignLoad(6, 0.5, answer["loads"][0]["worker_generation"])
    assert [rank["dp_rank"] for rank in answer["loads"]] == [0, 1] and answer["dp_rank_count"] == 2
    assert answer["loads"][0]["num_pending_tokens"] == 700
    total = {"total_running_reqs": 4, "total_waiting_reqs": 2, "total_reqs": 6, "avg_token_usage": 0.375}
    assert answer["aggregate"] == total
    again = loads([worker(1), worker(7)], 5.0)
    assert again["loads"][0]["worker_generation"] != answer["loads"][0]["worker_generation"]
    assert ForeignLoad.read(loads([], 5.0)) is None


@pytest.mark.parametrize("path", ["/v1/loads?include=core", "/get_load", "/load"])
async def test_every_name_answers(path: str) -> None:
    async with client_of(ScriptedBackend(nano_tokenizer())) as client:
        answer = await client.get(path)
        assert answer.status_code == 200 and answer.json()


async def test_a_real_clusters_load_is_told(tmp_path: Any) -> None:
    config = tiny_config(tmp_path)
    async with real_cluster(config, tmp_path, ((Role.PREFILL, Role.DECODE),)) as cluster:
        idle = ForeignLoad.read((await cluster.http.get("/v1/loads")).json())
        assert idle is not None and idle.requests == 0
        body = {"model": "eyas-nano", "prompt": [5] * 40, "max_tokens": 1200, "ignore_eos": True}
        asked = asyncio.create_task(cluster.http.post("/v1/completions", json=body))
        seen: set[str] = set()
        async with asyncio.timeout(60):
            while seen != {"load", "request", "pages"}:
                assert not asked.done(), f"only of {seen} was told while it ran"
                busy = ForeignLoad.read((await cluster.http.get("/v1/loads")).json())
                told = (await cluster.http.get("/load")).json() == {"server_load": 1}
                assert busy is not None and busy.generation == idle.generation
                seen |= {"load"} if told else set()
                seen |= {"request"} if busy.requests == 1 else set()
                seen |= {"pages"} if busy.usage > 0 else set()
                await asyncio.sleep(0.01)
        (rank,) = (await cluster.http.get("/get_load")).json()
        assert rank["num_reqs"] <= 1
        asked.cancel()
