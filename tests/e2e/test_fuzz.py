"""Minutes of hostile calls to every route and every method, while seeded streams run that must not change."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from tests.chaos.rig import Rig, rig
from tests.chaos.streams import Outcome, Streams, make_requests, through_rig
from tests.fuzz.http import HEALTHY_BODIES, HttpFuzz
from tests.fuzz.wire import GrpcFuzz, methods

SEED = 11
SECONDS = 90.0
STREAMS = 16
ATTACKERS = 4  # of each kind
LEASE_S = 5.0
QUIET_S = 60.0


async def attack_until(end: float, fuzz: HttpFuzz | GrpcFuzz) -> None:
    while time.monotonic() < end:
        await fuzz.attack()


async def quiet(cluster: Rig) -> list[str]:
    """What is still held after everything had time to end."""
    deadline = time.monotonic() + QUIET_S
    while (held := await cluster.leftovers()) and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
    return held


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_hostile_calls_change_no_stream() -> None:
    log: list[str] = []
    outcomes: list[Outcome] = []
    async with rig(LEASE_S, lambda process, line: log.append(f"{process}: {line}")) as cluster:
        requests = await make_requests(STREAMS, SEED)
        expected = {request.id: (await through_rig(cluster, request))[0] for request in requests}
        before = cluster.processes.pids
        http = HttpFuzz(cluster.processes.url, SEED)
        await http.learn()
        wire = GrpcFuzz([cluster.processes.grpc_address, *cluster.processes.addresses.values()], SEED)
        async with contextlib.aclosing(wire):
            streams = Streams(cluster, expected, outcomes.append)
            streams.start(requests, STREAMS, SEED)
            end = time.monotonic() + SECONDS
            await asyncio.gather(
                *(attack_until(end, fuzz) for fuzz in (http, wire) for _ in range(ATTACKERS))
            )
            await streams.finish()
        held = await quiet(cluster)
        after = cluster.processes.pids
    print(dict(http.answers.statuses), dict(wire.calls), f"{len(outcomes)} streams")
    assert [outcome for outcome in outcomes if outcome.error] == [] and len(outcomes) >= STREAMS
    assert http.answers.wrong == [] and wire.wrong == []
    assert after == before and held == []
    assert [line for line in log if "Traceback" in line] == []
    assert set(HEALTHY_BODIES) <= http.routes and http.answers.statuses[400] > 0
    assert {path for path, _ in wire.calls} == {method.path for method in methods()}
