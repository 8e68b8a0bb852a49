"""Which way drafts go: by the front first, then by mailboxes; what becomes of a channel that is none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from eyas.engine.ipc.messages import DraftClosed, DraftDown, DraftProposal
from eyas.engine.ipc.row_ring import WAITING_ROWS
from eyas.engine.speculation.drafters.channels import GRPC, SHM
from tests.unit.draft_channel_pair import KEPT, PEER, SHAPE, WORKER, Pair
from tests.unit.draft_engine_drive import WIDTH, opened_sequences


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    both = Pair(tmp_path)
    both.connect()
    yield both
    both.offered.end(WORKER)
    both.answered.close()


def test_the_first_commit_goes_by_the_front_and_the_next_ones_into_the_mailbox(pair: Pair) -> None:
    seq = pair.direct()
    assert [(d.base, d.tree.tokens) for d in pair.drafter.take()] == [(5, [1, 2])]
    assert pair.places[seq.uid] >= 0
    for base in range(5, 5 + 2 * KEPT):
        pair.commit(seq, base)
        assert pair.by_front() == [] and pair.is_posted(seq, base)
        pair.propose(seq, base + 1)
        assert [draft.base for draft in pair.drafter.take()] == [base + 1]
    assert pair.drafter.sent == {GRPC: 1, SHM: 2 * KEPT} and pair.drafter.missed_rounds == 0
    assert seq.ring is None and not seq.mailed, "no device writes there"


def test_whether_drafts_are_wanted_is_said_by_the_front_and_holds_for_the_mailbox(pair: Pair) -> None:
    (seq,) = opened_sequences(pair.drafter, 1)
    pair.commit(seq, 4, None)
    assert pair.by_front() == [4] and not pair.drafter.owed()
    pair.commit(seq, 5)
    assert pair.by_front() == [5] and pair.drafter.owed()
    pair.propose(seq, 6)
    pair.commit(seq, 6)
    assert pair.by_front() == [] and pair.is_posted(seq, 6)
    pair.propose(seq, 7)
    pair.commit(seq, 7, None)
    assert pair.by_front() == [] and not pair.is_posted(seq, 7), "it waits"
    for base in range(8, 7 + WAITING_ROWS):
        pair.commit(seq, base, None)
    assert pair.by_front() == [7], "all of them, and that nothing is wanted"


def test_a_proposal_is_taken_once_and_a_late_one_where_it_belongs(pair: Pair) -> None:
    seq = pair.direct()
    pair.drafter.take()
    pair.commit(seq, 5)
    pair.commit(seq, 6)
    assert pair.drafter.missed_rounds == 1 and pair.drafter.owed()
    pair.propose(seq, 6)
    assert [draft.base for draft in pair.drafter.take()] == [6] and pair.drafter.owed()
    pair.hear()
    assert pair.drafter.take() == []
    pair.propose(seq, 7)
    assert [draft.base for draft in pair.drafter.take()] == [7] and not pair.drafter.owed()


def test_a_channel_that_comes_later_is_for_sequences_that_open_then(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.drafter.deliver(DraftDown(worker=WORKER))
    (up,) = pair.drafter.outgoing()
    first, second = opened_sequences(pair.drafter, 2)
    pair.drafter.close(second)
    for base in (4, 5):
        pair.commit(first, base)
    assert up.channel is not None and not pair.answered.answer(PEER, up.channel)
    pair.hear()
    pair.commit(first, 6)
    assert pair.drafter.open(second, 4, None)
    for base in (4, 5):
        pair.commit(second, base)
    assert pair.by_front() == [4, 5, 6, 4] and pair.is_posted(second, 5)
    pair.drafter.leave()
    pair.answered.close()


def test_without_a_free_place_rows_go_by_the_front(pair: Pair) -> None:
    first, second, third = opened_sequences(pair.drafter, 3)
    for base in (4, 5):
        pair.commit(third, base)
    assert pair.by_front() == [4, 5] and pair.places[third.uid] == -1
    number = pair.places[first.uid]
    assert {number, pair.places[second.uid]} == {0, 1}
    pair.drafter.close(first)
    pair.drafter.close(third)
    assert pair.drafter.open(third, 4, None)
    pair.by_front()
    assert pair.places[third.uid] == number


def test_a_sequence_in_anothers_place_gets_no_drafts_of_that_one(pair: Pair) -> None:
    seq = pair.direct()
    pair.drafter.take()
    pair.commit(seq, 5)
    generation, place = pair.generation(seq), pair.places[seq.uid]
    pair.drafter.close(seq)
    (other,) = opened_sequences(pair.drafter, 1, id="other")
    pair.commit(other, 4)
    pair.by_front()
    assert pair.places[other.uid] == place
    box = pair.answered.mailbox(PEER)
    assert box is not None and box.propose(place, DraftProposal(seq.uid, generation, 6, (1,), (-1,)))
    pair.hear()
    assert pair.drafter.take() == []


def test_a_channel_that_breaks_drops_its_sequences_and_a_new_stream_brings_a_new_one(pair: Pair) -> None:
    seq = pair.direct()
    pair.commit(seq, 5)
    assert pair.drafter.owed() and pair.drafter.in_time()
    pair.answered.close()  # as the kernel does for a process that is killed
    pair.hear()
    assert not seq.drafting and not pair.drafter.owed() and not pair.drafter.in_time()
    assert not pair.drafter.open(seq, 6, None) and pair.drafter.bells == []
    pair.drafter.deliver(DraftDown(closed=(DraftClosed(0, 0, "the stream broke"),), worker=WORKER))
    pair.connect()
    assert pair.drafter.open(seq, 6, None) and pair.offered.mailbox(WORKER) is not None


def test_a_stream_that_breaks_takes_its_channel_with_it(pair: Pair) -> None:
    seq = pair.direct()
    pair.drafter.deliver(DraftDown(closed=(DraftClosed(0, 0, "the stream broke"),), worker=WORKER))
    assert not seq.drafting and pair.offered.mailbox(WORKER) is None
    pair.answered.listen()
    assert pair.answered.descriptors == []


def test_a_channel_that_is_refused_late_stays(pair: Pair) -> None:
    """Its worker has taken it: a step may write there already."""
    seq = pair.direct()
    pair.drafter.deliver(DraftDown(no_channel="too late", worker=WORKER))
    pair.commit(seq, 5)
    assert pair.by_front() == [] and pair.is_posted(seq, 5)


def test_a_channel_that_is_refused_is_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "eyas.engine"):
        pair = Pair(tmp_path, width=WIDTH + 1)
        pair.connect()
    assert sum("by gRPC" in line and "features" in line for line in caplog.messages) == 2, "on both sides"
    (seq,) = opened_sequences(pair.drafter, 1)
    pair.commit(seq, 4)
    pair.propose(seq, 5)
    pair.commit(seq, 5)
    assert pair.by_front() == [4, 5] and pair.drafter.sent == {GRPC: 2}
    assert list(tmp_path.iterdir()) == [] and pair.drafter.bells == []


def test_without_memory_to_share_no_channel_is_offered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "eyas.engine"):
        pair = Pair(tmp_path, shape=None)
        pair.connect()
    assert "--transfer" in caplog.text and list(tmp_path.iterdir()) == []
    pair.drafter.open(opened_sequences(pair.drafter, 1)[0], 4, None)
    assert pair.offered.mailbox(WORKER) is None


def test_a_folder_that_takes_no_socket_costs_the_channel_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "eyas.engine"):
        pair = Pair(tmp_path / "gone")
        pair.connect()
    assert "cannot be made" in caplog.text and pair.offered.mailbox(WORKER) is None
    assert pair.drafter.open(opened_sequences(pair.drafter, 1)[0], 4, None)


def test_a_gpu_that_is_not_offered_is_not_asked_for(tmp_path: Path) -> None:
    """A draft worker without a GPU takes features of one from its host."""
    pair = Pair(tmp_path, shape=msgspec.structs.replace(SHAPE, gpu=b"gpu-a", dtype="float32"))
    pair.connect()
    seq = pair.direct()
    pair.commit(seq, 5)
    assert pair.is_posted(seq, 5)
    pair.drafter.leave()
    pair.answered.close()
