"""Requests wait for workers that start or stall, as long as those may come back, and no longer."""

from __future__ import annotations

import asyncio

import pytest
from scripted_backend import first
from scripted_cluster import (
    DECODE,
    PREFILL,
    UNIFIED,
    collect,
    gateway,
    make_request,
    nothing_in_flight,
    until,
)
from scripted_worker import ScriptedWorker, expected, workers

from eyas.common.cluster import roster
from eyas.common.cluster.discovery import registry
from eyas.common.errors import DeadlineExceeded, Unavailable
from gateway.backends import sessions
from gateway.routing import cluster as cluster_module
from tests.rpc.scripted_cluster import collect_after


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is waited for, in a quarter of its time."""
    for module, name in ((cluster_module, "PATIENCE_S"), (roster, "POLL_S"), (sessions, "MAX_BACKOFF_S")):
        monkeypatch.setattr(module, name, getattr(module, name) / 4)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("roles", [(UNIFIED,), (PREFILL, DECODE)])
async def test_a_worker_that_starts_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, roles: tuple[tuple, ...]
) -> None:
    """For as long as it says that it starts: streams go on, and requests that come meanwhile are served."""
    async with workers(*roles) as started, gateway(started) as (backend, cluster):
        dying = started[-1]
        dying.script.stop_at = 10
        request, late = make_request(tokens=40), make_request("late")
        stream = await backend.start(request)
        got = await first(stream, 5)
        await dying.kill()
        await until(lambda: not cluster.session(dying.address).connected)
        await asyncio.sleep(1.5)  # longer than any search is patient
        returned = ScriptedWorker(roles[-1])
        returned.script.starting = True
        await returned.start(int(dying.address.rpartition(":")[2]))
        monkeypatch.setattr(roster, "RETURN_S", 1.5)  # longer than the pause between two looks
        await asyncio.sleep(2.0)
        assert {info.worker for info in await backend.models()} >= {returned.address}
        asking = asyncio.create_task(backend.start(late))
        await asyncio.sleep(0.5)
        returned.script.starting = False
        assert await collect_after(got, stream) == {0: expected(request)}
        assert await collect(await asking) == {0: expected(late)}
        await returned.kill()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("roles", [(UNIFIED,), (PREFILL, DECODE)])
async def test_a_worker_that_stalls_is_waited_for(roles: tuple[tuple, ...]) -> None:
    """As one that died is: streams go on when its engine does, and later requests are served then."""
    async with workers(*roles) as started, gateway(started) as (backend, cluster):
        stalling = started[-1]
        stalling.script.stop_at = 10
        request, late = make_request(tokens=40), make_request("late")
        stream = await backend.start(request)
        got = await first(stream, 5)
        stalling.script.stalled = True
        stalling.end_sessions()
        await until(lambda: bool(cluster.returning()))
        assert backend.health().problem
        asking = asyncio.create_task(backend.start(late))
        await asyncio.sleep(2.5)  # longer than any search is patient
        assert not asking.done()
        stalling.script.stalled, stalling.script.stop_at = False, None
        assert await collect_after(got, stream) == {0: expected(request)}
        assert await collect(await asking) == {0: expected(late)}
        assert not cluster.returning()


@pytest.mark.usefixtures("hasty")
async def test_streams_stay_with_a_late_worker_and_new_ones_wait_for_it() -> None:
    """Those that it has begun, and those in its queue: nothing is computed twice, and no try is spent."""
    async with workers(UNIFIED) as started, gateway(started) as (backend, cluster):
        slow = started[0]
        slow.script.stop_at = 10
        request, queued, late = make_request(tokens=40), make_request("queued"), make_request("late")
        stream, waiting = await backend.start(request), await backend.start(queued)
        got = await first(stream, 5)
        slow.script.late = True
        slow.script.refuse_submit = Unavailable("it is late")
        await until(lambda: not cluster.session(slow.address).connected and bool(cluster.returning()))
        asking = asyncio.create_task(backend.start(late))
        await asyncio.sleep(2.5)  # longer than any search is patient
        assert not asking.done() and len(slow.of("submit")) == 2
        slow.script.stop_at = slow.script.refuse_submit = None
        slow.script.late = False
        assert await collect_after(got, stream) == {0: expected(request)}
        assert await collect(waiting) == {0: expected(queued)}
        assert await collect(await asking) == {0: expected(late)}
        assert len(slow.of("submit")) == 3


@pytest.mark.parametrize("flaw", ["stalled", "draining"])
async def test_no_request_waits_long_for_a_worker_that_stays_away(
    monkeypatch: pytest.MonkeyPatch, flaw: str
) -> None:
    """One that stalls had its time to go on, and one that drains never returns."""
    monkeypatch.setattr(cluster_module, "PATIENCE_S", 0.5)
    monkeypatch.setattr(roster, "POLL_S", 0.2)
    if flaw == "stalled":
        monkeypatch.setattr(roster, "RETURN_S", 0.5)
    async with workers(UNIFIED) as started, gateway(started) as (backend, cluster):
        started[0].script.stop_at = 10
        stream = await backend.start(make_request(tokens=40))
        got = await first(stream, 5)
        setattr(started[0].script, flaw, True)
        started[0].script.refuse_session = Unavailable("it does not serve")
        started[0].end_sessions()
        with pytest.raises(Unavailable, match="no decode worker is serving, after worker .* was lost"):
            await asyncio.wait_for(collect_after(got, stream), 30)
        assert not cluster.returning()


async def test_a_request_that_waits_for_a_start_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async with workers(UNIFIED) as started, gateway(started) as (backend, cluster):
        started[0].script.stop_at = 2
        stream = await backend.start(make_request(tokens=40, timeout_s=2.0))
        await stream.take()
        started[0].script.starting = True
        started[0].end_sessions()
        asking = asyncio.create_task(backend.start(make_request("new", timeout_s=1.0)))
        with pytest.raises(DeadlineExceeded, match="longer than 2 s: no decode worker"):
            await asyncio.wait_for(collect(stream), 30)
        with pytest.raises(DeadlineExceeded, match="longer than 1 s: no decode worker"):
            await asking
        assert nothing_in_flight(cluster)


async def test_a_worker_that_has_loaded_is_found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "POLL_S", 60.0)  # of all others
    async with workers(UNIFIED) as (worker,):
        worker.script.starting = True
        cluster = cluster_module.Cluster(registry(f"static:{worker.address}"))
        await cluster.start()
        try:
            await until(lambda: bool(cluster.returning()))
            worker.script.starting = False
            await asyncio.wait_for(until(lambda: bool(cluster.workers())), 10)
        finally:
            await cluster.aclose()


async def test_a_cancelled_request_waits_for_no_start() -> None:
    async with workers(UNIFIED) as started, gateway(started) as (backend, cluster):
        started[0].script.stop_at = 2
        stream = await backend.start(make_request(tokens=40))
        started[0].script.starting = True
        started[0].end_sessions()
        await until(lambda: not cluster.candidates() or not cluster.session(started[0].address).connected)
        asking = asyncio.create_task(backend.start(make_request("new")))
        await asyncio.sleep(0.5)
        asking.cancel()
        await asyncio.wait_for(stream.aclose(), 20)
        await asyncio.wait([asking], timeout=20)
        assert asking.cancelled() and nothing_in_flight(cluster)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("request ")]
