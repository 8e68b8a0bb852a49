"""Two device engines, one for prompts and one that decodes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from eyas.common.config import EngineConfig
from eyas.common.types import GenerationRequest, Role
from kv_transfer import puller
from tests.unit.loopback import Loopback, Result, wait_all

PATIENCE_S = 200


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine answers between two steps, and these take long here."""
    monkeypatch.setattr(puller, "RELEASE_S", PATIENCE_S)


def roles(whole: EngineConfig, **decode: int) -> tuple[EngineConfig, EngineConfig]:
    drafts = () if whole.draft is None else (Role.DRAFT,)
    return (
        replace(whole, roles=(Role.PREFILL,), worker="prefill"),
        replace(whole, roles=(Role.DECODE, *drafts), worker="decode", **decode),
    )


def together(cluster: Loopback, wanted: list[GenerationRequest]) -> list[Result]:
    """What comes of the requests; then nothing is held."""
    try:
        results = [cluster.submit(request, split=True) for request in wanted]
        wait_all(results, PATIENCE_S)
        let_go(cluster)
    finally:
        cluster.close()
    return results


def let_go(cluster: Loopback) -> None:
    deadline = time.monotonic() + 30
    for worker in cluster.workers.values():
        engine = worker.engine
        while engine._scheduler.pool.used or engine._requests.table:
            assert time.monotonic() < deadline, f"{worker.address} holds something"
            time.sleep(0.01)


def by_choice(result: Result) -> list[tuple[int, int, tuple[int, ...]]]:
    """Its rounds."""
    return sorted((entry.choice, entry.index, entry.tokens) for entry in result.entries)
