"""The auto layout on real workers that can both compute prompts and decode, and exchange pages."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from real_worker import RealWorker, decoding, real_worker, tiny_config
from scripted_backend import each
from scripted_cluster import until

from eyas.common.cluster.discovery import registry
from eyas.common.cluster.listening import free_ports
from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from eyas.common.wire.clients import InfoClient
from eyas.common.wire.message import StepReply
from eyas.common.wire.rpc import channel
from gateway.backends.generate import ClusterBackend
from gateway.observe.metrics import PlacementMetrics
from gateway.routing.cluster import Cluster
from gateway.routing.layouts import AutoLayout
from gateway.routing.placement import AdmissionPreference, LatencyTargets
from gateway.routing.router import RequestRoute, RouterCandidate

REQUESTS = 6
LONG = 32  # tokens
LOOSE = LatencyTargets(1000.0, 1000.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return tiny_config(tmp_path_factory.mktemp("models"))


def request(number: int, tokens: int = LONG) -> GenerationRequest:
    """Prompts that share no page."""
    prompt = tuple((7 * number + 3 * place) % 250 + 3 for place in range(100 + number))
    params = SamplingParams(temperature=0.8, seed=number, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(f"r{number}", prompt, params, timeout_s=30.0)


@pytest.fixture(scope="module")
def expected(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The longest answer to each request, by a worker that does everything itself."""

    async def alone() -> list[list[int]]:
        answers: dict[str, list[int]] = {request(number).id: [] for number in range(REQUESTS)}
        pools = str(tmp_path_factory.mktemp("pools"))
        async with real_worker(config, *Role, pool_dir=pools) as worker, decoding(worker) as decode:
            for number in range(REQUESTS):
                decode.session.submit(request(number), attempt=1, attach=False)
            while any(len(answer) < LONG for answer in answers.values()):
                for entry in (await decode.next(StepReply)).entries:
                    answers[entry.id] += entry.tokens
        return list(answers.values())

    return asyncio.run(alone())


@dataclass
class Pair:
    """A gateway before two workers with all roles."""

    workers: list[RealWorker]
    cluster: Cluster
    backend: ClusterBackend
    layout: AutoLayout
    figures: CollectorRegistry

    def prefer(self, first: AdmissionPreference, second: AdmissionPreference) -> None:
        names = (worker.address for worker in self.workers)
        self.layout.preferences = dict(zip(names, (first, second), strict=True))

    def placed(self, kind: str) -> int:
        return int(self.figures.get_sample_value("eyas_placements_total", {"placement": kind}) or 0)

    async def answer(self, asked: GenerationRequest) -> list[int]:
        tokens: list[int] = []
        async with contextlib.aclosing(await self.backend.start(asked)) as stream:
            async for entry in each(stream):
                assert entry.index == len(tokens) or not entry.tokens
                tokens += entry.tokens
        return tokens


@contextlib.asynccontextmanager
async def pair(config: EngineConfig, tmp_path: Path, targets: LatencyTargets = LOOSE) -> AsyncIterator[Pair]:
    ports = free_ports()
    numbers = [next(ports), next(ports)]
    known = "static:" + ",".join(f"127.0.0.1:{port}" for port in numbers)
    engine = EngineConfig(**{**vars(config), "roles": tuple(Role), "pool_dir": str(tmp_path)})
    workers = [await RealWorker(engine, known, port, timed=True).start() for port in numbers]
    cluster, figures = Cluster(registry(known)), CollectorRegistry()
    await cluster.start()
    try:
        layout = AutoLayout(cluster.candidates, targets, PlacementMetrics(figures))
        await until(lambda: sum(one.connected and _has_room(one) for one in cluster.candidates()) == 2)
        yield Pair(workers, cluster, ClusterBackend(cluster, layout), layout, figures)
    finally:
        await cluster.aclose()
        for worker in workers:
            if worker._thread.is_alive():
                await worker.stop()


def _has_room(worker: RouterCandidate) -> bool:
    """Whether its first report has come since it serves."""
    return worker.info.serving and worker.info.backlog.prefill_room > 0


@pytest.mark.slow
async def test_answers_do_not_depend_on_where_prompts_are_computed(
    config: EngineConfig, tmp_path: Path, expected: list[list[int]]
) -> None:
    async with pair(config, tmp_path) as pair_:
        for number in range(REQUESTS):
            if number % 2:
                pair_.prefer(AdmissionPreference.ANY, AdmissionPreference.ANY)
            else:
                pair_.prefer(
                    *((AdmissionPreference.PREFILL, AdmissionPreference.DECODE)[:: 1 if number % 4 else -1])
                )
            assert await pair_.answer(request(number, 6)) == expected[number][:6]
        assert (pair_.placed("apart"), pair_.placed("together")) == (3, 3)
        paths = [worker.load.moved for worker in pair_.workers]
        assert sum(moved["shm"].pulls for moved in paths if "shm" in moved) >= 3
        assert "eyas_ttft_to_predicted_count" in generate_latest(pair_.figures).decode()
        await until(lambda: all(one.in_flight == 0 for one in pair_.cluster.candidates()))
        assert all(one.under_way.queued == 0 for one in pair_.cluster.candidates())


@pytest.mark.slow
async def test_a_change_of_preferences_under_load_fails_no_request(
    config: EngineConfig, tmp_path: Path, expected: list[list[int]]
) -> None:
    async with pair(config, tmp_path) as pair_:

        async def flip() -> None:
            while True:
                for both in (
                    (AdmissionPreference.PREFILL, AdmissionPreference.DECODE),
                    (AdmissionPreference.DECODE, AdmissionPreference.PREFILL),
                ):
                    pair_.prefer(*both)
                    await asyncio.sleep(0.05)

        async def ask(number: int) -> None:
            await asyncio.sleep(0.03 * number)
            assert await pair_.answer(request(number)) == expected[number]

        flipping = asyncio.create_task(flip())
        try:
            await asyncio.gather(*(ask(number) for number in range(REQUESTS)))
        finally:
            flipping.cancel()
        assert pair_.placed("apart") + pair_.placed("together") == REQUESTS and pair_.placed("apart")


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
async def test_requests_go_on_when_a_worker_is_lost(
    config: EngineConfig, tmp_path: Path, expected: list[list[int]], lost: int
) -> None:
    """The one that computes prompts, or the one that decodes."""
    async with pair(config, tmp_path) as pair_:
        pair_.prefer(AdmissionPreference.PREFILL, AdmissionPreference.DECODE)
        asked = [asyncio.create_task(pair_.answer(request(number))) for number in range(4)]
        await asyncio.sleep(0.2)
        await pair_.workers[lost].stop()
        answers = await asyncio.gather(*asked)
        assert answers == expected[:4]
        assert await pair_.answer(request(5, 6)) == expected[5][:6]


async def test_rates_are_told_once_and_kept(config: EngineConfig, tmp_path: Path) -> None:
    async with pair(config, tmp_path) as pair_, channel(pair_.workers[0].address) as line:
        first = await InfoClient(line).info(5.0)
        assert first.rates is not None and first.rates.budget.chunk_tokens == config.chunk_tokens
        assert first.rates.times.step_s(8, 1000) > 0.0
        assert first.backlog.prefill_room == config.max_waiting
        assert (await InfoClient(line).info(5.0, first.epoch)).rates is None
        before = pair_.cluster.workers()[0]
        await until(lambda: pair_.cluster.workers()[0] is not before)
        assert pair_.cluster.workers()[0].rates == before.rates is not None


async def test_prompts_that_two_workers_compute_for_each_other_end_in_tokens(
    config: EngineConfig, tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds for the other more pages than it has left: they wait for each other, and not for ever."""
    small = dataclasses.replace(config, num_pages=12)
    asked = [msgspec.structs.replace(request(number, 6), timeout_s=300.0) for number in range(4)]
    async with pair(small, tmp_path) as pair_:
        names = [worker.address for worker in pair_.workers]
        ways = itertools.cycle([(names[0], names[1]), (names[1], names[0])])
        monkeypatch.setattr(pair_.layout, "route", lambda prompt, workers: RequestRoute(*next(ways)))
        answers = await asyncio.wait_for(asyncio.gather(*map(pair_.answer, asked)), 120.0)
        assert answers == [answer[:6] for answer in expected[:4]]
        await until(lambda: all(not worker.engine._scheduler.pool.used for worker in pair_.workers))
