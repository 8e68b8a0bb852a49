"""Decode and draft engines whose features go from device to device: the drafts are those that the host's way
gives, and no token is another, whatever becomes of the ring.

Kernels are interpreted, and the devices' memory is that of fake GPUs, which both engines map.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.ipc.messages import DraftDown, Event, Proposal
from eyas.engine.ipc.row_memory import Gpu, RowMemory
from eyas.engine.kernels import row_ring
from eyas.engine.loading import build, device_build, draft_lines
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loop.patience import Patience
from eyas.engine.speculation.lines import CUDA_IPC, GRPC, SHM
from tests.unit.fake_gpu import FakeDriver
from tests.unit.loopback import Loopback, Result, Worker, wait_all
from tests.unit.test_device_engine import DRAFTS, PATIENCE_S, answers, config, tokens
from tests.unit.test_device_remote import apart

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow, pytest.mark.timeout(600)]

SERVED_S = 240  # a drafter's interpreted step takes seconds too
CHAIN = SpeculationConfig(steps=2, topk=1, draft_tokens=3)
__all__ = ["config"]  # a fixture


def by_gpu(config: EngineConfig) -> EngineConfig:
    return replace(config, transfer=draft_lines.BY_GPU)


class Pair(Loopback):
    """A decode and a draft worker. `drafts`: what the latter proposed by the line, below which token;
    `reasons`: why it closed sequences.
    """

    def __init__(self, *configs: EngineConfig) -> None:
        self.reasons: list[str] = []
        self.drafts: list[tuple[int, tuple[int, ...]]] = []
        super().__init__(*configs)
        lines = self.workers["draft"].engine._lines
        self._post, lines.post = lines.post, self._heard
        drafter = self.workers["decode"].engine._drafting.drafter
        deadline = time.monotonic() + PATIENCE_S
        while not drafter._head._lines.has("draft"):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def _heard(self, proposals: dict[int, list[Proposal]]) -> dict[int, list[Proposal]]:
        self.drafts += [(one.base_len, one.tokens) for some in proposals.values() for one in some]
        return self._post(proposals)

    def _handle(self, worker: Worker, event: Event) -> None:
        if isinstance(event, DraftDown):
            self.reasons += [closed.reason for closed in event.closed]
        super()._handle(worker, event)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[FakeDriver]:
    """Every engine has a GPU of its own, and no mailbox. Also: an interpreted step seems to take no time."""
    monkeypatch.setattr("eyas.engine.speculation.remote.mails", lambda seq, spec: False)
    return own_gpus(monkeypatch)


def own_gpus(monkeypatch: pytest.MonkeyPatch) -> list[FakeDriver]:
    """Of every engine that is made from now on."""
    made: list[FakeDriver] = []

    def by_name(loaded: EngineSpec) -> bool:
        return loaded.config.transfer == draft_lines.BY_GPU

    def gpu_of(loaded: EngineSpec) -> Gpu | None:
        if not by_name(loaded):
            return None
        made.append(FakeDriver())
        return Gpu(made[-1], str(loaded.placement.dtype).removeprefix("torch."), lambda: None, shared=True)

    monkeypatch.setattr(build, "gpu_of", gpu_of)
    monkeypatch.setattr(draft_lines, "gpu_of", gpu_of)
    monkeypatch.setattr(device_build, "from_gpu_to_gpu", by_name)
    monkeypatch.setattr(Patience, "draft_wait_s", PATIENCE_S / 3)
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


def test_drafts_are_those_of_features_that_came_by_the_host(
    config: EngineConfig, gpus: list[FakeDriver]
) -> None:
    chain = replace(config, speculation=CHAIN)
    expected, by_host, without = served(replace(chain, transfer="shm"), asked())
    found, sent, cluster = served(by_gpu(chain), asked())
    assert tokens(found) == tokens(expected)
    assert cluster.drafts == without.drafts and len(set(cluster.drafts)) > 2
    assert by_host[SHM] > 1 and CUDA_IPC not in by_host
    by_line = sent[CUDA_IPC] + sent.get(SHM, 0)
    assert (sent[GRPC], by_line) == (by_host[GRPC], by_host[SHM]) and not cluster.reasons
    assert sent.get(SHM, 0) <= 1, "only of a step that was launched before the sequence opened"
    assert len(gpus) == 2 and [driver.mappings for driver in gpus] == [0, 0]


def test_trees_too(config: EngineConfig, gpus: list[FakeDriver]) -> None:
    spec = DRAFTS["tree"]
    assert spec is not None
    tree = replace(config, speculation=spec)
    expected, _, without = served(replace(tree, transfer="shm"), asked())
    found, sent, cluster = served(by_gpu(tree), asked())
    assert tokens(found) == tokens(expected) and cluster.drafts == without.drafts
    assert sent[CUDA_IPC] > 1 and sent.get(SHM, 0) <= 1


def lossy(every: int) -> Callable[..., None]:
    """`row_ring.put`, but every so often nothing is written: as if another lap had begun."""
    put, calls = row_ring.put, [0]

    def sometimes(*parts: object) -> None:
        calls[0] += 1
        if calls[0] % every:
            put(*parts)

    return sometimes


def test_a_sequence_whose_features_are_lost_opens_anew(
    config: EngineConfig, gpus: list[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = answers(replace(config, draft=None), asked(12))
    monkeypatch.setattr("eyas.engine.speculation.remote.BACKOFF_S", 0.0)
    monkeypatch.setattr(row_ring, "put", lossy(5))
    found, sent, cluster = served(by_gpu(replace(config, speculation=CHAIN)), asked(12))
    assert tokens(found) == tokens(expected)
    assert any("not in its ring" in reason for reason in cluster.reasons)
    assert sent[GRPC] > 1 and sent[CUDA_IPC] > 1
    assert [driver.mappings for driver in gpus] == [0, 0]


def test_without_a_free_place_features_go_by_the_host(
    config: EngineConfig, gpus: list[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And beside a sequence that has one: each goes its own way."""
    one = asked(4)[0]
    two = [one, GenerationRequest("two", (1, 2), one.params)]
    expected, _ = answers(replace(config, draft=None), two)
    take, left = RowMemory.take_place, [1]

    def once(memory: RowMemory) -> int:
        left[0] -= 1
        return take(memory) if left[0] >= 0 else -1

    monkeypatch.setattr(RowMemory, "take_place", once)
    found, sent, cluster = served(by_gpu(replace(config, speculation=CHAIN)), two)
    assert tokens(found) == tokens(expected)
    assert sent[CUDA_IPC] > 0 and sent[SHM] > 0 and not cluster.reasons
