"""Copies out of a peer's staging: each window is confirmed; one result, and none too early."""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from dataclasses import dataclass, field

import pytest

from eyas.common.errors import TransferFailed
from eyas.common.types import RankPages
from eyas.engine.ipc.messages import CopyStaged, CopyStopped
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.kv.front_wire import FrontWire
from kv_transfer.backends.base import CopyJob, PeerSource
from kv_transfer.backends.staged_reads import StagedCopies
from kv_transfer.copy_threads import CopyDone

WINDOW, PAGE = 3, 1024
BROKEN = TransferFailed("broken")


@dataclass
class Peer:
    """The wire, the owner and the READs, moved by the test. Pages are numbers; `pool[n]` is n.

    `slots`: what the owner's staging holds; -1 once it is somebody else's. `here`: what has come.
    """

    slots: dict[int, int] = field(default_factory=dict)
    here: dict[int, int] = field(default_factory=dict)
    asked: list[CopyJob] = field(default_factory=list)
    reading: list[CopyJob] = field(default_factory=list)
    confirmed: set[tuple[int, int]] = field(default_factory=set)
    stopping: set[tuple[int, int]] = field(default_factory=set)
    holding: dict[tuple[int, int], tuple[CopyJob, tuple[int, ...]]] = field(default_factory=dict)
    told: list[tuple[CopyJob, tuple[int, ...]]] = field(default_factory=list)
    gone: list[CopyDone[CopyJob]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.copies = StagedCopies(self, lambda source, job: self.reading.append(job), lambda job: None)  # type: ignore[arg-type]

    def stage(self, job: CopyJob) -> None:
        assert len(job.source.pages) <= WINDOW and job.name not in self.holding
        self.asked.append(job)

    def read(self, job: CopyJob) -> None:
        self.confirmed.add(job.name)

    def stop(self, job: CopyJob) -> None:
        self.stopping.add(job.name)

    def staged(self, mine: Container[tuple[int, int]]) -> list[tuple[CopyJob, tuple[int, ...]]]:
        told, self.told = self.told, []
        return [one for one in told if one[0].name in mine]

    def let_go(self, mine: Container[tuple[int, int]]) -> list[CopyDone[CopyJob]]:
        gone, self.gone = self.gone, []
        return [done for done in gone if done.job.name in mine]

    # --- what the test does ---

    def hold(self, job: CopyJob, count: int | None = None) -> None:
        """The owner fills slots."""
        self.asked.remove(job)
        free = (slot for slot in range(1000) if slot not in self.slots)
        slots = tuple(next(free) for _ in job.source.pages)
        self.slots.update(zip(slots, job.source.pages, strict=True))
        self.holding[job.name] = job, slots
        self.told.append((job, slots[:count]))

    def take_back(self, name: tuple[int, int], error: TransferFailed | None) -> None:
        """The owner lets go of slots, and others fill them at once."""
        job, slots = self.holding.pop(name)
        self.slots.update(dict.fromkeys(slots, -1))
        self.confirmed.discard(name)
        self.stopping.discard(name)
        self.gone.append(CopyDone(job, 0, 0.0, error))

    def land(self, job: CopyJob, error: TransferFailed | None = None) -> None:
        """A READ stops: it brings what is in the slots now."""
        self.reading.remove(job)
        for slot, page in zip(job.source.pages, job.dst_pages, strict=True):
            self.here[page] = self.slots[slot]
        self.copies.stopped(CopyDone(job, 0 if error else len(job.dst_pages) * PAGE, 0.1, error))


def job(pages: range, number: int = 1) -> CopyJob:
    return CopyJob(1, number, RankPages(0, tuple(pages)), tuple(100 + page for page in pages))


def test_a_window_counts_when_its_slots_were_held_until_it_was_read() -> None:
    peer = Peer()
    peer.copies.start(PeerSource(), job(range(3)))
    peer.hold(peer.asked[0])
    assert peer.copies.poll() == [] and not peer.confirmed
    peer.land(peer.reading[0])
    assert peer.confirmed == {(1, 1)} and peer.copies.poll() == []
    peer.take_back((1, 1), None)
    (over,) = peer.copies.poll()
    assert (over.job.source.pages, over.bytes, over.error) == ((0, 1, 2), 3 * PAGE, None)
    assert over.seconds == 0.1 and peer.here == {100 + page: page for page in range(3)}


def test_windows_of_two_ways_are_told_to_their_own() -> None:
    """Backends of one pool share its wire."""
    wire = FrontWire(EventOutbox())
    reading: list[tuple[str, CopyJob]] = []
    ways = {name: StagedCopies(wire, *_noted(name, reading)) for name in ("one", "other")}
    for number, copies in enumerate(ways.values()):
        copies.start(PeerSource(), job(range(2), number))
    for number in (0, 1):
        wire.receive(CopyStaged(1, number, (4, 5)))
    assert ways["other"].poll() == [] and ways["one"].poll() == []
    assert [(name, read.number) for name, read in reading] == [("other", 1), ("one", 0)]
    for name, read in reading:
        assert ways[name].stopped(CopyDone(read, PAGE, 0.1, None))
    for number in (0, 1):
        wire.receive(CopyStopped(1, number, 0, 0.0))
    assert [[done.job.number for done in copies.poll()] for copies in ways.values()] == [[0], [1]]


def _noted(
    name: str, reading: list[tuple[str, CopyJob]]
) -> tuple[Callable[[PeerSource, CopyJob], None], Callable[[CopyJob], None]]:
    return lambda source, job: reading.append((name, job)), lambda job: None


@pytest.mark.parametrize("others", [range(2), range(0)])
def test_too_few_slots_are_no_answer(others: range) -> None:
    peer = Peer()
    peer.copies.start(PeerSource(), job(range(3)))
    peer.hold(peer.asked[0], count=len(others))
    assert peer.copies.poll() == [] and peer.reading == [] and peer.stopping == {(1, 1)}
    peer.take_back((1, 1), BROKEN)
    (over,) = peer.copies.poll()
    assert "staged" in over.error.message and over.bytes == 0


def test_slots_that_are_let_go_while_they_are_read_are_told_of_when_the_read_has_stopped() -> None:
    for error in (BROKEN, None):
        peer = Peer()
        peer.copies.start(PeerSource(), job(range(3)))
        peer.hold(peer.asked[0])
        peer.copies.poll()
        peer.take_back((1, 1), error)
        assert peer.copies.poll() == [], "a READ still writes to the pages"
        peer.land(peer.reading[0])
        (over,) = peer.copies.poll()
        assert over.error is not None and peer.here[100] == -1


def test_a_read_that_is_not_needed_is_stopped_as_it_was_begun() -> None:
    peer, stopping = Peer(), []
    peer.copies = StagedCopies(peer, lambda source, job: peer.reading.append(job), stopping.append)
    for number in (1, 2):
        peer.copies.start(PeerSource(), job(range(3), number))
    peer.hold(peer.asked[0])
    peer.copies.poll()
    assert peer.copies.cancel(job(range(3), 1)) and peer.copies.cancel(job(range(3), 2))
    assert stopping == peer.reading, "the READ of other pages than its slots, or one that never began"
    assert not peer.copies.cancel(job(range(3), 3))


def test_whatever_happens_every_job_ends_once_and_what_counts_is_right() -> None:
    """Many jobs, and an owner, READs and callers that do anything at any moment."""
    ends = {True: 0, False: 0}
    for seed in range(300):
        pick, peer = random.Random(seed), Peer()
        jobs = {n: job(range(9 * n, 9 * n + pick.randrange(1, WINDOW + 1)), n) for n in range(6)}
        for made in jobs.values():
            peer.copies.start(PeerSource(), made)
        over = _play(pick, peer, list(jobs.values()))
        assert sorted(done.job.name for done in over) == sorted(made.name for made in jobs.values())
        for done in over:
            ends[done.error is None] += 1
            right = all(peer.here.get(100 + page) == page for page in done.job.source.pages)
            assert done.error is not None or right
    assert min(ends.values()) > 100


def _play(pick: random.Random, peer: Peer, jobs: list[CopyJob]) -> list[CopyDone[CopyJob]]:
    over: list[CopyDone[CopyJob]] = []
    luck = pick.choice((0.0, 0.02, 0.2))
    for _ in range(400):
        moves: list[Callable[[], None]] = []
        error = BROKEN if pick.random() < luck else None
        moves += [lambda one=one: peer.hold(one) for one in peer.asked]
        moves += [lambda one=one, e=error: peer.land(one, e) for one in peer.reading]
        for name in list(peer.holding):
            if name in peer.confirmed or name in peer.stopping or pick.random() < luck:
                cause = None if name in peer.confirmed and error is None else BROKEN
                moves.append(lambda name=name, cause=cause: peer.take_back(name, cause))
        if pick.random() < luck:
            moves.append(lambda: peer.copies.cancel(pick.choice(jobs)))
        for one in [one for one in peer.asked if one.name in peer.stopping]:  # the front ends it at once
            moves.append(lambda one=one: _end(peer, one))
        if moves:
            pick.choice(moves)()
        if pick.random() < 0.5:
            over += peer.copies.poll()
    return over + peer.copies.poll()


def _end(peer: Peer, job: CopyJob) -> None:
    peer.asked.remove(job)
    peer.stopping.discard(job.name)
    peer.gone.append(CopyDone(job, 0, 0.0, BROKEN))
