"""Decode and draft engines with a mailbox between them: steps are launched before their drafts are there, the
drafts are those that hosts hand over, and no token is another, whatever is found in the mailbox.

Kernels are interpreted, and the devices' memory is that of fake GPUs. An interpreted step has run when it is
launched, so a round's looks at its mailbox are put off here until the drafter had its time (`patient`).
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
import torch

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.batch.sequence import SequenceWork
from eyas.engine.batch.tables import SlotTables
from eyas.engine.device.flight import LaunchedStep
from eyas.engine.device.runner import DeviceRunner
from eyas.engine.ipc.mailbox import DraftMailbox, MailLayout
from eyas.engine.ipc.messages import DraftDown, DraftProposal, Event
from eyas.engine.ipc.row_ring import LocalGpu, tag
from eyas.engine.kernels.drafts.rounds import RoundBatch
from eyas.engine.kernels.exchange import mailbox, row_ring
from eyas.engine.kernels.exchange.mailbox import MailLimits
from eyas.engine.loading import build, device_build, draft_channels
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loop.drafting import DraftWait
from eyas.engine.speculation.draft_worker.draft_engine import DraftEngine, PostedCommits
from eyas.engine.speculation.draft_worker.draft_sequences import DraftedSequence, Key
from eyas.engine.speculation.drafters import remote
from eyas.engine.speculation.drafters.channels import GRPC, MAILBOX, SHM, mails
from tests.unit.fake_gpu import FakeDriver
from tests.unit.loopback import Loopback, Result, Worker, wait_all
from tests.unit.test_device_engine import PATIENCE_S, answers, config, requests, tokens
from tests.unit.test_device_remote import apart

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow, pytest.mark.timeout(600)]

__all__ = ["config"]  # a fixture
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
    monkeypatch.setattr(DraftWait, "draft_wait_s", PATIENCE_S / 3)
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


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[FakeDriver]:
    """Every engine has a GPU of its own. No look at a mailbox is repeated: see above."""
    monkeypatch.setattr(mailbox, "MOST_POLLS", 2)
    return own_gpus(monkeypatch)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Patient:
    waits = Patient()
    monkeypatch.setattr(mailbox, "fetch", waits)
    return waits


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[int, ...]]]:
    """What is left in mailboxes: below which position, which tokens."""
    left: list[tuple[int, tuple[int, ...]]] = []
    propose = DraftMailbox.propose

    def seen(box: DraftMailbox, number: int, proposal: DraftProposal) -> bool:
        left.append((proposal.base_len, proposal.tokens))
        return propose(box, number, proposal)

    monkeypatch.setattr(DraftMailbox, "propose", seen)
    return left


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


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every round with a mailbox: how many steps of its sequence were in flight when it was launched."""
    found: list[int] = []
    launch = DeviceRunner.launch

    def seen(runner: DeviceRunner, works: list[SequenceWork]) -> LaunchedStep:
        found.extend(work.seq.in_flight for work in works if work.seq.mailed)
        return launch(runner, works)

    monkeypatch.setattr(DeviceRunner, "launch", seen)
    return found


def test_drafts_are_those_that_hosts_hand_over(
    config: EngineConfig,
    gpus: list[FakeDriver],
    patient: Patient,
    proposed: list[tuple[int, tuple[int, ...]]],
    ahead: list[int],
) -> None:
    chosen = replace(config, speculation=CHAIN)
    expected, by_host, _ = served(replace(chosen, transfer="shm"), asked(10))
    theirs = dict(proposed)
    proposed.clear()
    found, sent, cluster = served(by_gpu(chosen), asked(10))
    assert tokens(found) == tokens(expected)
    assert by_host[SHM] > 1 and by_host[GRPC] == 1 and MAILBOX not in by_host
    assert sent[MAILBOX] > 1 and set(sent) == {MAILBOX} and not cluster.reasons
    same = [theirs[base] == ids for base, ids in proposed if base in theirs]
    assert len(same) > 2 and all(same)
    ours, plain = rounds(found, 10), rounds(expected, 10)
    both = ours.keys() & plain.keys()
    assert len(both) > 1 and {at: ours[at] for at in both} == {at: plain[at] for at in both}
    assert patient.found and all(patient.found) and (0, 1) in ours, "that behind the prompt waited too"
    assert ahead and all(ahead[1:]), "no step waits for the tokens of the one before"
    assert [(driver.mappings, driver.registered) for driver in gpus] == [(0, {}), (0, {})]


def test_tokens_are_those_of_plain_decoding(
    config: EngineConfig, gpus: list[FakeDriver], patient: Patient
) -> None:
    """Chunks, a nucleus, penalties, two choices of a prompt."""
    expected, _ = answers(replace(config, draft=None), requests())
    found, sent, _ = served(by_gpu(replace(config, speculation=CHAIN)), requests())
    assert tokens(found) == tokens(expected)
    assert sent[MAILBOX] > 5
    assert sum(entry.accepted for result in found for entry in result.entries) > 0


def test_words_go_round_in_their_ring(
    config: EngineConfig, gpus: list[FakeDriver], patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three laps of eight rows."""
    monkeypatch.setattr("eyas.engine.speculation.drafters.channels.ring_rows", lambda rows: 8)
    expected, _ = answers(replace(config, draft=None), asked(24))
    found, sent, cluster = served(by_gpu(replace(config, speculation=CHAIN)), asked(24))
    assert tokens(found) == tokens(expected)
    assert set(sent) == {MAILBOX} and not cluster.reasons and sum(patient.found) > 5


def test_a_drafter_that_is_always_late_changes_no_token(config: EngineConfig, gpus: list[FakeDriver]) -> None:
    """An interpreted drafter is: no round waits for it."""
    expected, _ = answers(replace(config, draft=None), asked(14))
    found, sent, cluster = served(by_gpu(replace(config, speculation=CHAIN)), asked(14))
    assert tokens(found) == tokens(expected) and sent[MAILBOX] > 5
    decode = cluster.workers["decode"].engine
    assert decode._drafting.missed_rounds > 5
    assert int(decode._parts.runner._executor.tables.missed.max()) >= 8


Change = Callable[[DraftProposal], DraftProposal]
WRONG: dict[str, Change] = {
    "other tokens": lambda one: _with(one, tokens=tuple((token + 1) % 16 for token in one.tokens)),
    "unknown tokens": lambda one: _with(one, tokens=tuple(token + 16 for token in one.tokens)),
    "parents behind their children": lambda one: _with(one, parents=tuple(range(len(one.parents)))),
    "another generation": lambda one: _with(one, generation=one.generation + 1),
    "another base": lambda one: _with(one, base_len=one.base_len - 1),
}


def _with(proposal: DraftProposal, **changes: object) -> DraftProposal:
    return msgspec.structs.replace(proposal, **changes)


@pytest.mark.parametrize("change", [pytest.param(one, id=name) for name, one in WRONG.items()])
def test_a_drafter_that_is_wrong_changes_no_token(
    config: EngineConfig, gpus: list[FakeDriver], change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = answers(replace(config, draft=None), asked(8))
    propose, wrong = DraftMailbox.propose, []

    def spoiled(box: DraftMailbox, number: int, proposal: DraftProposal) -> bool:
        wrong.append(change(proposal))
        return propose(box, number, wrong[-1])

    monkeypatch.setattr(DraftMailbox, "propose", spoiled)
    monkeypatch.setattr(mailbox, "fetch", Patient(wait_s=3.0))
    found, _, _ = served(by_gpu(replace(config, speculation=CHAIN)), asked(8))
    assert tokens(found) == tokens(expected) and len(wrong) > 3
    assert sum(entry.accepted for entry in found[0].entries) <= 1


def test_rounds_that_are_lost_open_their_sequence_anew(
    config: EngineConfig, gpus: list[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft worker sees that another lap has begun."""
    patient = Patient(wait_s=2.0)
    monkeypatch.setattr(mailbox, "fetch", patient)
    monkeypatch.setattr("eyas.engine.speculation.drafters.channels.ring_rows", lambda rows: 8)
    monkeypatch.setattr("eyas.engine.speculation.drafters.remote.BACKOFF_S", 0.0)
    post, calls = mailbox.post, itertools.count(1)

    def lossy(tables: SlotTables, slots: torch.Tensor, *rest: Any) -> None:
        """The fourth round of a sequence that has a mailbox is not told."""
        if not tables.mailbox[slots.long()].any() or next(calls) != 4:
            post(tables, slots, *rest)

    monkeypatch.setattr(mailbox, "post", lossy)
    expected, _ = answers(replace(config, draft=None), asked(26))
    found, sent, cluster = served(by_gpu(replace(config, speculation=CHAIN)), asked(26))
    assert tokens(found) == tokens(expected)
    assert any("not in its mailbox" in reason for reason in cluster.reasons)
    assert sent[GRPC] > 0 and sent[MAILBOX] > 1 and sum(patient.found) > 3


def lossy(every: int) -> Callable[..., None]:
    """`row_ring.put`, but every so often nothing is written: as if another lap had begun."""
    put, calls = row_ring.put, [0]

    def sometimes(*parts: Any) -> None:
        calls[0] += 1
        if calls[0] % every:
            put(*parts)

    return sometimes


def test_a_sequence_whose_features_are_lost_opens_anew(
    config: EngineConfig, gpus: list[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = answers(replace(config, draft=None), asked(12))
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    monkeypatch.setattr(mailbox, "fetch", Patient(wait_s=5.0))
    monkeypatch.setattr(row_ring, "put", lossy(5))
    found, sent, cluster = served(by_gpu(replace(config, speculation=CHAIN)), asked(12))
    assert tokens(found) == tokens(expected)
    assert any("not in its ring" in reason for reason in cluster.reasons)
    assert sent[GRPC] > 0 and sent[MAILBOX] > 1
    assert [driver.mappings for driver in gpus] == [0, 0]


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_drafter_that_dies_leaves_no_address(
    config: EngineConfig, gpus: list[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some proposals its channel breaks: the next step has plain rounds, and nothing is mapped."""
    expected, _ = answers(replace(config, draft=None), asked(12))
    monkeypatch.setattr(mailbox, "fetch", Patient(wait_s=20.0))
    answer, left = PostedCommits.answer, itertools.count(1)

    def dying(posted: PostedCommits, key: Key, followed: DraftedSequence, proposal: DraftProposal) -> bool:
        if next(left) == 4:
            raise SystemExit
        return answer(posted, key, followed, proposal)

    monkeypatch.setattr(PostedCommits, "answer", dying)
    check_dying_drafter(config, monkeypatch, expected)
    assert [driver.registered for driver in gpus] == [{}, {}] and gpus[0].mappings == 0


def test_what_a_grammar_holds_goes_by_the_front_beside_it(
    config: EngineConfig, gpus: list[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does an engine whose depth is adaptive, or that looks drafts up."""
    monkeypatch.setattr(
        "eyas.engine.speculation.drafters.remote.mails",
        lambda seq, spec: len(seq.prompt) == 3 and mails(seq, spec),
    )
    one = asked(6)[0]
    two = [one, GenerationRequest("two", (1, 2), one.params)]
    expected, _ = answers(replace(config, draft=None), two)
    found, sent, _ = served(by_gpu(replace(config, speculation=CHAIN)), two)
    assert tokens(found) == tokens(expected)
    assert sent[MAILBOX] > 0 and sent[GRPC] > 2
