"""Requests that meet new weights between two workers, or between two looks at them: none is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from real_cluster import real_cluster
from real_worker import prefill, tiny_config
from scripted_cluster import DECODE, PREFILL, collect, gateway, make_request, until
from scripted_worker import ScriptedWorker, expected, workers

from eyas.common.config import GatewayConfig
from eyas.common.errors import EyasError, Unavailable, WeightsChanged, WeightsChanging
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role, WeightsInfo, WorkerInfo
from eyas.common.weights import FolderSource, Running, WeightsReply
from eyas.common.wire.control import PauseGeneration, PauseMode
from eyas.common.wire.control_service import ControlClient
from eyas.common.wire.rpc import ChannelPool
from gateway.backends.admission import served_model
from gateway.backends.generate import ClusterBackend, ClusterGeneration
from gateway.routing.targets import TargetWorkers
from gateway.routing.weights import ClusterWeights, WeightUpdate
from protos import decode_pb2
from tests.rpc.real_cluster import SPLIT

CLOSED = WeightsChanging("the worker is about to get new weights")
OLD = WorkerInfo("a", (Role.PREFILL, Role.DECODE), 1, "m", "f", "", 64, 100, 9, serving=True)
NEW = msgspec.structs.replace(OLD, weights=WeightsInfo("v1", 1, "digest"))


async def refused_once(backend: ClusterBackend, decode: ScriptedWorker, tokens: int) -> dict[int, list[int]]:
    """The answer to a request whose first token comes before decode refuses it, and takes it from then on."""
    decode.script.refuse_submit, decode.script.refuse_after_s = CLOSED, 0.1
    stream = asyncio.create_task(backend.start(make_request(tokens=tokens)))
    await until(lambda: len(decode.of("submit")) == 1)
    decode.script.refuse_submit = None
    return await collect(await stream)


@pytest.mark.parametrize("tokens", [12, 1])
async def test_a_first_token_comes_before_decode_refuses(tokens: int) -> None:
    """Decode closed before it heard of the request, and prefill after it had computed its prompt. A closed
    worker takes what has begun, if it hears that.
    """
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        prefill, decode = started
        prefill.script.finish_first = (0,) if tokens == 1 else ()
        asked = expected(make_request(tokens=tokens))
        assert await refused_once(backend, decode, tokens) == {0: asked}
        submits: list[decode_pb2.Submit] = decode.of("submit")
        assert [submit.request.begun for submit in submits] == [False, True][: min(tokens, 2)]
        assert len(prefill.of("prefill")) == 1


async def test_a_worker_that_refuses_what_has_begun_has_other_weights() -> None:
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        decode = started[1]
        decode.script.refuse_submit, decode.script.refuse_after_s = CLOSED, 0.1
        with pytest.raises(WeightsChanged, match="in mid-answer"):
            await collect(await backend.start(make_request()))
        assert [submit.request.begun for submit in decode.of("submit")] == [False, True]


async def test_a_worker_that_is_lost_before_it_gets_the_request_again_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged = ClusterGeneration._resolve_error

    async def lost_meanwhile(self: ClusterGeneration, error: EyasError) -> EyasError:
        (refusing,) = [worker for worker in decodes if worker.of("submit")]
        await refusing.kill()
        await until(lambda: not self._cluster._connected(refusing.address))
        return await judged(self, error)

    async with workers(PREFILL, DECODE, DECODE) as started, gateway(started) as (backend, _):
        decodes = started[1:]
        for decode in decodes:
            decode.script.refuse_submit, decode.script.refuse_after_s = CLOSED, 0.1
        stream = asyncio.create_task(backend.start(make_request(tokens=12)))
        await until(lambda: any(decode.of("submit") for decode in decodes))
        for decode in decodes:
            decode.script.refuse_submit = None
        monkeypatch.setattr(ClusterGeneration, "_resolve_error", lost_meanwhile)
        assert await collect(await stream) == {0: expected(make_request(tokens=12))}
        assert [len(decode.of("submit")) for decode in decodes] == [1, 1]


async def nothing() -> None: ...


def known(infos: list[WorkerInfo], refresh: Callable[[], Awaitable[None]] = nothing) -> ClusterWeights:
    return ClusterWeights(TargetWorkers(lambda: infos, ChannelPool(), refresh))


def test_weights_that_another_gateway_brought_count_at_once() -> None:
    weights = known([NEW])
    assert [info.serving for info in weights.with_serving([NEW])] == [True]
    assert weights.newest.version == "v1"
    behind, ahead = weights.with_serving([OLD, NEW])
    assert (behind.serving, ahead.serving) == (False, True)


async def test_workers_are_expected_until_they_say_that_they_have_new_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was last heard of them is that they have the old ones, and are open."""
    infos: list[WorkerInfo] = [OLD]
    served: list[tuple[str, int]] = []

    class Client:
        def __init__(self, worker: str) -> None: ...

        async def change(self, command: Any, wait_s: float) -> WeightsReply:
            return WeightsReply("digest")

    async def refresh() -> None:
        coming = [msgspec.structs.replace(info, serving=True) for info in infos if weights.is_coming(info)]
        seen = weights.with_serving(infos) + coming
        served.append((weights.newest.version, served_model(GatewayConfig(), seen).context_length))

    weights = known(infos, refresh)
    monkeypatch.setattr(weights, "_client", Client)
    await weights.update(WeightUpdate(FolderSource("/new"), "v1", True, Running.DRAIN, 1.0))
    assert served == [("default", 64), ("v1", 64)]
    assert not weights.is_coming(OLD)
    with pytest.raises(Unavailable):
        served_model(GatewayConfig(), weights.with_serving(infos))


async def test_pages_that_nobody_will_pull_do_not_hold_up_an_update(tmp_path: Path) -> None:
    """Their caller left when the prompt was done, and had not heard of its pages."""
    config = tiny_config(tmp_path / "models")
    async with real_cluster(config, tmp_path, SPLIT) as cluster:
        worker = next(one for one in cluster.workers if Role.PREFILL in one.front.describe().roles)
        await prefill(worker, GenerationRequest("left", tuple(range(5, 45)), SamplingParams(max_tokens=4)))
        assert worker.engine._parts.leases.owner.active == 1
        began, body = time.monotonic(), {"model_path": config.model, "weight_version": "v1"}
        said = await cluster.http.post("/update_weights_from_disk", json=body)
        assert said.json()["success"], said.text
        assert time.monotonic() - began < 10 < config.lease_s


@pytest.mark.parametrize("roles", [SPLIT, ((Role.PREFILL, Role.DECODE),)], ids=["split", "unified"])
async def test_requests_that_come_in_a_pause_begin_with_the_weights_that_come_in_it(
    tmp_path: Path, roles: tuple[tuple[Role, ...], ...]
) -> None:
    """As those do whose callers send them again at once when a pause has aborted them."""
    config = tiny_config(tmp_path / "models")
    sampling = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": list(range(5, 45)), "sampling_params": sampling}
    async with real_cluster(config, tmp_path, roles) as cluster:
        assert (await cluster.http.post("/pause_generation", json={"mode": "abort"})).status_code == 200
        late = [asyncio.create_task(cluster.http.post("/generate", json=body)) for _ in range(3)]
        await until(lambda: sum(worker.load.waiting for worker in cluster.workers) >= 3)
        update = {"model_path": config.model, "weight_version": "v1", "timeout": 3}
        said = await cluster.http.post("/update_weights_from_disk", json=update)
        assert said.status_code == 200 and said.json()["success"], said.text
        assert not any(each.done() for each in late)
        assert (await cluster.http.post("/continue_generation", json={})).status_code == 200
        for answer in await asyncio.gather(*late):
            assert answer.status_code == 200, answer.text
            assert answer.json()["meta_info"]["weight_version"] == "v1"


async def test_what_begins_while_workers_pause_one_by_one_ends_before_new_weights(tmp_path: Path) -> None:
    """Decode pauses, then a request comes, then prefill pauses, which has computed its prompt."""
    config = tiny_config(tmp_path / "models")
    sampling = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": list(range(5, 45)), "sampling_params": sampling}
    async with real_cluster(config, tmp_path, SPLIT) as cluster:
        of_role = {worker.front.describe().roles[0]: worker for worker in cluster.workers}
        for role in (Role.DECODE, Role.PREFILL):
            async with of_role[role].dial(of_role[role].address) as channel:
                await ControlClient(channel).control(PauseGeneration(PauseMode.ABORT))
            if role is Role.DECODE:
                caught = asyncio.create_task(cluster.http.post("/generate", json=body))
                await until(lambda: of_role[Role.PREFILL].load.leases == 1)
        update = {"model_path": config.model, "weight_version": "v1", "timeout": 5}
        said = await cluster.http.post("/update_weights_from_disk", json=update)
        assert said.status_code == 200 and said.json()["success"], said.text
        ended = (await caught).json()
        assert ended["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(ended["output_ids"]) == 1
        assert (await cluster.http.post("/continue_generation", json={})).status_code == 200
