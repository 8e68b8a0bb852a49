"""A prefill worker that fails every prompt while it says that it serves, and later is well again."""

from __future__ import annotations

import asyncio

import pytest
from scripted_cluster import DECODE, PREFILL, collect, gateway, make_request
from scripted_worker import workers

from eyas.common.errors import Unavailable
from gateway.routing import breakers


async def test_a_sick_worker_is_passed_over_until_it_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakers, "FIRST_PAUSE_S", 0.4)
    monkeypatch.setattr(breakers, "LONGEST_PAUSE_S", 0.4)
    async with workers(PREFILL, PREFILL, DECODE) as started, gateway(started) as (backend, _):
        sick, well, _ = started
        sick.script.refuse_prefill = Unavailable("its disk is full")
        for number in range(12):
            await collect(await backend.start(make_request(f"r{number}")))
        assert len(sick.of("prefill")) <= breakers.FAILURES + 1
        assert len(well.of("prefill")) == 12
        sick.script.refuse_prefill = None
        await asyncio.sleep(0.5)
        for number in range(12, 24):
            await asyncio.gather(*(self_made(backend, number, part) for part in range(2)))
        assert len(sick.of("prefill")) > breakers.FAILURES + 4


async def self_made(backend: object, number: int, part: int) -> None:
    await collect(await backend.start(make_request(f"r{number}-{part}")))  # type: ignore[attr-defined]
