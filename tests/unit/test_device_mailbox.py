"""Decode and draft engines with a mailbox between them: steps are launched before their drafts are there, the
drafts are those that hosts hand over, and no token is another, whatever is found in the mailbox.

Kernels are interpreted, and the devices' memory is that of fake GPUs. An interpreted step has run when it is
launched, so a round's looks at its mailbox are put off here until the drafter had its time (`patient`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from eyas.common.config import EngineConfig
from eyas.common.types import GenerationRequest
from eyas.engine.batch.sequence import SequenceWork
from eyas.engine.batch.tables import SlotTables
from eyas.engine.device.flight import LaunchedStep
from eyas.engine.device.runner import DeviceRunner
from eyas.engine.ipc.mailbox import DraftMailbox
from eyas.engine.ipc.messages import DraftProposal
from eyas.engine.kernels.exchange import mailbox, row_ring
from eyas.engine.speculation.draft_worker.draft_engine import PostedCommits
from eyas.engine.speculation.draft_worker.draft_sequences import DraftedSequence, Key
from eyas.engine.speculation.drafters import remote
from eyas.engine.speculation.drafters.channels import GRPC, MAILBOX, SHM, mails
from tests.unit.device_engines import answers, config, requests, tokens
from tests.unit.fake_gpu import FakeDriver
from tests.unit.mailbox_engines import (
    CHAIN,
    Patient,
    asked,
    by_gpu,
    check_dying_drafter,
    own_gpus,
    rounds,
    served,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow, pytest.mark.timeout(600)]

__all__ = ["config"]  # a fixture


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
