"""Decode and draft engines with a mailbox between them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.ipc.mailbox import MailLayout
from eyas.engine.ipc.messages import DraftDown, Event
from eyas.engine.ipc.row_ring import LocalGpu, tag
from eyas.engine.kernels.drafts.rounds import RoundBatch
from eyas.engine.kernels.exchange import mailbox, row_ring
from eyas.engine.kernels.exchange.mailbox import MailLimits
from eyas.engine.loading import build, device_build, draft_channels
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loop.drafting import DraftWait
from eyas.engine.speculation.draft_worker.draft_engine import DraftEngine
from tests.unit.device_engines import PATIENCE_S, tokens
from tests.unit.fake_gpu import FakeDriver
from tests.unit.loopback import Loopback, Result, Worker, wait_all
from tests.unit.remote_drafts import apart

PATIENT_S = 60.0
SERVED_S = 240  # a drafter's interpreted step takes seconds too
CHAIN = SpeculationConfig(steps=2, topk=1, draft_tokens=3)


def by_gpu(config: EngineConfig) -> EngineConfig:
    return replace(config, transfer=draft_channels.BY_GPU)


class Pair(Loopback):
    """A decode and a draft worker. `reasons`: why the latter closed sequences."""

    def __init__(self, *configs: EngineConfig) -> None:
        self.reasons: list[str] = []
        super().__init__(*configs)
        drafter = self.workers["decode"].engine._drafting.drafter
        deadline = time.monotonic() + PATIENCE_S
        while not drafter._head._channels.mailbox("draft"):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def _handle(self, worker: Worker, event: Event) -> None:
        if isinstance(event, DraftDown):
            self.reasons += [closed.reason for closed in event.closed]
        super()._handle(worker, event)


def own_gpus(monkeypatch: pytest.MonkeyPatch) -> list[FakeDriver]:
    """Of every engine that is made from now on."""
    made: list[FakeDriver] = []

    def by_name(loaded: EngineSpec) -> bool:
        return loaded.config.transfer == draft_channels.BY_GPU

    def gpu_of(loaded: EngineSpec) -> LocalGpu | None:
        if not by_name(loaded):
            return None
        made.append(FakeDriver())
        return LocalGpu(
            made[-1], str(loaded.placement.dtype).removeprefix("torch."), lambda: None, shared=True
        )

    monkeypatch.setattr(build, "gpu_of", gpu_of)
    monkeypatch.setattr(draft_channels, "gpu_of", gpu_of)
    monkeypatch.setattr(device_build, "from_gpu_to_gpu", by_name)
    monkeypatch.setattr(DraftWait, "seconds", PATIENCE_S / 3)
    monkeypatch.setattr(row_ring, "LOOKS", 32)  # an interpreted one takes long
    return made


def asked(count: int = 6) -> list[GenerationRequest]:
    greedy = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return [GenerationRequest("one", (5, 9, 11), greedy)]


def served(
    config: EngineConfig, wanted: list[GenerationRequest]
) -> tuple[list[Result], dict[str, int], Pair]:
    """What comes of the requests, and the commits by path."""
    cluster = Pair(*apart(config, device_drafter=True))
    try:
        results = [cluster.submit(request, split=False) for request in wanted]
        wait_all(results, SERVED_S)
        sent = dict(cluster.workers["decode"].engine._drafting.sent)
        assert all(worker.thread.is_alive() for worker in cluster.workers.values())
    finally:
        cluster.close()
    return results, sent, cluster


@dataclass
class Patient:
    """`fetch`, once the drafts of rounds that the device itself has told of are there, or `wait_s` is over.

    `found`: of the rounds with a mailbox, whether they were there.
    """

    wait_s: float = PATIENT_S
    found: list[bool] = field(default_factory=list)
    _fetch: Callable[[RoundBatch, MailLayout, MailLimits], None] = mailbox.fetch

    def __call__(self, batch: RoundBatch, place: MailLayout, reach: MailLimits) -> None:
        tables, deadline = batch.tables, time.monotonic() + self.wait_s
        for slot in batch.slots.tolist():
            address, length = int(tables.mailbox[slot]), int(tables.length[slot])
            if slot == tables.padding_slot or not address:
                continue
            generation = int(tables.ring_generation[slot])
            told = self._is_there(address, (length - 1) % place.rows, generation, length - 1)
            while not (there := self._is_there(address, place.header, generation, length)):
                if not told or time.monotonic() > deadline:
                    break
                time.sleep(0.002)
            self.found.append(there)
        self._fetch(batch, place, reach)

    @staticmethod
    def _is_there(address: int, word: int, generation: int, position: int) -> bool:
        found = ctypes.c_uint64.from_address(address + 8 * word).value
        return found >> 32 == tag(generation, position) & 0xFFFFFFFF


def rounds(results: list[Result], count: int) -> dict[tuple[int, int], tuple[int, int]]:
    """By request and place in the output: how many drafts were verified there, and accepted.

    Of `count` tokens: the host wants no drafts beyond the last one, the device does not know it.
    """
    return {
        (number, entry.index): (min(entry.offered, count - entry.index - 1), entry.accepted)
        for number, result in enumerate(results)
        for entry in result.entries
        if entry.offered
    }


def check_dying_drafter(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, expected: list[Result]
) -> None:
    """Checks answers whose draft worker dies by the caller's patch: its mailbox is empty then."""
    monkeypatch.setattr(DraftEngine, "_close", lambda engine: engine._channels.close())
    cluster = Pair(*apart(by_gpu(replace(config, speculation=CHAIN)), device_drafter=True))
    try:
        found = [cluster.submit(request, split=False) for request in asked(12)]
        wait_all(found, SERVED_S)
        assert not cluster.workers["draft"].thread.is_alive()
        tables = cluster.workers["decode"].engine._parts.runner._executor.tables
        assert int(tables.mailbox.abs().sum()) == 0
    finally:
        cluster.close()
    assert tokens(found) == tokens(expected)
