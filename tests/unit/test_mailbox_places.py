"""A line's mailbox, and a decode engine's sequences that have a place there: who has one, what its host still
sends and waits for, and what becomes of it at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from engine_rig import handle
from fake_gpu import FakeDriver
from test_draft_engine import SPEC, WIDTH, _sequences
from test_draft_line import line as plain_line
from test_draft_lines import PEER, WORKER
from test_ring_places import PLACES, RingPair

from eyas.common.config import SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.types import KvKind
from eyas.engine.batch.landed import Landed
from eyas.engine.batch.sequence import RingPlace, Sequence, Work
from eyas.engine.batch.tree import Drafts
from eyas.engine.ipc import draft_line
from eyas.engine.ipc.draft_line import Line, OfferedLine, answer
from eyas.engine.ipc.mailbox import PAGE, Mailbox, MailLayout
from eyas.engine.ipc.messages import DraftClosed, DraftCommit, DraftDown, DraftLine, Proposal
from eyas.engine.ipc.row_memory import Gpu, RowMemory
from eyas.engine.loop.patience import Patience
from eyas.engine.speculation.drafter import Commit
from eyas.engine.speculation.lines import GRPC, MAILBOX, SHM
from eyas.engine.speculation.mailing import mails
from kv_transfer.gpu.driver import DriverError

SHAPE = DraftLine({}, 77, 5, 4, WIDTH, 6, gpu=b"gpu-a", dtype="float32", places=3, kept=32)


# --- the memory -------------------------------------------------------------------------------------


class Deaf(FakeDriver):
    """Its GPU cannot use memory of the host."""

    def register(self, address: int, size: int) -> int:
        raise DriverError("cuMemHostRegister_v2: operation not supported (CUDA error 801)")


def both_ends(folder: Path, ours: FakeDriver, shape: DraftLine = SHAPE) -> tuple[Line, Line]:
    """The decode engine's end and the draft worker's."""
    offered = OfferedLine(folder / "line", shape, Gpu(ours, "float32", lambda: None))
    rows = RowMemory.new(shape, Gpu(FakeDriver(b"gpu-b"), "float32", lambda: None))
    theirs = answer(msgspec.structs.replace(shape, export=offered.export), WIDTH, str(folder), rows)
    here = offered.accept()
    assert here is not None
    return here, theirs


def test_both_ends_see_one_memory_that_the_gpu_may_use(tmp_path: Path) -> None:
    driver = FakeDriver()
    ours, theirs = both_ends(tmp_path, driver)
    ((address, size),) = driver.registered.items()
    place = ours.mailbox.place
    assert (ours.mailbox.address(0), ours.mailbox.address(2)) == (address, address + 16 * place.words)
    assert size == place.nbytes(3) and size % PAGE == 0 and not ours.mailbox.words.any()
    assert theirs.mailbox.propose(2, Proposal(1, 7, 9, (5, 6), (-1, 0)))
    assert np.array_equal(ours.mailbox.words, theirs.mailbox.words) and ours.mailbox.words[2].any()
    assert not ours.mailbox.words[:2].any()
    ours.post(DraftCommit(1, 2, 9, (3,), b"", 1, 1, 2, 0))
    theirs.post(Proposal(1, 2, 9, (3,), (-1,)))
    assert len(theirs.take()) == len(ours.take()) == 1, "the rings are beside it"
    ours.close()
    theirs.close()
    assert driver.registered == {} and driver.mappings == 0
    assert "memfd:eyas-drafts" not in Path("/proc/self/maps").read_text()


def test_a_gpu_that_cannot_use_the_hosts_memory_has_its_ring_alone(tmp_path: Path) -> None:
    ours, theirs = both_ends(tmp_path, Deaf())
    assert ours.mailbox is None and ours.rows is not None
    ours.close()
    theirs.close()


def test_a_line_without_a_ring_has_no_mailbox(tmp_path: Path) -> None:
    with plain_line(tmp_path) as (ours, theirs):
        assert ours.mailbox is None and theirs.mailbox is None


def test_a_mailbox_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = OfferedLine(tmp_path / "line", SHAPE)
    rings = draft_line._Parts.of(SHAPE, mailbox=False).nbytes
    monkeypatch.setattr(draft_line, "MOST_BYTES", rings)
    rows = RowMemory.new(SHAPE, Gpu(FakeDriver(b"gpu-b"), "float32", lambda: None))
    offer = msgspec.structs.replace(SHAPE, export=offered.export)
    with pytest.raises(ConfigError, match="GiB"):
        answer(offer, WIDTH, str(tmp_path), rows)
    rows.close()
    offered.close()
    assert os.listdir(tmp_path) == []


def test_places_do_not_share_cache_lines() -> None:
    for kept, nodes in ((8, 3), (32, 6), (128, 256)):
        place = MailLayout(kept, nodes)
        assert place.words % 16 == 0 and place.words >= kept + 1 + 2 * nodes
    box = Mailbox(memoryview(bytearray(PAGE)), MailLayout(8, 3), 2)
    assert box.words.shape == (2, 16)


# --- who has a place --------------------------------------------------------------------------------


def test_who_needs_the_host_in_every_round_has_none() -> None:
    def seq(grammar: object = None, predicted: tuple[int, ...] = ()) -> Sequence:
        request = SimpleNamespace(params=SimpleNamespace(grammar=grammar), predicted=predicted)
        return SimpleNamespace(generation=SimpleNamespace(request=request))  # type: ignore[return-value]

    spec = SpeculationConfig(steps=3, topk=1, draft_tokens=4)
    assert mails(seq(), spec)
    assert not mails(seq(grammar=object()), spec)
    assert not mails(seq(predicted=(1, 2)), spec)
    assert not mails(seq(), replace(spec, adaptive=True))
    assert not mails(seq(), replace(spec, ngram=True))


# --- the decode engine's host -----------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[RingPair]:
    both = RingPair(tmp_path, mails=True)
    both.connect()
    yield both
    both.offered.end(WORKER)
    both.answered.close()
    assert [gpu.mappings for gpu in both.gpus] == [0, 0] and both.gpus[0].registered == {}


def begun(pair: RingPair) -> tuple[Sequence, DraftCommit]:
    """A sequence whose first commit has been posted, and what the line says of it then."""
    (seq,) = _sequences(pair.drafter, 1)
    pair.commit(seq, 4)
    assert pair.by_front() == [4]
    (told,) = (commit for up in pair.answered.take() for commit in up.commits)
    return seq, told


def test_after_the_first_commit_the_line_says_where_the_next_rows_are(pair: RingPair) -> None:
    seq, told = begun(pair)
    assert seq.ring is not None and seq.mailed
    assert (told.base_len, told.tokens, told.features) == (5, (), b"")
    assert (told.place, told.generation) == (seq.ring.number, seq.ring.generation)
    assert (told.steps, told.topk, told.draft_tokens) == (SPEC.steps, SPEC.topk, SPEC.draft_tokens)
    box = pair.answered.mailbox(PEER)
    assert box is not None and box.places == PLACES


def test_what_the_device_has_posted_the_host_does_not(pair: RingPair) -> None:
    seq, _ = begun(pair)
    assert pair.landed(seq, 5, seq.ring.generation) == []
    pair.drafter.post([Commit(seq, 6, [9], torch.zeros(1, WIDTH), SPEC, seq.ring.generation, late=True)])
    assert pair.by_front() == [] and pair.by_line() == []
    assert pair.drafter.sent == {GRPC: 1, MAILBOX: 2} and pair.drafter.late_rounds == 1


def test_drafts_in_a_mailbox_say_that_the_prompts_draft_kv_was_pulled(pair: RingPair) -> None:
    """So nobody is told to let go of it when the sequence is dropped: that was done long ago."""
    for late, left in ((True, 1), (False, 0)):
        (seq,) = _sequences(pair.drafter, 1, id=str(late))
        pair.drafter.close(seq)
        pair.drafter.open(seq, 4, handle(9, group=KvKind.DRAFT))
        pair.commit(seq, 4)
        assert seq.ring is not None and seq.mailed
        ringed = seq.ring.generation
        pair.drafter.post([Commit(seq, 5, [9], torch.zeros(1, WIDTH), SPEC, ringed, late=late)])
        closed = DraftDown(closed=(DraftClosed(seq.uid, ringed, ""),), worker=WORKER)
        assert len(pair.drafter.deliver(closed)) == left
        pair.drafter._down_until.clear()


def test_a_round_that_was_launched_before_goes_by_the_line_with_its_features(pair: RingPair) -> None:
    seq, _ = begun(pair)
    (commit,) = pair.landed(seq, 5, 0)
    assert commit.place == -1 and len(commit.features) == 4 * WIDTH and commit.steps == SPEC.steps
    assert pair.drafter.sent == {GRPC: 1, SHM: 1}


def test_no_host_waits_for_its_drafts_nor_takes_them(pair: RingPair) -> None:
    seq, _ = begun(pair)
    pair.landed(seq, 5, 0)
    assert not pair.drafter.owed() and not pair.drafter.in_time()
    pair.propose(seq, 5)
    assert pair.drafter.take() == []


def test_beside_it_a_sequence_without_a_place_is_waited_for(pair: RingPair) -> None:
    _, _, third = _sequences(pair.drafter, 3)
    assert third.ring is None
    pair.commit(third, 4)
    assert pair.drafter.owed() and pair.drafter.in_time()
    assert pair.by_line() == []


def test_a_sequence_that_is_dropped_has_no_address_any_more(pair: RingPair) -> None:
    seq, _ = begun(pair)
    pair.drafter.deliver(DraftDown(closed=(DraftClosed(seq.uid, seq.ring.generation, ""),), worker=WORKER))
    assert not seq.mailed and not seq.drafting


def test_a_line_that_breaks_leaves_no_address(pair: RingPair) -> None:
    seq, _ = begun(pair)
    pair.answered.close()
    pair.hear()
    assert not seq.mailed and pair.gpus[0].registered == {}


def test_a_full_line_drops_a_sequence_that_it_cannot_tell_of(pair: RingPair) -> None:
    (seq,) = _sequences(pair.drafter, 1)
    while pair.offered.post(WORKER, DraftCommit(9, 9, 0, (), b"", 0, place=0)):
        pass
    pair.commit(seq, 4)
    assert not seq.drafting and not seq.mailed and pair.drafter.sent["dropped"] == 1
    (up,) = pair.drafter.outgoing()
    assert [close.seq for close in up.closes] == [seq.uid]


# --- how long the device waits ----------------------------------------------------------------------


def landed(*, offered: int, accepted: int = 0, mailed: bool = True) -> Landed:
    ring = RingPlace(0, 64, 1, 128 if mailed else 0)
    seq = SimpleNamespace(mailed=ring.mailbox != 0, occupancy=0)
    work = Work(seq, 5, [1], None, sample=True, round=True)  # type: ignore[arg-type]
    return Landed(work, (1,), drafts=Drafts(accepted, offered, offered))


def test_steps_that_waited_in_vain_do_not_lengthen_the_wait() -> None:
    patience = Patience()
    patience.stepped([landed(offered=0)], 0.010)
    assert patience.draft_wait_s == pytest.approx(0.010), "the first is better than nothing"
    for _ in range(50):
        patience.stepped([landed(offered=0), landed(offered=3, accepted=1)], 0.040)
    assert patience.draft_wait_s == pytest.approx(0.010)
    for _ in range(100):
        patience.stepped([landed(offered=0, mailed=False)], 0.004)
    assert patience.draft_wait_s < 0.005


def test_a_wait_that_was_too_short_for_any_proposal_grows_again() -> None:
    """Else a text that is hard to draft for would end all drafting by mailboxes."""
    patience = Patience()
    for _ in range(100):
        patience.stepped([landed(offered=3)], 0.010)
    assert patience.draft_wait_s < 0.0001
    for _ in range(300):
        patience.stepped([landed(offered=0)], 0.010)
    assert 0.005 < patience.draft_wait_s < 0.010
    for _ in range(100):
        patience.stepped([landed(offered=3, accepted=3)], 0.010)
    for _ in range(300):
        patience.stepped([landed(offered=0)], 0.010)
    assert patience.draft_wait_s == pytest.approx(0.020), "a good drafter is waited for as before"


def test_proposals_that_came_are_learnt_from_beside_others_that_did_not() -> None:
    patience = Patience()
    patience.stepped([landed(offered=3)], 0.010)
    for _ in range(100):
        patience.stepped([landed(offered=0), landed(offered=3)], 0.010)
    assert patience.draft_wait_s < 0.0001
