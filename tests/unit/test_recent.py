"""The ring of requests that ended: bounded, newest first, with the times of a trace."""

from __future__ import annotations

import time

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from eyas.common.logging import request_id
from eyas.common.types import EngineTimings, FinishCause, Role, TokenEntry
from gateway.observe.metrics import GatewayMetrics
from gateway.observe.recent import MAX_PROMPTS, MAX_REQUESTS, RecentRequests
from gateway.text.entries import RequestTrace, UsageCounts

PREFILL = EngineTimings(queue_ms=10.0, prefill_ms=200.0, worker="p:1", role=Role.PREFILL, sent=100.0)
DECODE = EngineTimings(
    queue_ms=205.0,
    transfer_ms=4.0,
    transfer_bytes=1 << 20,
    transfer_path="shm",
    worker="d:1",
    role=Role.DECODE,
    sent=100.0,
)
USAGE = UsageCounts(prompt_tokens=9, completion_tokens=6, accepted=3, rejected=1, verify_steps=2)


def trace() -> RequestTrace:
    """A prompt computed on one worker and decoded on another, whose clocks began at 100 s."""
    found = RequestTrace()
    for index, timings in enumerate((PREFILL, DECODE)):
        found.record(TokenEntry("r", 1, 0, index, (5,), timings=timings))
    found.first, found.second = 100.22, 100.3
    return found


def test_a_request_is_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = RecentRequests()
    monkeypatch.setattr(time, "monotonic", lambda: 101.0)
    named = request_id.set("mine")
    recent.add(99.99, [FinishCause.STOP], USAGE, [trace()])
    request_id.reset(named)
    (told,) = msgspec.to_builtins(recent.newest_first())
    parts = {(part["name"], part.get("worker")): part for part in told.pop("parts")}
    assert parts == {
        ("queue", "p:1"): {"name": "queue", "start_ms": 10.0, "ms": 10.0, "worker": "p:1"},
        ("prefill", "p:1"): {"name": "prefill", "start_ms": 20.0, "ms": 200.0, "worker": "p:1"},
        ("queue", "d:1"): {"name": "queue", "start_ms": 10.0, "ms": 205.0, "worker": "d:1"},
        ("transfer", "d:1"): {
            "name": "transfer",
            "start_ms": 215.0,
            "ms": 4.0,
            "worker": "d:1",
            "bytes": 1 << 20,
            "path": "shm",
        },
        ("decode", None): {"name": "decode", "start_ms": 230.0, "ms": 780.0},
    }
    assert abs(told.pop("ended") - time.time()) < 60
    assert told == {
        "id": "mine",
        "total_ms": 1010.0,
        "first_token_ms": 230.0,
        "finish": ["stop"],
        "prompt_tokens": 9,
        "cached_tokens": 0,
        "completion_tokens": 6,
        "accepted_tokens": 3,
        "rejected_tokens": 1,
        "verify_steps": 2,
        "acceptance_length": 2.5,
    }


def test_the_ring_is_bounded_and_newest_first() -> None:
    recent = RecentRequests()
    for count in range(2 * MAX_REQUESTS):
        recent.add(0.0, [], UsageCounts(prompt_tokens=count), [RequestTrace()] * 64)
    told = recent.newest_first()
    assert [request.prompt_tokens for request in told] == [*range(2 * MAX_REQUESTS - 1, MAX_REQUESTS - 1, -1)]
    assert told[0].first_token_ms is None and told[0].parts == []
    recent.add(0.0, [], USAGE, [trace()] * 64)
    assert len(recent.newest_first()[0].parts) == 5 * MAX_PROMPTS


def test_pages_that_move_count_on_their_link() -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    for path in ("shm", "shm", "grpc"):
        moved = trace()
        moved.legs[1] = msgspec.structs.replace(DECODE, transfer_path=path)
        with metrics.meter() as meter:
            meter.ended(USAGE, [moved])
    alone = RequestTrace()
    alone.record(TokenEntry("r", 1, 0, 0, (5,), timings=msgspec.structs.replace(PREFILL, role=Role.DECODE)))
    with metrics.meter() as meter:
        meter.ended(USAGE, [alone])

    def moved_by(path: str) -> float | None:
        labels = {"source": "p:1", "target": "d:1", "path": path}
        return metrics.registry.get_sample_value("eyas_link_bytes_total", labels)

    assert (moved_by("shm"), moved_by("grpc")) == (2 << 20, 1 << 20)
    assert moved_by("nixl") is None
    assert len(metrics.recent.newest_first()) == 4
