"""The canary: health follows what a request really meets on its way, and says where it ended."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import msgspec
import pytest
from scripted_backend import INFO, ScriptedBackend, ScriptedStream, each, nano_tokenizer
from scripted_cluster import DECODE, DRAFT, PREFILL, UNIFIED, collect, gateway, make_request, until
from scripted_worker import Script, ScriptedWorker, workers

from eyas.common.config import EngineConfig
from eyas.common.errors import EyasError, Overloaded, Unavailable
from eyas.common.types import GenerationRequest, Role
from gateway.backends.base import BackendHealth, GenerationBackend, GenerationStream
from gateway.observe.canary import PARAMS, PROMPT, CanaryBackend, CanarySchedule
from gateway.observe.metrics import GatewayMetrics
from tests.rpc.flying_canary import PACE, flying


@contextlib.asynccontextmanager
async def cluster(*roles: tuple[Role, ...]) -> AsyncIterator[tuple[CanaryBackend, list[ScriptedWorker]]]:
    async with workers(*roles) as started, gateway(started) as (backend, _), flying(backend) as (canary, _):
        yield canary, started


def runs(metrics: GatewayMetrics, outcome: str) -> float:
    return metrics.registry.get_sample_value("eyas_canary_runs_total", {"outcome": outcome}) or 0.0


def test_it_fits_into_the_shortest_context() -> None:
    """Which is one page: a server that is too short for its canary would never be healthy."""
    assert len(PROMPT) + (PARAMS.max_tokens or 0) <= EngineConfig.page_size


async def test_nothing_is_healthy_before_a_request_got_through() -> None:
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        started[1].script.path = "shm"
        assert not backend.health().problem  # there is a route,
        async with flying(backend) as (canary, metrics):
            assert canary.health().problem  # but no request has taken it
            await until(lambda: not canary.health().problem)
            assert not canary.health().degraded
        assert runs(metrics, "ok") == 1
        (asked,) = started[0].of("prefill")
        assert asked.request.id.startswith("canary-")
        assert metrics.registry.get_sample_value("eyas_generation_tokens_total") == 0


async def test_an_idle_cluster_is_asked_again_and_a_busy_one_is_not() -> None:
    backend = ScriptedBackend(nano_tokenizer())
    async with flying(backend) as (canary, _):
        await until(lambda: len(backend.requests) >= 3)
        async with asyncio.timeout(30):
            for _ in range(10):  # real requests, each a proof
                stream = await canary.start(make_request())
                assert [entry async for entry in each(stream)]
                await stream.aclose()
                await asyncio.sleep(0.1)
        names = [request.id for request in backend.requests]
        first = names.index("r")
        assert [name for name in names[first:] if name.startswith("canary-")] == []


BROKEN = [
    ("admission failed: .*no queue", Script(refuse_prefill=EyasError("no queue")), Script()),
    ("admission took longer", Script(silent=True), Script()),
    ("prefill took longer", Script(hold_prefill_at="started"), Script(stop_at=0)),
    ("transfer took longer", Script(), Script(stop_at=0)),
    ("decode took longer", Script(), Script(stop_at=1, tokens_a_step=1, path="shm")),
]


@pytest.mark.parametrize(("sentence", "prefill", "decode"), BROKEN)
async def test_a_broken_leg_is_named_and_forgiven_when_it_heals(
    sentence: str, prefill: Script, decode: Script
) -> None:
    async with cluster(PREFILL, DECODE) as (canary, started):
        await until(lambda: not canary.health().problem)
        started[0].script, started[1].script = prefill, decode
        await until(lambda: bool(canary.health().problem))
        assert re.search(sentence, canary.health().problem)
        started[0].script, started[1].script = Script(), Script()
        await until(lambda: not canary.health().problem)


async def test_pages_that_never_arrive_are_a_detour() -> None:
    async with cluster(PREFILL, DECODE) as (canary, started):
        await until(lambda: not canary.health().problem)
        assert "instead of pulling it from " + started[0].address in canary.health().degraded
        started[1].script.path = "shm"
        await until(lambda: not canary.health().degraded)


async def test_a_prefill_that_is_left_out_is_a_detour() -> None:
    async with cluster(PREFILL, DECODE) as (canary, started):
        started[1].script.path = "shm"
        await until(lambda: not canary.health().problem)
        assert not canary.health().degraded
        started[0].script.refuse_prefill = Unavailable("not now")
        started[1].script.path = ""
        await until(lambda: canary.health().degraded.startswith("prefill"))
        assert not canary.health().problem


async def test_drafts_that_never_come_are_reported_but_are_no_problem() -> None:
    async with cluster(PREFILL, DECODE, DRAFT) as (canary, started):
        started[1].script.path = "shm"
        await until(lambda: canary.health().degraded.startswith("draft"))
        assert not canary.health().problem


async def test_under_steady_traffic_a_detour_is_found_and_forgotten() -> None:
    pace = CanarySchedule(every_s=0.3, again_s=0.1, timeout_s=4.0, rest_s=0.6)
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        started[1].script.path = "shm"
        async with flying(backend, pace) as (canary, _):
            await until(lambda: not canary.health().problem)
            asking = asyncio.create_task(ask_on(canary))
            for path, degraded in (("", True), ("shm", False), ("", True)):
                started[1].script.path = path
                await until(lambda wanted=degraded: bool(canary.health().degraded) is wanted)
                assert not canary.health().problem
            assert not asking.done()
            asking.cancel()


async def ask_on(backend: GenerationBackend) -> None:
    """Real requests, each a proof, one after another."""
    while True:
        stream = await backend.start(make_request())
        assert [entry async for entry in each(stream)]
        await stream.aclose()
        await asyncio.sleep(0.05)


async def test_one_worker_for_all_has_nothing_to_transfer() -> None:
    async with cluster((Role.PREFILL, Role.DECODE)) as (canary, started):
        await until(lambda: not canary.health().problem)
        await until(lambda: len(started[0].of("submit")) >= 3)
        assert not canary.health().degraded


async def test_a_lost_worker_is_a_problem_at_once() -> None:
    async with workers(UNIFIED) as started, gateway(started) as (backend, _), flying(backend) as (canary, _):
        await until(lambda: not canary.health().problem)
        await started[0].kill()
        await until(lambda: "no decode worker" in canary.health().problem)


class PausedBackend(ScriptedBackend):
    """One that may say that it has paused."""

    pause = ""

    def health(self) -> BackendHealth:
        return BackendHealth(paused=self.pause)


async def test_a_pause_is_not_broken() -> None:
    """No canary is sent into one, and one that it catches says nothing."""
    backend = PausedBackend(nano_tokenizer())
    async with flying(backend) as (canary, metrics):
        await until(lambda: runs(metrics, "ok") == 1)
        backend.pause_s = 5.0  # the next one hangs
        asked = len(backend.requests)
        await until(lambda: len(backend.requests) > asked)
        backend.pause = "generation is paused"
        await asyncio.sleep(2 * PACE.timeout_s)
        assert (canary.health().problem, canary.health().paused) == ("", "generation is paused")
        assert len(backend.requests) == asked + 1 and runs(metrics, "failed") == 0


async def test_busy_is_not_broken() -> None:
    backend = ScriptedBackend(nano_tokenizer())
    async with flying(backend) as (canary, metrics):
        await until(lambda: not canary.health().problem)
        backend.refusal = Overloaded("the queue is full")
        await until(lambda: runs(metrics, "refused") >= 2)
        assert not canary.health().problem
        backend.refusal = None
        backend.pause_s = 1.0  # a long answer runs: the canary is given its time behind it
        stream = await canary.start(make_request())
        asked = len(backend.requests)
        await until(lambda: len(backend.requests) > asked)
        await asyncio.sleep(2 * PACE.timeout_s)
        assert not canary.health().problem
        await stream.aclose()


async def test_a_real_proof_outweighs_a_lost_canary() -> None:
    backend = ScriptedBackend(nano_tokenizer())
    start = backend.start

    async def loses_canaries(request: GenerationRequest) -> ScriptedStream:
        stream = await start(request)
        await asyncio.sleep(30.0 if request.id.startswith("canary-") else 0.0)
        return stream

    async with flying(backend) as (canary, metrics):
        await until(lambda: not canary.health().problem)
        backend.start = loses_canaries  # type: ignore[method-assign]
        asked = len(backend.requests)
        await until(lambda: len(backend.requests) > asked)
        stream = await canary.start(make_request())
        assert [entry async for entry in each(stream)]
        await stream.aclose()
        await asyncio.sleep(1.2 * PACE.timeout_s)
        assert not canary.health().problem and not runs(metrics, "failed")
        await until(lambda: "admission took longer" in canary.health().problem)  # the next one, on its own


@pytest.mark.parametrize("queue", [0, 3])
async def test_a_canary_that_waits_in_a_long_queue_is_no_problem(queue: int) -> None:
    """As long as real requests get their tokens; without a queue it should have come through."""
    backend = ScriptedBackend(nano_tokenizer(), says=lambda request, choice: "word " * 2000, pause_s=0.01)
    start = backend.start

    async def loses_canaries(request: GenerationRequest) -> ScriptedStream:
        await asyncio.sleep(30.0 if request.id.startswith("canary-") else 0.0)
        return await start(request)

    pace = CanarySchedule(every_s=0.3, again_s=0.1, rest_s=0.5, timeout_s=0.4, busy_timeout_s=1.0)
    async with flying(backend, pace) as (canary, metrics):
        await until(lambda: not canary.health().problem)
        stream = await canary.start(make_request(tokens=4000))
        reading = asyncio.create_task(read_on(stream))
        backend.infos = [msgspec.structs.replace(INFO, waiting=queue)]
        backend.start = loses_canaries  # type: ignore[method-assign]
        outcome = "waited" if queue else "failed"
        await until(lambda: runs(metrics, outcome) >= 2, within_s=20.0)
        assert bool(canary.health().problem) is not bool(queue) and not reading.done()
        reading.cancel()
        await stream.aclose()


async def read_on(stream: GenerationStream) -> None:
    while await stream.take():
        pass


async def test_an_observed_stream_is_the_stream() -> None:
    async with cluster(UNIFIED) as (canary, _):
        request = make_request(n=2)
        stream = await canary.start(request)
        outputs = await collect(stream)  # type: ignore[arg-type]
        assert [len(ids) for ids in outputs.values()] == [12, 12]
        await stream.aclose()
