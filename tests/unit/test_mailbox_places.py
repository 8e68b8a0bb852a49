"""A channel's mailboxes between two GPUs, and a decode engine's sequences that have one: who has, what its
host still sends and waits for, and what becomes of it at the end.
"""

from __future__ import annotations

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

from eyas.common.config import SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.types import KvKind
from eyas.engine.batch.sequence import RingPlace, Sequence, SequenceWork
from eyas.engine.batch.step_result import StepResult
from eyas.engine.batch.tree import DraftCounts
from eyas.engine.device.slot_table import BEGINNING, FIRST_ROUNDS, SlotOccupant, SlotTable
from eyas.engine.ipc import lending
from eyas.engine.ipc.draft_channel import MailChannel, OfferedChannel, answer
from eyas.engine.ipc.mailbox import PAGE
from eyas.engine.ipc.messages import DraftChannel, DraftClosed, DraftDown, DraftProposal
from eyas.engine.ipc.row_ring import LocalGpu, RowMemory
from eyas.engine.loop.drafting import DraftWait
from eyas.engine.speculation.drafters.base import AcceptedRows
from eyas.engine.speculation.drafters.channels import GRPC, MAILBOX, DecodeChannels, DraftChannels, mails
from eyas.engine.speculation.drafters.remote import RemoteDrafter
from kv_transfer.gpu.driver import DriverError
from tests.unit.draft_channel_pair import KEPT, PEER, PLACES, WORKER, Pair
from tests.unit.draft_engine_drive import SPEC, WIDTH, opened_sequences

SHAPE = DraftChannel({}, WIDTH, SPEC.draft_tokens, PLACES, KEPT, gpu=b"gpu-a", dtype="float32")


# --- the memory -------------------------------------------------------------------------------------


class Deaf(FakeDriver):
    """Its GPU cannot use memory of the host."""

    def register(self, address: int, size: int) -> int:
        raise DriverError("cuMemHostRegister_v2: operation not supported (CUDA error 801)")


def both_ends(folder: Path, ours: FakeDriver) -> tuple[MailChannel | None, MailChannel]:
    """The decode engine's end and the draft worker's."""
    offered = OfferedChannel(folder / "mail", SHAPE, LocalGpu(ours, "float32", lambda: None))
    rows = RowMemory.new(SHAPE, LocalGpu(FakeDriver(b"gpu-b"), "float32", lambda: None))
    theirs = answer(msgspec.structs.replace(SHAPE, export=offered.export), WIDTH, str(folder), rows)
    try:
        return offered.accept(), theirs
    except ConfigError:
        offered.close()
        theirs.close()
        raise


def mapped() -> int:
    """Mappings of channels in this process; other tests may have left some."""
    return Path("/proc/self/maps").read_text().count("memfd:eyas-drafts")


def test_both_ends_see_one_memory_that_the_gpu_may_use(tmp_path: Path) -> None:
    driver, before = FakeDriver(), mapped()
    ours, theirs = both_ends(tmp_path, driver)
    assert ours is not None
    ((address, size),) = driver.registered.items()
    place = ours.mailbox.place
    assert (ours.mailbox.address(0), ours.mailbox.address(1)) == (address, address + 8 * place.words)
    assert size == place.nbytes(PLACES) and size % PAGE == 0 and not ours.mailbox.words.any()
    assert place.width == 0, "features go from GPU to GPU"
    assert theirs.mailbox.propose(1, DraftProposal(1, 7, 9, (5, 6), (-1, 0)))
    assert np.array_equal(ours.mailbox.words, theirs.mailbox.words) and ours.mailbox.words[1].any()
    assert not ours.mailbox.words[:1].any()
    ours.close()
    theirs.close()
    assert driver.registered == {} and driver.mappings == 0
    assert mapped() <= before


def test_a_gpu_that_cannot_use_the_hosts_memory_has_no_channel(tmp_path: Path) -> None:
    driver, before = Deaf(), mapped()
    with pytest.raises(ConfigError, match="not supported"):
        both_ends(tmp_path, driver)
    assert driver.mappings == 0
    assert mapped() <= before


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
    assert not mails(seq(), replace(spec, topk=2, draft_tokens=8)), "trees go by the hosts"


# --- the decode engine's host -----------------------------------------------------------------------


class GpuPair(Pair):
    """Both have a GPU. `spec`: of the decode engine."""

    def __init__(self, folder: Path, spec: SpeculationConfig = SPEC) -> None:
        super().__init__(folder, shape=SHAPE)
        ours, theirs = (LocalGpu(FakeDriver(name), "float32", lambda: None) for name in (b"gpu-a", b"gpu-b"))
        self.offered = DecodeChannels(SHAPE, lambda: folder / "eyas-mail", ours)
        self.answered = DraftChannels(WIDTH, str(folder), theirs)
        self.drafter = RemoteDrafter(spec, 1000, self.offered)
        self.gpus = (ours.driver, theirs.driver)

    def landed(self, seq: Sequence, base: int, ringed: int, *, late: bool = False) -> list[int]:
        """The bases of what goes by the front of a round that was launched when `ringed` was the sequence's
        generation.
        """
        rows = torch.full((1, WIDTH), float(base))
        self.drafter.post([AcceptedRows(seq, base, [9], rows, SPEC, ringed, late)])
        return self.by_front()

    def begun(self) -> Sequence:
        """A sequence whose first commit has been posted."""
        (seq,) = opened_sequences(self.drafter, 1)
        self.commit(seq, 4)
        assert self.by_front() == [4]
        return seq


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[GpuPair]:
    both = GpuPair(tmp_path)
    both.connect()
    yield both
    both.offered.end(WORKER)
    both.answered.close()
    assert [gpu.mappings for gpu in both.gpus] == [0, 0] and both.gpus[0].registered == {}


def test_the_open_says_where_the_rows_after_the_first_commit_are(pair: GpuPair) -> None:
    seq = pair.begun()
    assert seq.mailed and seq.ring is not None
    assert pair.places[seq.uid] == seq.ring.number and pair.generation(seq) == seq.ring.generation
    rows, box = pair.answered.rows(PEER), pair.answered.mailbox(PEER)
    assert rows is not None and rows.ring.places == PLACES and box is not None and box.places == PLACES


def test_what_the_device_has_posted_the_host_does_not(pair: GpuPair) -> None:
    seq = pair.begun()
    assert pair.landed(seq, 5, seq.ring.generation) == []
    assert pair.landed(seq, 6, seq.ring.generation, late=True) == []
    assert pair.drafter.sent == {GRPC: 1, MAILBOX: 2} and pair.drafter.missed_rounds == 1
    box = pair.answered.mailbox(PEER)
    assert box is not None and not box.words.any()


def test_drafts_in_a_mailbox_say_that_the_prompts_draft_kv_was_pulled(pair: GpuPair) -> None:
    """So nobody is told to let go of it when the sequence is dropped: that was done long ago."""
    for late, left in ((True, 1), (False, 0)):
        (seq,) = opened_sequences(pair.drafter, 1, id=str(late))
        pair.drafter.close(seq)
        pair.drafter.open(seq, 4, handle(9, group=KvKind.DRAFT))
        pair.commit(seq, 4)
        assert seq.ring is not None and seq.mailed
        ringed = seq.ring.generation
        pair.landed(seq, 5, ringed, late=late)
        closed = DraftDown(closed=(DraftClosed(seq.uid, ringed, ""),), worker=WORKER)
        assert len(pair.drafter.deliver(closed)) == left
        pair.drafter._down_until.clear()


def test_a_sequence_is_begun_only_where_a_device_posts_its_rounds(pair: GpuPair) -> None:
    """Then its draft worker hears of it before its prompt has landed."""
    first, second, third = opened_sequences(pair.drafter, 3)
    for seq in (first, third):
        pair.drafter.close(seq)
    assert pair.drafter.begin(third, 2, replace(SPEC, steps=2)) and third.mailed
    pair.drafter.close(second)
    (opened,) = [one for up in pair.drafter.outgoing() for one in up.opens if one.seq == third.uid][-1:]
    assert opened.base_len == 2 and opened.place == third.ring.number
    assert opened.steps == 2, "its first rows come by the device too, so no commit says it"
    pair.drafter._spec = replace(SPEC, ngram=True)
    assert not pair.drafter.begin(first, 2, SPEC) and first.ring is None
    pair.drafter._spec = SPEC
    assert not pair.drafter.begin(first, 2, None), "its rounds are plain"
    taken = [pair.offered.take_place(WORKER, 90 + i, by_device=True) for i in range(PLACES - 1)]
    assert all(taken) and not pair.drafter.begin(first, 2, SPEC), "no place is left"


def test_large_features_are_lent_beside_their_commit(pair: GpuPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "LEAST_BYTES", 4 * WIDTH + 1)
    (seq,) = opened_sequences(pair.drafter, 1)
    rows = torch.arange(2.0 * WIDTH).view(2, WIDTH)
    pair.drafter.post([AcceptedRows(seq, 4, [9, 10], rows, SPEC), AcceptedRows(seq, 6, [11], rows[:1], SPEC)])
    ups = pair.drafter.outgoing()
    first, second = [commit for up in ups for commit in up.commits]
    assert (first.features, first.lent, second.lent) == (b"", 1, 0)
    assert second.features == rows[:1].numpy().tobytes()
    assert pair.answered.fetch(PEER, 1) == rows.numpy().tobytes()
    assert pair.answered.fetch(PEER, 1) == b"" == pair.answered.fetch(PEER + 1, 1)


def test_rounds_count_on_a_drafter_that_has_answered(pair: GpuPair) -> None:
    """Until then those wait that may have drafts by then, and no other."""
    seq = pair.begun()
    seen, occupant = [], SlotOccupant(0, 0, drafted=True)
    for base in range(5, 8 + FIRST_ROUNDS):
        assert pair.landed(seq, base, seq.ring.generation, late=True) == []
        seen.append(SlotTable._looks(seq, occupant, 64, 5))
        occupant.mailed_steps += 1
    assert seen == [1, *[5] * FIRST_ROUNDS, 64 // BEGINNING, 1] and not seq.answered
    pair.answered.mailbox(PEER).propose(
        seq.ring.number, DraftProposal(seq.uid, seq.ring.generation - 1, 6, (1,), (-1,))
    )
    pair.landed(seq, 10, seq.ring.generation, late=True)
    assert not seq.answered, "that was the sequence before it"
    pair.answered.mailbox(PEER).propose(
        seq.ring.number, DraftProposal(seq.uid, seq.ring.generation, 6, (1,), (-1,))
    )
    pair.landed(seq, 11, seq.ring.generation, late=True)
    assert seq.answered and SlotTable._looks(seq, occupant, 64, 5) == 64
    pair.drafter.close(seq)
    assert pair.drafter.open(seq, 4, None) and not seq.answered


@pytest.mark.parametrize(("others", "looks"), [(0, 64), (3, 64 // 4)])
def test_first_rounds_wait_the_less_the_more_others_wait_with_them(
    pair: GpuPair, others: int, looks: int
) -> None:
    seq = pair.begun()
    table = SlotTable(SimpleNamespace(), SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    seq.slot, seq.occupancy = 0, 4
    table._occupants[0] = SlotOccupant(4, seq.choice, drafted=True, mailed_steps=1)
    work = SequenceWork(seq, 5, [1], None, sample=True, round=True)
    alone = SequenceWork(Sequence(9, seq.generation, 0, (1,), []), 5, [1], None, sample=True, round=True)
    assert table._first_looks([work, *[alone] * others], 64) == looks
    table._occupants[0].mailed_steps = FIRST_ROUNDS + 1
    assert table._first_looks([work], 64) == 1


@pytest.mark.parametrize("ringed", [0, -1])
def test_a_round_that_was_launched_before_goes_by_the_front_with_its_features(
    pair: GpuPair, ringed: int
) -> None:
    """It wrote nothing, or under another generation."""
    seq = pair.begun()
    assert pair.landed(seq, 5, ringed) == [5]
    assert pair.drafter.sent == {GRPC: 2}


def test_no_host_waits_for_its_drafts_nor_takes_them(pair: GpuPair) -> None:
    seq = pair.begun()
    pair.landed(seq, 5, 0)
    assert not pair.drafter.owed() and not pair.drafter.in_time()
    pair.propose(seq, 5)
    pair.propose(seq, 6, by_front=True)
    assert pair.drafter.take() == []


def test_beside_it_a_sequence_without_a_place_is_waited_for(pair: GpuPair) -> None:
    first, second, third = opened_sequences(pair.drafter, 3)
    assert first.ring is not None and second.ring is not None and third.ring is None
    assert first.ring.number != second.ring.number
    pair.commit(third, 4)
    assert pair.drafter.owed() and pair.drafter.in_time()


def test_what_wants_its_host_goes_by_the_front(tmp_path: Path) -> None:
    pair = GpuPair(tmp_path, replace(SPEC, ngram=True))
    pair.connect()
    seq = pair.begun()
    assert not seq.mailed and pair.places[seq.uid] == -1
    assert pair.landed(seq, 5, 0) == [5]
    pair.drafter.leave()
    pair.answered.close()


def test_a_place_is_free_again_when_its_sequence_is_followed_no_more(pair: GpuPair) -> None:
    first, second, third = opened_sequences(pair.drafter, 3)
    assert first.ring is not None and second.ring is not None
    number = first.ring.number
    pair.drafter.close(first)
    assert first.ring is None
    assert pair.drafter.open(third, 4, None) and third.ring is not None and third.ring.number == number
    assert third.ring.generation > second.ring.generation


def test_a_sequence_that_is_dropped_has_no_address_any_more(pair: GpuPair) -> None:
    seq = pair.begun()
    pair.drafter.deliver(DraftDown(closed=(DraftClosed(seq.uid, seq.ring.generation, ""),), worker=WORKER))
    assert not seq.mailed and not seq.drafting


def test_a_channel_that_breaks_leaves_no_address(pair: GpuPair) -> None:
    first, second = opened_sequences(pair.drafter, 2)
    pair.answered.close()
    pair.hear()
    assert first.ring is None and second.ring is None and not first.drafting
    assert pair.gpus[0].mappings == 0 and pair.gpus[0].registered == {}


# --- how long the device waits ----------------------------------------------------------------------


def landed(*, offered: int, accepted: int = 0, mailed: bool = True) -> StepResult:
    ring = RingPlace(0, 64, 1, 128 if mailed else 0)
    seq = SimpleNamespace(mailed=ring.mailbox != 0, occupancy=0)
    work = SequenceWork(seq, 5, [1], None, sample=True, round=True)  # type: ignore[arg-type]
    return StepResult(work, (1,), drafts=DraftCounts(accepted, offered, offered))


def test_steps_that_waited_in_vain_do_not_lengthen_the_wait() -> None:
    patience = DraftWait()
    patience.record_step([landed(offered=0)], 0.010)
    assert patience.seconds == pytest.approx(0.010), "the first is better than nothing"
    for _ in range(50):
        patience.record_step([landed(offered=0), landed(offered=3, accepted=1)], 0.040)
    assert patience.seconds == pytest.approx(0.010)
    for _ in range(100):
        patience.record_step([landed(offered=0, mailed=False)], 0.004)
    assert patience.seconds < 0.005


def test_a_wait_that_was_too_short_for_any_proposal_grows_again() -> None:
    """Else a text that is hard to draft for would end all drafting by mailboxes."""
    patience = DraftWait()
    for _ in range(100):
        patience.record_step([landed(offered=3)], 0.010)
    assert patience.seconds < 0.0001
    for _ in range(300):
        patience.record_step([landed(offered=0)], 0.010)
    assert 0.005 < patience.seconds < 0.010
    for _ in range(100):
        patience.record_step([landed(offered=3, accepted=3)], 0.010)
    for _ in range(300):
        patience.record_step([landed(offered=0)], 0.010)
    assert patience.seconds == pytest.approx(0.020), "a good drafter is waited for as before"


def test_proposals_that_came_are_learnt_from_beside_others_that_did_not() -> None:
    patience = DraftWait()
    patience.record_step([landed(offered=3)], 0.010)
    for _ in range(100):
        patience.record_step([landed(offered=0), landed(offered=3)], 0.010)
    assert patience.seconds < 0.0001
