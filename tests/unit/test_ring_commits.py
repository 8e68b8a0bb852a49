"""Commits whose features are in a ring, at a draft worker: what it believes of a peer, and what it closes."""

from __future__ import annotations

import pytest
from fake_gpu import FakeDriver

from eyas.engine.ipc.messages import DraftChannel
from eyas.engine.ipc.row_ring import LocalGpu, RowMemory, row_tag
from eyas.engine.speculation.draft_worker.draft_runner import ProposedTree
from tests.unit.draft_engine_drive import PEER, WIDTH, Drive, new_commit, new_sequence

OFFER = DraftChannel({}, WIDTH, 6, 3, 8, gpu=b"gpu-a", dtype="float32")


class RingDrive(Drive):
    """Its peer has a ring. `seen`: the extensions that were drafted for."""

    def __init__(self, *, whole: bool = True) -> None:
        super().__init__()
        self.memory = RowMemory.new(OFFER, LocalGpu(FakeDriver(), "float32", lambda: None, shared=True))
        self.engine._channels.rows = {PEER: self.memory}.get  # type: ignore[method-assign]
        self.seen: list = []
        draft = self.runner.draft

        def seeing(asked, spec):
            self.seen += [one.extension for one in asked]
            return [ProposedTree(tree, whole) for tree, _ in draft(asked, spec)]

        self.runner.draft = seeing  # type: ignore[method-assign]


def test_features_are_found_by_place_generation_and_position() -> None:
    drive = RingDrive()
    drive.up(new_sequence(base=3), new_commit(3, 10))
    proposals, closed = drive.up(new_commit(4, 11, 12, features=b"", place=2))
    assert [p.base_len for p in proposals] == [6] and not closed
    new = drive.seen[-1]
    assert new.tokens == [11, 12] and not new.features.shape[0]
    assert new.ringed == [(drive.memory.address(2, p), row_tag(1, p, 4)) for p in (4, 5)]


def test_what_came_by_the_host_comes_first() -> None:
    """Both in one run: the rows of commits that waited."""
    drive = RingDrive()
    up = (new_commit(3, 10, 11, steps=0), new_commit(5, 12, 13, features=b"", place=0))
    proposals, _ = drive.up(new_sequence(base=3), *up)
    new = drive.seen[-1]
    assert new.tokens == [10, 11, 12, 13] and new.features.shape == (2, WIDTH) and len(new.ringed) == 2
    assert [p.base_len for p in proposals] == [7]


@pytest.mark.parametrize(
    ("commit", "reason"),
    [
        (new_commit(4, 1, features=b"", place=3), "no ring"),
        (new_commit(4, 1, features=b"", place=2**31 - 1), "no ring"),
        (new_commit(4, 1, place=1), "for each"),
        (new_commit(4, 1, features=b"", place=-1), "for each"),
    ],
    ids=["behind the last place", "far behind it", "features besides", "no place and no features"],
)
def test_a_place_that_makes_no_sense_ends_the_sequence(commit, reason: str) -> None:
    drive = RingDrive()
    drive.up(new_sequence(base=3), new_commit(3, 10))
    proposals, closed = drive.up(commit)
    assert not proposals and [reason in one.reason for one in closed] == [True]
    assert not drive.up(new_commit(5, 12))[0] and drive.pool.used == 0


def test_a_peer_without_a_ring_has_no_places() -> None:
    drive = Drive()
    drive.up(new_sequence(base=3), new_commit(3, 10))
    proposals, closed = drive.up(new_commit(4, 11, features=b"", place=0))
    assert not proposals and "no ring" in closed[0].reason and drive.pool.used == 0


def test_features_do_not_come_by_the_host_after_some_that_did_not() -> None:
    drive = RingDrive()
    drive.up(new_sequence(base=3), new_commit(3, 10))
    waiting = new_commit(4, 11, features=b"", place=0, steps=0)
    proposals, closed = drive.up(waiting, new_commit(5, 12))
    assert not proposals and "by the host" in closed[0].reason and drive.pool.used == 0


def test_a_sequence_whose_features_were_overwritten_is_closed_and_its_neighbour_not() -> None:
    drive = RingDrive(whole=False)
    proposals, closed = drive.up(new_sequence(base=3), new_commit(3, 10))
    assert not proposals and "not in its ring" in closed[0].reason and drive.pool.used == 0
