"""Rounds that a device has posted, at a draft worker: what becomes a commit, what waits, what is closed."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from eyas.common.config import MOST_STEPS
from eyas.engine.ipc.messages import DraftClose, DraftProposal
from eyas.engine.ipc.row_ring import row_tag, tag
from eyas.engine.speculation.draft_worker import draft_engine
from tests.unit.draft_engine_drive import PEER, WIDTH, new_commit, new_sequence
from tests.unit.posted_rounds import KEPT, PLACES, MailDrive


def test_features_that_were_lent_are_fetched_or_close_their_sequence() -> None:
    drive = MailDrive()
    commit = new_commit(3, 10)
    lent = {7: commit.features}
    drive.engine._channels.fetch = lambda peer, number: lent.pop(number, b"")  # type: ignore[method-assign]
    for closed in (0, 1):
        found = drive.up(
            new_sequence(1, base=3, place=2), msgspec.structs.replace(commit, features=b"", lent=7)
        )[1]
        assert len(found) == closed
    assert len(drive.seen) == 1 and drive.seen[0].features.numpy().tobytes() == commit.features


def test_a_round_becomes_a_commit_and_its_drafts_are_left_there() -> None:
    drive = MailDrive()
    drive.follow()
    drive.post(2, 1, 4, 11, 12)
    assert not drive.hear()
    new = drive.seen[-1]
    assert new.tokens == [11, 12]
    assert new.ringed == [(drive.memory.address(2, p), row_tag(1, p, 4)) for p in (4, 5)]
    assert drive.left(2) == (tag(1, 6) & 0xFFFFFFFF, [12, 13])
    count = len(drive.seen)
    assert not drive.hear() and len(drive.seen) == count, "a round is heard once"


def test_the_first_rows_come_by_the_mailbox_if_their_open_says_what_they_ask_for() -> None:
    drive = MailDrive()
    for steps in (0, 2):
        drive.up(msgspec.structs.replace(new_sequence(1, base=3, place=2), steps=steps))
        drive.post(2, 1, 3, 10, 11, 12)
        assert not drive.hear()
        assert len(drive.seen) == (steps > 0)
    assert drive.seen[0].tokens == [10, 11, 12] and len(drive.seen[0].ringed) == 3
    assert drive.left(2) == (tag(1, 6) & 0xFFFFFFFF, [12, 13])
    drive.post(2, 1, 6, 13)
    assert not drive.hear() and drive.seen[-1].tokens == [13]


def test_a_sequence_that_ends_before_its_first_rows_leaves_nothing() -> None:
    drive = MailDrive()
    drive.up(msgspec.structs.replace(new_sequence(1, base=3, place=2), steps=2))
    assert not drive.up(DraftClose(1, 1))[1]
    drive.post(2, 1, 3, 10)
    assert not drive.hear() and not drive.seen
    assert not drive.engine._sequences.followed and drive.pool.used == 0


@pytest.mark.parametrize("steps", [-1, MOST_STEPS + 1])
def test_an_open_that_asks_for_impossible_chains_is_refused(steps: int) -> None:
    drive = MailDrive()
    (closed,) = drive.up(msgspec.structs.replace(new_sequence(1, base=3, place=2), steps=steps))[1]
    assert "steps" in closed.reason and not drive.engine._sequences.followed


def test_the_first_drafts_are_left_there_too() -> None:
    """The host does not ask for any."""
    drive = MailDrive()
    drive.follow(base=3)
    assert drive.left(2) == (tag(1, 4) & 0xFFFFFFFF, [10, 11])


def test_rounds_that_came_meanwhile_are_one_commit_around_the_rings_end() -> None:
    drive = MailDrive()
    drive.follow()
    for first, tokens in ((4, (1, 2)), (6, (3,)), (7, (4, 5, 6))):
        drive.post(2, 1, first, *tokens)
    assert not drive.hear()
    assert drive.seen[-1].tokens == [1, 2, 3, 4, 5, 6]
    drive.post(2, 1, 10, 7)
    assert not drive.hear() and drive.seen[-1].tokens == [7]


def test_a_round_that_is_not_all_there_waits() -> None:
    drive = MailDrive()
    drive.follow()
    drive.post(2, 1, 4, 1)
    drive.post(2, 1, 5, 2, newest=False)
    drive.hear()
    assert drive.seen[-1].tokens == [1]
    drive.post(2, 1, 7, 4)
    count = len(drive.seen)
    assert not drive.hear() and len(drive.seen) == count, "row 6 is missing, and so is the mark of row 5"
    drive.post(2, 1, 6, 3, newest=False)
    assert not drive.hear() and drive.seen[-1].tokens == [2, 3, 4]


def test_words_of_others_and_of_the_past_are_not_believed() -> None:
    drive = MailDrive()
    drive.post(2, 1, 4 - KEPT + KEPT * 2, 9)  # what a later lap would leave: taken back below
    drive.box.words[:] = 0
    drive.follow()
    count = len(drive.seen)
    for generation, position in ((2, 4), (9, 4), (1, 4 - KEPT)):
        drive.post(2, generation, position, 5)
        assert not drive.hear() and len(drive.seen) == count


def test_rows_that_a_later_lap_has_taken_close_the_sequence_and_not_its_neighbour() -> None:
    drive = MailDrive()
    drive.follow(1, place=0)
    drive.follow(2, place=1)
    drive.post(0, 1, 4 + KEPT, 5)
    drive.post(1, 2, 4, 6)
    closed = drive.hear()
    assert [(one.seq, "not in its mailbox" in one.reason) for one in closed] == [(1, True)]
    assert drive.seen[-1].tokens == [6] and drive.left(1)[0] == tag(2, 5) & 0xFFFFFFFF


@pytest.mark.parametrize("place", [PLACES, 2**31 - 1])
def test_a_place_that_does_not_exist_closes_the_sequence(place: int) -> None:
    drive = MailDrive()
    drive.follow(place=place)
    assert not drive.engine._sequences.followed and drive.pool.used == 0


def test_a_peer_without_a_mailbox_has_no_places() -> None:
    drive = MailDrive()
    drive.boxes.clear()
    drive.follow()
    assert not drive.engine._sequences.followed and drive.pool.used == 0


def test_a_token_that_is_none_closes_the_sequence() -> None:
    drive = MailDrive()
    drive.follow()
    drive.post(2, 1, 4, 2**30)
    assert len(drive.hear()) == 1 and drive.pool.used == 0


def test_a_round_by_the_front_comes_before_those_of_the_mailbox() -> None:
    """Its step had been launched before the sequence had a place."""
    drive = MailDrive()
    drive.follow()
    drive.post(2, 1, 6, 3)
    count = len(drive.seen)
    assert not drive.hear() and len(drive.seen) == count
    proposals, closed = drive.up(new_commit(4, 1, 2))
    assert not proposals and not closed
    assert [new.tokens for new in drive.seen[count:]] == [[1, 2], [3]]


def test_a_sequence_that_is_followed_no_more_is_not_looked_for() -> None:
    drive = MailDrive()
    drive.follow()
    drive.up(DraftClose(1, 1))
    drive.post(2, 1, 4, 5)
    assert not drive.hear() and not drive.engine._posted.any and drive.pool.used == 0


def test_rows_that_a_host_has_left_bring_their_features() -> None:
    drive = MailDrive(WIDTH)
    drive.follow()
    features = np.arange(2 * WIDTH, dtype=np.float32).reshape(2, WIDTH)
    drive.box.post(2, 1, 4, [11, 12], features)
    assert not drive.hear()
    new = drive.seen[-1]
    assert new.tokens == [11, 12] and not new.ringed
    assert np.array_equal(new.features.numpy(), features)
    assert drive.left(2) == (tag(1, 6) & 0xFFFFFFFF, [12, 13])


def test_features_that_are_being_overwritten_close_their_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = MailDrive(WIDTH)
    drive.follow()
    drive.box.post(2, 1, 4, [11], np.zeros((1, WIDTH), np.float32))
    monkeypatch.setattr(drive.box, "features", lambda *_: None)
    assert ["not in its mailbox" in one.reason for one in drive.hear()] == [True]
    assert not drive.engine._sequences.followed and drive.pool.used == 0


def test_what_hosts_leave_is_not_looked_for_again_and_again() -> None:
    """They wake this worker."""
    drive = MailDrive(WIDTH)
    drive.follow()
    drive.hear()
    assert not drive.engine._posted.any and not drive.engine._posted.busy and drive.engine._nap() == 0.1


def test_it_looks_often_while_rounds_come_and_seldom_later(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = MailDrive()
    assert drive.engine._nap() == 0.1
    drive.follow()
    assert drive.engine._nap() == 0.0 and drive.engine._posted.busy
    monkeypatch.setattr(draft_engine, "BUSY_S", 0.0)
    assert drive.engine._nap() == 0.001 and not drive.engine._posted.busy


def test_waiting_for_a_round_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_engine, "SPIN_S", 0.02)
    monkeypatch.setattr(draft_engine, "BUSY_S", 60.0)
    drive = MailDrive()
    drive.follow()
    began = time.monotonic()
    drive.engine._posted.pass_on()
    assert 0.02 <= time.monotonic() - began < 20.0
    drive.boxes.clear()
    assert not drive.engine._posted.answer((PEER, 1), drive.engine._sequences.followed[PEER, 1], _proposal())


def _proposal() -> DraftProposal:
    return DraftProposal(1, 1, 5, (1,), (-1,))
