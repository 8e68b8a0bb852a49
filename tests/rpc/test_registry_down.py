"""No worker is left, and none is expected back: every request ends in a clear 503 within 10 s.

And no address is asked again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from scripted_cluster import DECODE, PREFILL, UNIFIED, collect, gateway, make_request
from scripted_worker import workers

from eyas.common.cluster import roster
from eyas.common.cluster.discovery import registry
from eyas.common.errors import EyasError, Unavailable
from gateway.backends.generate import ClusterBackend
from gateway.backends.retries import MAX_RETRIES
from gateway.routing import cluster as gateway_cluster
from gateway.routing.cluster import Cluster
from gateway.routing.router import route
from tests.rpc.worker_process import process

CLEAR_S = 10.0


@pytest.fixture(autouse=True)
def no_worker_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the time in which a lost worker may come back had passed."""
    monkeypatch.setattr(roster, "RETURN_S", 0.0)


async def refusal(backend: ClusterBackend, name: str) -> tuple[EyasError | None, float]:
    """What a request ends with, and after how many seconds."""
    began = time.monotonic()
    try:
        await collect(await backend.start(make_request(name, timeout_s=60)))
    except EyasError as error:
        return error, time.monotonic() - began
    return None, time.monotonic() - began


@pytest.mark.parametrize("roles", [[UNIFIED, UNIFIED], [PREFILL, DECODE, DECODE]])
async def test_dead_workers(roles: list[tuple]) -> None:
    async with workers(*roles) as started, gateway(started) as (backend, _):
        await asyncio.gather(*(worker.kill() for worker in started))
        ends = await asyncio.gather(*(refusal(backend, f"r{i}") for i in range(20)))
        for error, seconds in ends:
            assert isinstance(error, Unavailable) and error.http_status == 503
            assert "worker" in error.message and seconds < CLEAR_S


async def test_workers_that_send_everything_away_are_asked_a_few_times() -> None:
    async with workers(UNIFIED, UNIFIED, UNIFIED) as started, gateway(started) as (backend, _):
        for worker in started:
            worker.script.refuse_submit = Unavailable("draining")
        ends = await asyncio.gather(*(refusal(backend, f"r{i}") for i in range(20)))
        assert all(isinstance(error, Unavailable) and seconds < CLEAR_S for error, seconds in ends)
        assert sum(len(worker.of("submit")) for worker in started) <= 20 * (1 + MAX_RETRIES)


@pytest.mark.slow
async def test_stopped_workers(tmp_path: Path) -> None:
    """They hold their sockets open and say nothing: a request under way and one that comes later."""
    async with contextlib.AsyncExitStack() as stack:
        prefill = await (await stack.enter_async_context(process("prefill", tmp_path))).ready()
        decode = await stack.enter_async_context(process("decode", tmp_path, member=prefill.address))
        started = [prefill, await decode.ready()]
        cluster = Cluster(registry("static:" + ",".join(worker.address for worker in started)))
        await cluster.start()
        stack.push_async_callback(cluster.aclose)
        async with asyncio.timeout(30):
            while route(cluster.candidates()) is None:
                await asyncio.sleep(0.02)
        backend = ClusterBackend(cluster)
        assert (await refusal(backend, "alive"))[0] is None
        for worker in started:
            os.killpg(worker.popen.pid, signal.SIGSTOP)
        first = asyncio.create_task(refusal(backend, "first"))
        await asyncio.sleep(4)
        for error, seconds in await asyncio.gather(first, refusal(backend, "later")):
            assert isinstance(error, Unavailable) and seconds < CLEAR_S, (error, seconds)


async def test_of_workers_that_are_gone_for_good_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_cluster, "RETIRE_S", 0.5)
    async with workers(UNIFIED, UNIFIED) as started, gateway(started) as (backend, cluster):
        gone, stays = started
        cluster.record_outcome(gone.address, Unavailable("it is ill"))
        await gone.kill()
        async with asyncio.timeout(30):
            while gone.address in cluster._channels:
                await asyncio.sleep(0.02)
        assert set(cluster._channels) == set(cluster._sessions) == {stays.address}
        assert not cluster._breakers._breakers
        assert await refusal(backend, "r") == (None, pytest.approx(0, abs=CLEAR_S))
