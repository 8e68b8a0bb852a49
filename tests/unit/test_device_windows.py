"""A device decode engine and a device draft worker between which features go past the host.

Kernels are interpreted and the GPUs' memory is a file's. What only the real thing shows is in
`tests/gpu/test_row_ring_on_gpu.py`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import pytest
import torch

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.device.executor import StepExecutor
from eyas.engine.device.program import StepProgram
from eyas.engine.device.step import FeatureRequest
from eyas.engine.ipc.row_ring import LocalGpu
from eyas.engine.kernels.exchange import mailbox
from eyas.engine.loading import build, device_build, draft_channels
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.speculation.draft_worker.device_runner import DeviceDraftRunner
from eyas.engine.speculation.draft_worker.draft_runner import DraftInput, ProposedTree
from eyas.engine.speculation.drafters import remote
from eyas.engine.speculation.drafters.channels import MAILBOX
from eyas.engine.speculation.feature_rows import DeviceWindows
from tests.unit.device_engines import DRAFTS, PATIENCE_S, PROMPT, answers, config, requests, tokens
from tests.unit.fake_gpu import FakeDriver
from tests.unit.loopback import Loopback, wait_all
from tests.unit.mailbox_engines import SERVED_S, Patient
from tests.unit.remote_drafts import apart, patient, rounds_with_drafts

pytestmark = pytest.mark.usefixtures("one_thread")
__all__ = ["config", "patient"]  # fixtures


class Truth:
    """What every step has made certain, by slot and position: the newest rows of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[tuple[int, int], torch.Tensor] = {}
        self.reads: list[tuple[int, range]] = []
        keep, read, truth = StepProgram._keep, DeviceWindows.read, self

        def keeping(program: Any, tap: Any) -> torch.Tensor:
            features = keep(program, tap)
            truth.note(program, features)
            return features

        def reading(windows: DeviceWindows, slot: int, rows: range) -> torch.Tensor:
            found = read(windows, slot, rows)
            assert torch.equal(found, torch.stack([truth.rows[slot, row] for row in rows]))
            truth.reads.append((slot, rows))
            return found

        monkeypatch.setattr(StepProgram, "_keep", keeping)
        monkeypatch.setattr(DeviceWindows, "read", reading)

    def note(self, program: Any, features: torch.Tensor) -> None:
        """`features`: of a step's paths, then of its singles."""
        lengths, path = program._state.tables.length, program._paths.shape[1]
        slots = [*program._part["slots"].tolist(), *program._part["single_slots"].tolist()]
        batch = len(program._part["slots"])
        counts = [*program._table[:, 0].tolist()] if batch else []
        firsts = [*range(0, batch * path, path), *range(batch * path, len(features))]
        for slot, first, count in itertools.zip_longest(slots, firsts, counts, fillvalue=1):
            start = int(lengths[slot]) - count
            for j in range(count):
                self.rows[slot, start + j] = features[first + j].float()


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[FakeDriver]:
    """Every engine has one."""
    monkeypatch.setattr(mailbox, "fetch", Patient(wait_s=20.0))
    monkeypatch.setattr(mailbox, "MOST_POLLS", 2)
    drivers: list[FakeDriver] = []

    def gpu_of(loaded: EngineSpec) -> LocalGpu:
        drivers.append(FakeDriver((b"gpu-a", b"gpu-b")[len(drivers)]))
        return LocalGpu(drivers[-1], "float32", lambda: None, shared=True)

    for module in (build, draft_channels):
        monkeypatch.setattr(module, "gpu_of", gpu_of)
    monkeypatch.setattr(device_build, "from_gpu_to_gpu", lambda loaded: True)
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    return drivers


def connected(cluster: Loopback) -> Any:
    """The decode engine's drafter, once it has a channel."""
    drafter = cluster.workers["decode"].engine._parts.drafter._head
    deadline = time.monotonic() + PATIENCE_S
    while not drafter._channels.mailbox("draft"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return drafter


def long() -> list[GenerationRequest]:
    """Two that draft for a while."""
    found = []
    for prompt, count in (((5, 9, 11), 24), (PROMPT[:22], 12)):
        seeded = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=count, ignore_eos=True)
        found.append(GenerationRequest(f"of {len(prompt)}", prompt, seeded))
    return found


@pytest.mark.slow
def test_no_features_of_rounds_come_to_the_host(
    config: EngineConfig, two_gpus: list[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = replace(config, speculation=DRAFTS["chain"])
    expected, _ = answers(replace(config, draft=None), requests())
    came: list[FeatureRequest] = []
    certain = StepExecutor._certain

    def seeing(executor: StepExecutor, program: StepProgram, wanted: FeatureRequest) -> torch.Tensor:
        came.append(wanted)
        return certain(executor, program, wanted)

    monkeypatch.setattr(StepExecutor, "_certain", seeing)
    cluster = Loopback(*apart(plain, device_drafter=True))
    try:
        drafter = connected(cluster)
        came.clear()  # those of the warm-up
        results = [cluster.submit(request, split=False) for request in requests()]
        wait_all(results, SERVED_S)
        assert all(worker.thread.is_alive() for worker in cluster.workers.values())
    finally:
        cluster.close()
    assert tokens(results) == tokens(expected)
    assert rounds_with_drafts(results)[1] > 0
    assert drafter.sent[MAILBOX] > 4
    assert came and not any(one.decoded for one in came), "those of prompts do, and no others"
    assert [driver.mappings for driver in two_gpus] == [0, 0]


@pytest.mark.slow
def test_a_sequence_that_opens_anew_begins_with_what_the_device_has_kept(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft worker loses a row of it, again and again."""
    plain = replace(config, speculation=DRAFTS["chain"])
    expected, _ = answers(replace(config, draft=None), long())
    truth, draft, calls = Truth(monkeypatch), DeviceDraftRunner.draft, itertools.count()

    def losing(runner: DeviceDraftRunner, asked: SequenceOf[DraftInput], spec: Any) -> list[ProposedTree]:
        lost = next(calls) % 4 == 3
        return [one._replace(whole=one.whole and not lost) for one in draft(runner, asked, spec)]

    monkeypatch.setattr(DeviceDraftRunner, "draft", losing)
    cluster = Loopback(*apart(plain, device_drafter=True))
    try:
        connected(cluster)
        results = [cluster.submit(request, split=False) for request in long()]
        wait_all(results, SERVED_S)
        assert all(worker.thread.is_alive() for worker in cluster.workers.values())
    finally:
        cluster.close()
    assert tokens(results) == tokens(expected)
    assert rounds_with_drafts(results)[1] > 0
    assert len(truth.reads) > 1 and max(len(rows) for _, rows in truth.reads) > 4
