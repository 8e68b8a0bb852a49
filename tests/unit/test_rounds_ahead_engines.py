"""Decode and draft engines whose devices share mailboxes, with no host at either end of a round: the drafts
are those that hosts hand over, and no token is another.

Kernels are interpreted, so a batch has run when it is launched: it is put off until there is a round.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from eyas.common.config import EngineConfig
from eyas.engine.batch.tables import SlotTables
from eyas.engine.ipc import lending
from eyas.engine.ipc.mailbox import MailLayout
from eyas.engine.ipc.row_ring import RowMemory, tag
from eyas.engine.kernels.drafts.rounds import RoundBatch
from eyas.engine.kernels.exchange import mail_rounds, mailbox
from eyas.engine.kernels.exchange.mail_rounds import HeardRows, MailWait
from eyas.engine.loading import draft_build
from eyas.engine.loading.draft_channels import BY_GPU
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.speculation.drafters.channels import MAILBOX
from tests.unit.test_device_engine import answers, config, requests, tokens
from tests.unit.test_device_mailbox import (
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
COMES_S = 4.0


@dataclass
class PatientDrafter:
    """`hear`, once there is a round, or none has come for a while. `came`: how many came, each time."""

    came: list[int] = field(default_factory=list)
    _hear: Callable[[RoundBatch, MailWait, HeardRows], None] = mail_rounds.hear

    def __call__(self, batch: RoundBatch, wait: MailWait, heard: HeardRows) -> None:
        deadline = time.monotonic() + COMES_S
        while not int(wait.stop[0]) and time.monotonic() < deadline and not self._any(batch, wait.place):
            time.sleep(0.002)
        time.sleep(0.05)  # for the others of the same step
        self._hear(batch, wait, heard)
        self.came.append(int((heard.counts > 0).sum()))

    @staticmethod
    def _any(batch: RoundBatch, place: MailLayout) -> bool:
        tables = batch.tables
        for slot in batch.slots.tolist():
            address, length = int(tables.mailbox[slot]), int(tables.length[slot])
            if slot == tables.padding_slot or not address:
                continue
            word = ctypes.c_uint64.from_address(address + 8 * (length % place.rows)).value
            if word >> 32 == tag(int(tables.ring_generation[slot]), length) & 0xFFFFFFFF:
                return True
        return False


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> PatientDrafter:
    """Every engine has a GPU of its own, and looks at a mailbox only when its drafts had their time."""

    def by_name(loaded: EngineSpec) -> bool:
        return loaded.config.transfer == BY_GPU

    own_gpus(monkeypatch)
    monkeypatch.setattr(mailbox, "MOST_POLLS", 2)
    monkeypatch.setattr(lending, "LEAST_BYTES", 1)
    monkeypatch.setattr(mailbox, "fetch", Patient())
    monkeypatch.setattr(draft_build, "from_gpu_to_gpu", by_name)
    monkeypatch.setattr(RowMemory, "apart", True)
    monkeypatch.setattr("eyas.engine.speculation.draft_worker.mailed_rounds.MOST_POLLS", 4)
    monkeypatch.setattr("eyas.engine.speculation.draft_worker.draft_engine.BUSY_S", 30.0)
    patient = PatientDrafter()
    monkeypatch.setattr(mail_rounds, "hear", patient)
    return patient


def test_drafts_are_those_that_hosts_hand_over(config: EngineConfig, heard: PatientDrafter) -> None:
    chosen = replace(config, speculation=CHAIN)
    expected, _, _ = served(replace(chosen, transfer="shm"), asked(14))
    found, sent, cluster = served(by_gpu(chosen), asked(14))
    assert tokens(found) == tokens(expected)
    assert sent[MAILBOX] > 1 and set(sent) == {MAILBOX} and not cluster.reasons
    assert sum(heard.came) > 2, "rounds that no host took"
    ours, plain = rounds(found, 14), rounds(expected, 14)
    both = ours.keys() & plain.keys()
    assert len(both) > 2 and {at: ours[at] for at in both} == {at: plain[at] for at in both}
    assert (0, 1) in ours, "the round behind the prompt waited for its drafts"


def test_tokens_are_those_of_plain_decoding(config: EngineConfig, heard: PatientDrafter) -> None:
    """Chunks, a nucleus, penalties, two choices of a prompt; sequences come and go."""
    expected, _ = answers(replace(config, draft=None), requests())
    found, sent, cluster = served(by_gpu(replace(config, speculation=CHAIN)), requests())
    assert tokens(found) == tokens(expected) and not cluster.reasons
    assert sum(heard.came) > 5 and max(heard.came) > 1
    assert sum(entry.accepted for result in found for entry in result.entries) > 0


def test_drafts_that_are_wrong_change_no_token(
    config: EngineConfig, heard: PatientDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = answers(replace(config, draft=None), asked(10))
    left = mail_rounds.answer

    def wrong(tables: SlotTables, *rest: Any) -> None:
        tables.drafts.copy_(torch.where(tables.drafts < 0, tables.drafts, (tables.drafts + 1) % 16))
        left(tables, *rest)

    monkeypatch.setattr(mail_rounds, "answer", wrong)
    found, _, _ = served(by_gpu(replace(config, speculation=CHAIN)), asked(10))
    assert tokens(found) == tokens(expected) and sum(heard.came) > 2
    assert sum(entry.accepted for entry in found[0].entries) <= 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_drafter_that_dies_in_a_round_leaves_a_plain_engine(
    config: EngineConfig, heard: PatientDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device has taken a round and leaves no drafts for it."""
    expected, _ = answers(replace(config, draft=None), asked(12))
    monkeypatch.setattr(mailbox, "fetch", Patient(wait_s=10.0))
    answer, calls = mail_rounds.answer, itertools.count(1)

    def dying(*rest: Any) -> None:
        if next(calls) == 3:
            raise SystemExit
        answer(*rest)

    monkeypatch.setattr(mail_rounds, "answer", dying)
    check_dying_drafter(config, monkeypatch, expected)
