"""Minutes of hostile calls to every route and every method, while seeded streams run that must not change."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

import pytest

from tests.chaos.rig import Rig, rig
from tests.chaos.streams import Outcome, Streams, make_requests, through_rig
from tests.fuzz.http import HEALTHY_BODIES, HttpFuzz
from tests.fuzz.plays import GrpcFuzz
from tests.fuzz.wire import methods

SEED = int(os.environ.get("EYAS_FUZZ_SEED", "11"))
SECONDS = 90.0
STREAMS = 16
ATTACKERS = 8  # of each kind
LEASE_S = 5.0
QUIET_S = 60.0
DEEP = {  # what nearly right calls must have reached: a method, and a field of its replies
    ("/eyas.v1.Eyas/Chat", "finished"),
    ("/eyas.v1.Eyas/Generate", "finished"),
    ("/eyas.internal.v1.DecodeService/Session", "step"),
    ("/eyas.internal.v1.DecodeService/Session", "rejected"),
    ("/eyas.internal.v1.DraftService/Session", "proposals"),
    ("/eyas.internal.v1.DraftService/Session", "closed"),
    ("/eyas.internal.v1.PrefillService/Prefill", "done"),
    ("/eyas.internal.v1.TransferService/Watch", "done"),
    ("/eyas.internal.v1.TransferService/Watch", "failed"),
    ("/eyas.internal.v1.TransferService/Release", "valid"),
    ("/eyas.internal.v1.TransferService/Fetch", "data"),
}


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
    print(f"seed {SEED}")
    log: list[str] = []
    outcomes: list[Outcome] = []
    async with rig(LEASE_S, lambda process, line: log.append(f"{process}: {line}")) as cluster:
        requests = await make_requests(STREAMS, SEED)
        expected = {request.id: (await through_rig(cluster, request))[0] for request in requests}
        before = cluster.processes.pids
        http = HttpFuzz(cluster.processes.url, SEED)
        await http.learn()
        fuzz = GrpcFuzz(cluster.processes.grpc_address, cluster.processes.addresses, SEED)
        async with contextlib.aclosing(fuzz.wire) as wire:
            streams = Streams(cluster, expected, outcomes.append)
            streams.start(requests, STREAMS, SEED)
            end = time.monotonic() + SECONDS
            await asyncio.gather(*(attack_until(end, one) for one in (http, fuzz) for _ in range(ATTACKERS)))
            await streams.finish()
        held = await quiet(cluster)
        after = cluster.processes.pids
    print("\n".join(f"{key} {count}" for key, count in sorted(http.answers.statuses.items())))
    print("\n".join(f"{key} {count}" for key, count in sorted((wire.calls + wire.replies).items())))
    print(f"{http.answers.statuses.total()} HTTP, {wire.calls.total()} gRPC, {len(outcomes)} streams")
    print("\n".join(log))
    problems = [
        *(f"{outcome.request}: {outcome.error}" for outcome in outcomes if outcome.error),
        *http.answers.wrong,
        *wire.wrong,
        *(f"{name} was restarted" for name in before if after.get(name) != before[name]),
        *held,
        *(line for line in log if "Traceback" in line),
    ]
    assert problems == []
    assert len(outcomes) >= STREAMS
    assert set(HEALTHY_BODIES) <= http.routes
    assert 3 * http.answers.of(200) > http.answers.statuses.total(), "most requests got nowhere"
    assert http.answers.of(400) > 0
    assert {path for path, _ in wire.calls} == set(methods())
    assert set(wire.replies) >= DEEP
