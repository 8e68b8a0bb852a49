"""Which way drafts go: by the front first, by the line once that is certain; what becomes of a bad line."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_draft_engine import SPEC, VOCAB, WIDTH, _sequences

from eyas.engine.batch.sequence import RingPlace, Sequence
from eyas.engine.ipc.messages import DraftClosed, DraftDown, DraftLine, Proposal
from eyas.engine.speculation.drafter import Commit
from eyas.engine.speculation.lines import GRPC, SHM, AnsweredLines, OfferedLines
from eyas.engine.speculation.remote import RemoteDrafter

WORKER, PEER = "w", 4
RECORDS = 3


class Pair:
    """A decode engine's drafter and a draft worker's lines; what goes by their fronts the test passes on."""

    def __init__(self, folder: Path, *, lines: bool = True, width: int = WIDTH) -> None:
        shape = DraftLine({}, 0, RECORDS, SPEC.deepest + 1, WIDTH, SPEC.draft_tokens)
        names = (folder / f"eyas-{i}" for i in itertools.count())
        self.offered = OfferedLines(shape if lines else None, lambda: next(names))
        self.answered = AnsweredLines(width, str(folder))
        self.drafter = RemoteDrafter(SPEC, VOCAB, self.offered)

    def connect(self) -> None:
        """The stream comes up, and whatever is to be said of a line."""
        self.drafter.deliver(DraftDown(worker=WORKER))
        for up in self.drafter.outgoing():
            if up.line is not None and (reason := self.answered.answer(PEER, up.line)):
                self.drafter.deliver(DraftDown(no_line=reason, worker=WORKER))
        self.hear()

    def hear(self) -> None:
        for down in self.drafter.arrived():
            self.drafter.deliver(down)

    def commit(self, seq: Sequence, base: int, *, want: bool = True) -> None:
        rows = torch.full((1, WIDTH), float(base))
        self.drafter.post([Commit(seq, base, [9], rows, SPEC if want else None)])

    def propose(self, seq: Sequence, base: int, *, by_front: bool = False) -> None:
        generation = self.drafter._followed[seq.uid].generation
        proposal = Proposal(seq.uid, generation, base, (1, 2), (-1, 0))
        left = {PEER: [proposal]} if by_front else self.answered.post({PEER: [proposal]})
        for some in left.values():
            self.drafter.deliver(DraftDown(tuple(some), worker=WORKER))
        self.hear()

    def by_front(self) -> list[int]:
        """The bases of the commits that went by the front since the last call."""
        return [c.base_len for up in self.drafter.outgoing() for c in up.commits]

    def by_line(self) -> list[int]:
        """The same, of the commits that went by the line."""
        return [c.base_len for up in self.answered.take() for c in up.commits]

    def direct(self) -> Sequence:
        """A sequence whose first commit was answered."""
        (seq,) = _sequences(self.drafter, 1)
        self.commit(seq, 4)
        self.propose(seq, 5)
        assert (self.by_front(), self.by_line()) == ([4], [])
        return seq


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    both = Pair(tmp_path)
    both.connect()
    yield both
    both.offered.end(WORKER)
    both.answered.close()


def test_the_first_commit_goes_by_the_front_and_the_next_ones_by_the_line(pair: Pair) -> None:
    seq = pair.direct()
    assert [(d.base, d.tree.tokens) for d in pair.drafter.take()] == [(5, [1, 2])]
    for base in (5, 6, 7, 8, 9):  # more than the ring has records
        pair.commit(seq, base)
        assert (pair.by_front(), pair.by_line()) == ([], [base])
        pair.propose(seq, base + 1)
        assert [draft.base for draft in pair.drafter.take()] == [base + 1]
    assert pair.drafter.sent == {GRPC: 1, SHM: 5}


def test_a_sequence_that_is_always_late_goes_by_the_line_too(pair: Pair) -> None:
    (seq,) = _sequences(pair.drafter, 1)
    pair.commit(seq, 4)
    pair.commit(seq, 5, want=False)
    pair.commit(seq, 6)
    assert (pair.by_front(), pair.by_line()) == ([4], [5, 6])
    pair.propose(seq, 5)
    pair.commit(seq, 7)
    assert (pair.by_front(), pair.by_line()) == ([], [7])


def test_a_line_that_comes_later_is_taken_at_once(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.drafter.deliver(DraftDown(worker=WORKER))
    (up,) = pair.drafter.outgoing()
    (seq,) = _sequences(pair.drafter, 1)
    for base in (4, 5):
        pair.commit(seq, base)
    assert up.line is not None and not pair.answered.answer(PEER, up.line)
    pair.hear()
    pair.commit(seq, 6)
    assert (pair.by_front(), pair.by_line()) == ([4, 5], [6])
    pair.drafter.leave()
    pair.answered.close()


def test_a_full_line_drops_the_sequence_and_it_opens_anew(pair: Pair) -> None:
    seq = pair.direct()
    for base in range(5, 5 + RECORDS):
        pair.commit(seq, base)
    assert seq.drafting and pair.drafter.owed()
    pair.commit(seq, 5 + RECORDS)
    assert not seq.drafting and not pair.drafter.owed() and pair.drafter.sent["dropped"] == 1
    assert [close.seq for up in pair.drafter.outgoing() for close in up.closes] == [seq.uid]
    assert not pair.drafter.open(seq, 8, None), "it may have caught up in a moment, not now"
    pair.drafter._down_until.clear()
    assert pair.drafter.open(seq, 8, None)
    pair.commit(seq, 8)
    assert pair.by_front() == [8] and pair.by_line() == [5, 6, 7], "a new sequence begins by the front"


def test_a_proposal_of_an_earlier_opening_is_dropped(pair: Pair) -> None:
    seq = pair.direct()
    stale = Proposal(seq.uid, pair.drafter._followed[seq.uid].generation, 6, (1,), (-1,))
    pair.drafter.take()
    pair.drafter.close(seq)
    assert pair.drafter.open(seq, 5, None)
    pair.answered.post({PEER: [stale]})
    pair.hear()
    assert pair.drafter.take() == []


def test_the_end_of_the_worker_ends_all_waiting_at_once(pair: Pair) -> None:
    seq = pair.direct()
    pair.commit(seq, 5)
    assert pair.drafter.owed() and pair.drafter.in_time()
    pair.answered.close()  # as the kernel does for a process that is killed
    pair.hear()
    assert not seq.drafting and not pair.drafter.owed() and not pair.drafter.in_time()
    assert not pair.drafter.open(seq, 6, None) and pair.drafter.bells == []
    pair.drafter.deliver(DraftDown(closed=(DraftClosed(0, 0, "the stream broke"),), worker=WORKER))
    pair.connect()
    assert pair.drafter.open(seq, 6, None) and pair.offered.has(WORKER)


def test_a_stream_that_breaks_takes_its_line_with_it(pair: Pair) -> None:
    seq = pair.direct()
    pair.drafter.deliver(DraftDown(closed=(DraftClosed(0, 0, "the stream broke"),), worker=WORKER))
    assert not seq.drafting and not pair.offered.has(WORKER)
    assert pair.answered.take() == [] and pair.answered.descriptors == []


def test_a_line_that_is_refused_is_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "eyas.engine"):
        pair = Pair(tmp_path, width=WIDTH + 1)
        pair.connect()
    assert sum("by gRPC" in line and "features" in line for line in caplog.messages) == 2, "on both sides"
    (seq,) = _sequences(pair.drafter, 1)
    pair.commit(seq, 4)
    pair.propose(seq, 5)
    pair.commit(seq, 5)
    assert pair.by_front() == [4, 5] and pair.drafter.sent == {GRPC: 2}
    assert list(tmp_path.iterdir()) == [] and pair.drafter.bells == []


def test_without_memory_to_share_no_line_is_offered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "eyas.engine"):
        pair = Pair(tmp_path, lines=False)
        pair.connect()
    assert "--transfer" in caplog.text and list(tmp_path.iterdir()) == []
    pair.drafter.open(_sequences(pair.drafter, 1)[0], 4, None)
    assert not pair.offered.has(WORKER)


def test_a_folder_that_takes_no_socket_costs_the_line_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "eyas.engine"):
        pair = Pair(tmp_path / "gone")
        pair.connect()
    assert "cannot be made" in caplog.text and not pair.offered.has(WORKER)
    assert pair.drafter.open(_sequences(pair.drafter, 1)[0], 4, None)


def test_no_ring_outlives_a_line_that_is_refused_late(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step would write to memory that is not mapped any more."""
    seq = pair.direct()
    given_back: list[RingPlace] = []
    monkeypatch.setattr(pair.offered, "give_back", lambda worker, place: given_back.append(place))
    place = seq.ring = pair.drafter._followed[seq.uid].place = RingPlace(1, 4096, 7)
    pair.drafter.deliver(DraftDown(no_line="too late", worker=WORKER))
    assert seq.ring is None and given_back == [place]
    pair.commit(seq, 5)
    assert pair.by_front() == [5]
    pair.drafter.close(seq)
    assert given_back == [place]
