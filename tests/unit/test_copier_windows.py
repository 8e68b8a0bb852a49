"""Copies into a pool that is in no file: they land in slots, and count once they are in the pool."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from staging_rig import SLOTS, ByHand, staged

from eyas.common.errors import Cancelled, TransferFailed
from eyas.common.types import RankPages
from eyas.engine.kv.slots import SlotAllocator
from eyas.engine.kv.staging import PageStaging, StagingInlet
from kv_transfer import windows
from kv_transfer.area import PoolArea
from kv_transfer.backends.base import CopyJob, CopyResult, PeerSource, TransferBackend
from kv_transfer.copier import PageCopier
from kv_transfer.peers import PeerRoute
from kv_transfer.slot_quota import SlotQuota

WINDOW = 2  # pages; six slots are for pages on their way in


class HandBackend(TransferBackend):
    """Copies stop when the test says so: each destination page is then full of its source's number."""

    name = "hand"

    def __init__(self, area: PoolArea) -> None:
        self.area = area
        self.running: list[CopyJob] = []
        self.over: list[CopyResult] = []
        self.cancelled: list[CopyJob] = []

    def export(self):
        return {}

    def open(self, export):
        return PeerSource()

    def start(self, source, job):
        assert job.name not in [other.name for other in self.running], "two copies have one name"
        self.running.append(job)

    def poll(self):
        over, self.over = self.over, []
        return over

    def cancel(self, job):
        self.cancelled.append(job)

    def checksum(self, proof):
        return self.area.checksum(proof.dst_pages[0])

    def close(self, deadline):
        return True

    def finish(self, which=0, error=None):
        job = self.running.pop(which)
        for page, slot in zip(job.source.pages, job.dst_pages, strict=True):
            self.area.pages[slot].view("f4")[:] = page
        self.over.append(CopyResult(job, self.name, 7 * len(job.dst_pages), 0.5, error))


class IntoPool(PeerSource):
    direct = True


class DirectHand(HandBackend):
    """The same, straight into the device's pool."""

    name, direct = "direct", True


class Landing:
    """A pool without a file, and what copies into it."""

    def __init__(self, folder: Path) -> None:
        self.pool, self.staging = staged(folder)
        self.slots = SlotAllocator(range(4, SLOTS))
        self.backend = HandBackend(self.staging.area)
        self.pages = PoolArea(self.pool.pages.numpy().view("u1"))
        self.direct = DirectHand(self.pages)
        backends = {"direct": self.direct, "hand": self.backend}
        self.copier = PageCopier(backends, WINDOW, StagingInlet(self.staging, self.slots))

    def submit(self, *jobs: CopyJob) -> None:
        for job in jobs:
            self.copier.submit(PeerRoute(self.backend, PeerSource(), worker=f"of {job.pull}"), job)

    def results(self, count: int) -> list[CopyResult]:
        deadline, found = time.monotonic() + 10.0, []
        while len(found) < count:
            assert time.monotonic() < deadline
            found += self.copier.finished()
            time.sleep(0.001)
        return found

    def run(self, count: int) -> list[CopyResult]:
        """Every copy that is asked for is made, until `count` jobs are over."""
        deadline, found = time.monotonic() + 10.0, []
        while len(found) < count:
            assert time.monotonic() < deadline
            while self.backend.running:
                self.backend.finish()
            found += self.copier.finished()
        return found

    def until(self, running: int) -> None:
        """Waits until as many copies run; none of the jobs ends meanwhile."""
        deadline = time.monotonic() + 10.0
        while len(self.backend.running) < running:
            assert not self.copier.finished() and time.monotonic() < deadline

    def numbers(self, *pages: int) -> list[float]:
        """What each page of the pool is full of."""
        for page in pages:
            assert (self.pool.tensor[page] == self.pool.tensor[page].flatten()[0]).all()
        return [float(self.pool.tensor[page].flatten()[0]) for page in pages]


@pytest.fixture(autouse=True)
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three windows at once, and one peer may have all slots, which are three windows."""
    monkeypatch.setattr(windows, "AT_ONCE", 3)
    monkeypatch.setattr(SlotQuota, "allows", lambda *asked: True)


@pytest.fixture
def landing(tmp_path: Path) -> Iterator[Landing]:
    made = Landing(tmp_path)
    yield made
    made.pool.close()
    assert list(tmp_path.iterdir()) == []


def job(number: int, src: tuple[int, ...], dst: tuple[int, ...], *, pull: int = 1) -> CopyJob:
    return CopyJob(pull, number, RankPages(0, src), dst)


def test_a_copy_counts_once_it_is_in_the_pool(landing: Landing) -> None:
    thread, asked = ByHand(landing.staging), job(0, (50, 51), (3, 9))
    landing.submit(asked)
    assert set(landing.backend.running[0].dst_pages) <= set(range(4, SLOTS)) and landing.slots.free == 4
    landing.backend.finish()
    assert landing.copier.finished() == [] and landing.slots.free == 4, "its bytes are in slots only"
    thread.do_one()
    assert landing.copier.finished() == [CopyResult(asked, "hand", 14, 0.5)]
    assert landing.numbers(3, 9) == [50, 51] and landing.slots.free == 6


def test_a_job_longer_than_all_slots_passes_in_windows(landing: Landing) -> None:
    source, target = tuple(range(60, 79)), tuple(range(19, 0, -1))
    landing.submit(job(0, source, target))
    assert [len(one.dst_pages) for one in landing.backend.running] == [2, 2, 2], "three at once, no more"
    (result,) = landing.run(1)
    assert (result.job.dst_pages, result.bytes) == (target, 7 * 19) and 0 < result.seconds < 0.5 * 10
    assert result.ok and landing.numbers(*target) == list(source)
    assert landing.slots.free == 6 and landing.copier.finished() == []


def test_without_slots_for_a_window_a_job_fails(landing: Landing) -> None:
    """A worker that only computes prompts for others has none, and may be told to measure a link."""
    landing.copier._landing = StagingInlet(landing.staging, SlotAllocator(()))
    landing.submit(job(0, (60, 61), (0, 1)))
    (result,) = landing.copier.finished()
    assert isinstance(result.error, TransferFailed) and "cannot land" in result.error.message
    assert not landing.backend.running and landing.copier.finished() == []


def test_pulls_take_turns(landing: Landing) -> None:
    """A late one does not wait until a long one is over, however many jobs that is."""
    long = [job(0, tuple(range(60, 72)), tuple(range(12))), job(1, (72, 73, 74, 75), (12, 13, 14, 15))]
    short = job(0, (90, 91, 92), (16, 17, 18), pull=2)
    landing.submit(*long, short)
    assert [one.pull for one in landing.backend.running] == [1, 1, 1], "then the slots are full"
    for running in ([1, 1, 2], [1, 2, 1], [2, 1, 2]):
        landing.backend.finish()
        landing.until(3)
        assert [one.pull for one in landing.backend.running] == running
    assert {result.job for result in landing.run(3)} == {short, *long}


def test_a_peer_that_hangs_leaves_slots_to_others(landing: Landing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    backend, well = landing.backend, PeerRoute(landing.backend, PeerSource(), worker="well")
    for pull in range(1, 4):  # a rank each
        landing.copier.submit(
            PeerRoute(backend, PeerSource(), worker="hung"),
            job(0, (60, 61), (2 * pull, 2 * pull + 1), pull=pull),
        )
    assert [one.pull for one in landing.backend.running] == [1, 2], "and the third waits"
    held, landing.backend.running = landing.backend.running, []
    for pull in range(4, 7):
        landing.copier.submit(well, job(0, (80 + pull,), (9 + pull,), pull=pull))
    assert all(result.ok and result.job.pull > 3 for result in landing.run(3))
    assert landing.numbers(13, 14, 15) == [84, 85, 86]
    landing.backend.running = held
    assert {result.job.pull for result in landing.run(3)} == {1, 2, 3}
    assert landing.slots.free == 6 and not landing.copier._quota._taken


def test_pages_of_a_peers_staging_come_in_windows_without_slots_of_ours(landing: Landing) -> None:
    """Three at once for each job; a way that leads to the peer's pool itself takes the whole job."""
    staging = IntoPool()
    staging.is_staging = True
    asked = job(0, tuple(range(60, 69)), tuple(range(9)))
    landing.copier.submit(PeerRoute(landing.direct, staging), asked)
    sizes = []
    while landing.direct.running:
        sizes.append(len(landing.direct.running))
        landing.direct.finish()
        over = landing.copier.finished()
    assert sizes == [3, 3, 3, 2, 1] and [result.job for result in over] == [asked]
    assert over[0].bytes == 7 * 9 and landing.numbers(*range(9)) == list(range(60, 69))


def test_windows_that_have_crossed_leave_their_place_to_others(
    landing: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their owner's word is waited for beside the next windows, not before them."""
    crossed: list[tuple[int, int]] = []
    monkeypatch.setattr(DirectHand, "crossed", crossed)
    staging = IntoPool()
    staging.is_staging = True
    landing.copier.submit(PeerRoute(landing.direct, staging), job(0, tuple(range(60, 74)), tuple(range(14))))
    for running in (3, 4, 5):
        assert len(landing.direct.running) == running and landing.copier.finished() == []
        crossed.append(landing.direct.running[running - 3].name)
        landing.copier.finished()
    crossed.clear()
    landing.copier.finished()
    assert len(landing.direct.running) == 6, "what runs is not stopped"
    over = []
    while landing.direct.running:
        landing.direct.finish()
        over += landing.copier.finished()
    assert [result.ok for result in over] == [True]


def test_slots_are_never_taken_twice_whatever_happens(landing: Landing) -> None:
    """Jobs of several pulls, in any order, cancelled or broken: each ends once, and all slots come back."""
    for seed in range(60):
        ended = _play(landing, random.Random(seed))
        assert sorted(ended) == [(i % 3, i) for i in (0, 3, 1, 4, 2, 5)] and landing.slots.free == 6


def _play(landing: Landing, pick: random.Random) -> list[tuple[int, int]]:
    """The names of the jobs that ended."""
    ended: list[tuple[int, int]] = []
    pages = [tuple(pick.sample(range(20), pick.randrange(1, 12))) for _ in range(6)]
    jobs = [job(i, pages[i], pages[i], pull=i % 3) for i in range(6)]
    for _ in range(100):
        move, running = pick.random(), len(landing.backend.running)
        if move < 0.3 and jobs:
            landing.submit(jobs.pop())
        elif move < 0.32:
            landing.copier.cancel(pick.randrange(3))
        elif running:
            error = TransferFailed("broken") if move > 0.95 else None
            landing.backend.finish(pick.randrange(running), error)
        taken = [slot for one in landing.backend.running for slot in one.dst_pages]
        assert len(taken) == len(set(taken)) <= 6
        ended += [result.job.name for result in landing.copier.finished()]
    landing.submit(*jobs)
    return ended + [result.job.name for result in landing.run(6 - len(ended))]


def test_a_window_that_fails_ends_its_job_once(landing: Landing) -> None:
    landing.submit(job(0, tuple(range(60, 72)), tuple(range(12))))
    landing.backend.finish(error=TransferFailed("the owner is gone"))
    assert landing.copier.finished() == [], "other windows still come"
    assert len(landing.backend.running) == 2
    landing.backend.finish()
    landing.backend.finish()
    (result,) = landing.results(1)
    assert result.error.message == "the owner is gone"
    assert landing.backend.running == [] and landing.slots.free == 6


def test_a_cancelled_pull_keeps_slots_and_pages_until_its_copies_stopped(landing: Landing) -> None:
    landing.submit(job(0, (1, 2, 3), (1, 2, 3)), job(1, (6, 7), (6, 7)), job(2, (8, 4), (8, 4)))
    landing.submit(job(0, (9,), (9,), pull=2))
    assert [one.dst_pages for one in landing.backend.running if one.source.pages == (6, 7)]
    landing.copier.cancel(1)
    (unbegun,) = landing.copier.finished()
    assert unbegun.job.number == 2 and isinstance(unbegun.error, Cancelled)
    assert len(landing.backend.cancelled) == 3 and landing.slots.free == 0
    for _ in range(3):
        landing.backend.finish(error=Cancelled("the copy was given up"))
    stopped = landing.results(2)
    assert {result.job.number for result in stopped} == {0, 1}
    assert all(isinstance(result.error, Cancelled) for result in stopped)
    (other,) = landing.backend.running
    assert other.pull == 2
    landing.backend.finish()
    assert landing.results(1)[0].ok and landing.slots.free == 6


def test_a_cancelled_job_whose_windows_all_came_is_a_copy_like_any_other(landing: Landing) -> None:
    landing.submit(job(0, (1, 2, 3), (1, 2, 3)))
    landing.copier.cancel(1)
    landing.backend.finish()
    landing.backend.finish()
    assert landing.results(1)[0].ok and landing.slots.free == 6


def test_it_is_not_closed_while_slots_are_copied_into_the_pool(
    landing: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate, copy = threading.Event(), threading.Event(), PageStaging._copy_in

    def gated(*args: Any) -> int:
        begun.set()
        assert gate.wait(10)
        return copy(*args)

    monkeypatch.setattr(PageStaging, "_copy_in", gated)
    landing.submit(job(0, (50,), (3,)))
    landing.backend.finish()
    landing.copier.finished()
    assert begun.wait(10)
    assert not landing.copier.close(time.monotonic() + 0.05)
    gate.set()
    assert landing.copier.close(time.monotonic() + 10.0) and landing.numbers(3) == [50]


def test_a_proof_ends_in_its_slot(landing: Landing) -> None:
    landing.submit(CopyJob(1, -1, RankPages(0, (77,)), (3,), proof=12345))
    landing.backend.finish()
    (result,) = landing.copier.finished()
    assert "brought other bytes" in result.error.message
    assert landing.numbers(3) == [3] and landing.slots.free == 6


def test_a_direct_way_takes_pages_of_the_pool_and_no_slots(landing: Landing) -> None:
    """All at once; beside a staged copy; and its proof is judged where it landed."""
    direct = PeerRoute(landing.direct, IntoPool())
    asked = job(0, tuple(range(60, 72)), tuple(range(12)), pull=2)
    landing.submit(job(0, (80,), (20,)))
    landing.copier.submit(direct, asked)
    assert landing.direct.running[0].dst_pages == asked.dst_pages and landing.slots.free == 5
    landing.direct.finish()
    (result,) = landing.copier.finished()
    assert (result.job, result.ok, result.path) == (asked, True, "direct")
    assert landing.numbers(*range(12)) == list(range(60, 72))
    landing.pages.pages[21].view("f4")[:] = 77
    truth = landing.pages.checksum(21)
    for proof in (truth, truth ^ 1):
        landing.copier.submit(direct, CopyJob(3, -1, RankPages(0, (77,)), (3,), proof))
        landing.direct.finish()
        assert landing.copier.finished()[0].ok == (proof == truth)
    landing.copier.submit(direct, job(1, (1,), (1,), pull=2))
    landing.copier.cancel(2)
    assert len(landing.direct.cancelled) == 1
    assert landing.run(1)[0].job.dst_pages == (20,)
