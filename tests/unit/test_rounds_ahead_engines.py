"""Decode and draft engines whose devices share mailboxes, with no host at either end of a round: the drafts
are those that hosts hand over, and no token is another.

Kernels are interpreted, so a batch has run when it is launched: it is put off until there is a round.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.common.config import EngineConfig
from eyas.engine.batch.tables import SlotTables
from eyas.engine.ipc import lending
from eyas.engine.ipc.mailbox import MailLayout
from eyas.engine.ipc.row_ring import RowMemory, row_tag, tag
from eyas.engine.kernels.drafts.rounds import RoundBatch
from eyas.engine.kernels.exchange import mail_rounds, mailbox
from eyas.engine.kernels.exchange.mail_rounds import HeardRows, MailWait
from eyas.engine.loading import draft_build
from eyas.engine.loading.draft_channels import BY_GPU
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.speculation.drafters.channels import MAILBOX
from tests.unit.device_engines import answers, config, requests, tokens
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
from tests.unit.tiny_dflash import write_tiny_dflash

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow, pytest.mark.timeout(600)]

__all__ = ["config"]  # a fixture
COMES_S = 4.0


@dataclass
class PatientDrafter:
    """`hear`, once there is a round, or none has come for a while. `came`: how many came, each time."""

    came: list[int] = field(default_factory=list)
    _hear: Callable[..., None] = mail_rounds.hear

    def __call__(self, batch: RoundBatch, wait: MailWait, heard: HeardRows, *taken: Any) -> None:
        deadline = time.monotonic() + COMES_S
        while not int(wait.stop[0]) and time.monotonic() < deadline and not self._any(batch, wait.place):
            time.sleep(0.002)
        time.sleep(0.05)  # for the others of the same step
        self._hear(batch, wait, heard, *taken)
        self.came.append(int((heard.counts > 0).sum()))

    @staticmethod
    def _any(batch: RoundBatch, place: MailLayout) -> bool:
        for slot, generation, length in _mailed(batch):
            address = int(batch.tables.mailbox[slot]) + 8 * (length % place.rows)
            if _tag_at(address) == tag(generation, length) & 0xFFFFFFFF:
                return True
        return False


@dataclass
class PatientWatcher:
    """`watch`, likewise. `came`: of how many sequences rows came before their verdict, each time."""

    came: list[int] = field(default_factory=list)
    _watch: Callable[[RoundBatch, MailWait, HeardRows], None] = mail_rounds.watch

    def __call__(self, batch: RoundBatch, wait: MailWait, coming: HeardRows) -> None:
        deadline = time.monotonic() + COMES_S
        while not int(wait.stop[0]) and time.monotonic() < deadline and not self._any(batch, wait):
            time.sleep(0.002)
        time.sleep(0.05)
        self._watch(batch, wait, coming)
        self.came.append(int((coming.slots != batch.tables.padding_slot).sum()))

    @staticmethod
    def _any(batch: RoundBatch, wait: MailWait) -> bool:
        for slot, generation, length in _mailed(batch):
            address = int(batch.tables.ring[slot]) + length % wait.place.rows * wait.row_bytes
            if _tag_at(address) == row_tag(generation, length, length) & 0xFFFFFFFF:
                return True
        return False


def _mailed(batch: RoundBatch) -> Iterator[tuple[int, int, int]]:
    """Slot, generation and length of each sequence with a mailbox."""
    tables = batch.tables
    for slot in batch.slots.tolist():
        if slot != tables.padding_slot and int(tables.mailbox[slot]):
            yield slot, int(tables.ring_generation[slot]), int(tables.length[slot])


def _tag_at(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value >> 32


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> PatientWatcher:
    patient = PatientWatcher()
    monkeypatch.setattr(mail_rounds, "watch", patient)
    return patient


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


def test_a_block_is_drafted_behind_a_context_that_came_before_its_verdict(
    config: EngineConfig, heard: PatientDrafter, watched: PatientWatcher, tmp_path: Path
) -> None:
    """Its drafts are those of a host that knows which rows are certain."""
    head = write_tiny_dflash(tmp_path / "head", Path(config.model), layers=1, reads=(0, 2))
    chosen = replace(config, draft=str(head), speculation=CHAIN)
    expected, _, _ = served(replace(chosen, transfer="shm"), asked(14))
    found, sent, cluster = served(by_gpu(chosen), asked(14))
    assert tokens(found) == tokens(expected)
    assert set(sent) == {MAILBOX} and not cluster.reasons
    assert sum(watched.came) > 2 and sum(heard.came) > 2
    ours, plain = rounds(found, 14), rounds(expected, 14)
    both = ours.keys() & plain.keys()
    assert len(both) > 2 and {at: ours[at] for at in both} == {at: plain[at] for at in both}


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
