"""Rounds that a draft worker's device takes by itself, at its host: when they are launched, and what comes of
them. The device is a few lines of Python.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest
from engine_rig import PAGE, VOCAB
from fake_gpu import FakeDriver

from eyas.engine.ipc.mailbox import DraftMailbox, MailLayout
from eyas.engine.ipc.messages import DraftClose, DraftPeerGone
from eyas.engine.ipc.row_ring import LocalGpu
from eyas.engine.kernels.exchange.mail_rounds import WRONG
from eyas.engine.speculation.draft_worker import draft_engine
from eyas.engine.speculation.draft_worker.draft_sequences import LOST_FEATURES, NO_SENSE
from eyas.engine.speculation.draft_worker.mailed_rounds import MailedSequence
from tests.unit.draft_engine_drive import PEER, new_commit, new_sequence
from tests.unit.posted_rounds import KEPT, OFFER, PLACES, MailDrive

FEW = 3


class PlainDevice:
    """`MailedRounds`, for a drive: what is in the mailboxes when a batch lands has come. `posts`: what is
    posted while each batch waits. `launched`: the sequences of each.
    """

    few, most = FEW, 4

    def __init__(self, drive: AheadDrive) -> None:
        self.wait = SimpleNamespace(place=drive.box.place, row_bytes=drive.memory.ring.row_bytes)
        self.posts: list[Callable[[], None]] = []
        self.launched: list[list[MailedSequence]] = []
        self.lost: set[int] = set()
        self.stopped = 0
        self._drive = drive
        self._flight: list[MailedSequence] = []

    def seated(self, owner: object) -> bool:
        return True

    def launch(self, sequences: list[MailedSequence]) -> None:
        assert not self._flight, "one batch at a time"
        self._flight = sequences
        self.launched.append(sequences)
        if self.posts:
            self.posts.pop(0)()

    def stop(self) -> None:
        self.stopped += 1

    def land(self, *, waiting: bool) -> list[tuple[int, bool]] | None:
        flight, self._flight = self._flight, []
        return [(self._count(one), one.place.number in self.lost) for one in flight]

    def _count(self, one: MailedSequence) -> int:
        rows = self._drive.rows_of(one)
        tokens = self._drive.box.rounds(one.place.number, one.place.generation, one.offset + rows) or ()
        return WRONG if any(token >= VOCAB for token in tokens) else len(tokens)


class AheadDrive(MailDrive):
    """A drive whose device takes rounds by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.memory._writer = b"another"
        gpu = LocalGpu(FakeDriver(), "float32", lambda: None)
        place = MailLayout(KEPT, OFFER.nodes)
        self.box = DraftMailbox(memoryview(mmap.mmap(-1, place.nbytes(PLACES))), place, PLACES, gpu)
        self.boxes[PEER] = self.box
        self.engine._channels.mailbox = self.boxes.get  # type: ignore[method-assign]
        self.device = PlainDevice(self)
        self.engine._ahead._rounds = self.device

    def rows_of(self, one: MailedSequence) -> int:
        (found,) = [f for f in self.followed if f.open.generation == one.place.generation]
        return found.rows

    @property
    def followed(self) -> list:
        return list(self.engine._sequences.followed.values())


@pytest.fixture
def drive() -> AheadDrive:
    return AheadDrive()


def test_a_batch_is_launched_before_its_round_and_counted_after_it(drive: AheadDrive) -> None:
    """With pages for the round and for what is drafted below it, and no pass of the host's runner."""
    drive.device.posts = [lambda: drive.post(2, 1, 4, 11, 12)]
    drive.follow()
    (one,) = drive.device.launched[0]
    assert one.place[1:] == (drive.memory.address(2), 1, drive.box.address(2))
    assert len(drive.seen) == 1 and drive.seen[0].tokens == [10], "the first commit's is"
    assert [f.first + f.rows for f in drive.followed] == [6]
    assert all(len(batch) == 1 for batch in drive.device.launched) and len(drive.device.launched) > 1
    assert len(drive.followed[0].pages) * PAGE >= 3 + FEW + 2


def test_rounds_that_come_while_none_waits_are_taken_by_the_next_batch(drive: AheadDrive) -> None:
    drive.follow()
    drive.post(2, 1, 4, 11)
    drive.tell()
    assert drive.followed[0].first + drive.followed[0].rows == 5 and len(drive.seen) <= 2


def test_commands_change_sequences_between_batches_only(drive: AheadDrive) -> None:
    drive.follow()
    before = drive.device.stopped
    drive.follow(seq=2, place=1)
    assert drive.device.stopped > before
    assert {one.place.number for one in drive.device.launched[-1]} == {1, 2}
    drive.up(DraftClose(1, 1))
    assert [one.place.number for one in drive.device.launched[-1]] == [1]
    drive.tell(DraftPeerGone(PEER))
    assert drive.pool.used == 0 and not drive.engine._ahead.flying


def test_a_batch_waits_for_those_with_rows_and_gives_way_to_first_ones(drive: AheadDrive) -> None:
    """They need a pass of the host's runner, for which the device has to be free."""
    drive.follow()
    drive.up(msgspec.structs.replace(new_sequence(2, base=3, place=1), steps=2))
    assert [one.place.number for one in drive.device.launched[-1]] == [2]
    before, passes = drive.device.stopped, len(drive.seen)
    drive.post(1, 2, 3, 12, 13)
    drive.hear()
    assert (
        drive.device.stopped > before and len(drive.seen) == passes + 1 and drive.seen[-1].tokens == [12, 13]
    )
    assert {one.place.number for one in drive.device.launched[-1]} == {1, 2}


def test_where_most_begin_all_are_drafted_for_together(
    drive: AheadDrive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No batch is launched for the others, and rounds wait for the ends of prompts that come behind them."""
    monkeypatch.setattr(draft_engine, "SPIN_S", 0.5)
    monkeypatch.setattr(draft_engine, "BUSY_S", 60.0)
    drive.follow(steps=2, draft_tokens=3)
    before = len(drive.device.launched)
    opens = [msgspec.structs.replace(new_sequence(seq, base=3, place=seq - 2), steps=2) for seq in (2, 3)]
    drive.up(*opens)
    assert len(drive.device.launched) == before and not drive.engine._ahead.flying
    posted, look, passes = drive.engine._posted, drive.engine._posted._look, list[int]()

    def looking() -> int:
        came = look()
        if came:  # behind the round
            for seq in (2, 3):
                drive.post(seq - 2, seq, 3, 12, 13)
        return came

    draft = drive.runner.draft
    monkeypatch.setattr(posted, "_look", looking)
    monkeypatch.setattr(
        drive.runner, "draft", lambda asked, spec: passes.append(len(asked)) or draft(asked, spec)
    )
    drive.post(2, 1, 4, 11)
    drive.hear()
    assert passes == [3]
    assert {one.place.number for one in drive.device.launched[-1]} == {0, 1, 2}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda drive: drive.device.lost.add(2), LOST_FEATURES),
        (lambda drive: drive.device.posts.append(lambda: drive.post(2, 1, 4, VOCAB)), NO_SENSE),
        (
            lambda drive: drive.device.posts.append(lambda: drive.post(2, 1, 4 + KEPT, 5)),
            "not in its mailbox",
        ),
    ],
    ids=["a lost feature", "a token that is none", "a lap too far"],
)
def test_what_cannot_be_drafted_for_is_closed(
    drive: AheadDrive, spoil: Callable[[AheadDrive], None], reason: str
) -> None:
    spoil(drive)
    drive.device.posts.append(lambda: None)
    closed = drive.up(new_sequence(1, base=3, place=2), new_commit(3, 10, seq=1))[1]
    closed += drive.hear()
    assert len(closed) == 1 and reason in closed[0].reason
    assert not drive.followed and drive.pool.used == 0


def test_what_the_device_cannot_take_goes_by_the_host(drive: AheadDrive) -> None:
    """Here a sequence without a mailbox beside it, then a mailbox of another layout."""
    drive.up(new_sequence(7, base=3), new_commit(3, 10, seq=7))
    drive.follow()
    assert not drive.device.launched
    drive.post(2, 1, 4, 11)
    drive.hear()
    assert drive.seen[-1].tokens == [11]
    drive.up(DraftClose(7, 7))
    assert drive.device.launched
    drive.device.wait.place = MailLayout(2 * KEPT, OFFER.nodes)
    drive.device.launched.clear()
    drive.post(2, 1, 5, 12)
    drive.hear()
    assert not drive.device.launched and drive.seen[-1].tokens == [12]
    drive.device.wait.place = drive.box.place
    drive.memory._writer = b"gpu-a"  # its own GPU, which a batch that waits would take from its peer
    drive.post(2, 1, 6, 13)
    drive.hear()
    assert not drive.device.launched and drive.seen[-1].tokens == [13]


def test_no_batch_goes_beyond_the_context_or_the_pages(drive: AheadDrive) -> None:
    drive.follow(base=64 - FEW - 1)
    assert drive.followed and not drive.device.launched
    drive.pool.take(drive.pool.free)
    drive.engine._sequences.followed.clear()
    drive.follow(seq=2)
    assert not drive.device.launched
