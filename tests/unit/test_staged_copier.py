"""Copies into a pool that is in no file: they land in slots, and count once they are in the pool."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from staging_rig import SLOTS, ByHand, staged

from eyas.common.errors import Cancelled
from eyas.common.types import Shard
from eyas.engine.kv.pool import KvPool
from eyas.engine.kv.slots import Slots
from eyas.engine.kv.staged_copier import StagedCopier
from eyas.engine.kv.staging import Staging
from kv_transfer.backends.base import Backend, Copy, CopyResult, Source
from kv_transfer.route import Route


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[tuple[KvPool, Staging]]:
    pool, staging = staged(tmp_path)
    yield pool, staging
    pool.close()
    assert list(tmp_path.iterdir()) == []


class HandBackend(Backend):
    """Copies stop when the test says so: each destination page is then full of its source's number."""

    name = "hand"

    def __init__(self) -> None:
        self.running: list[Copy] = []
        self.over: list[CopyResult] = []
        self.cancelled: list[Copy] = []

    def export(self):
        return {}

    def open(self, export):
        return Source()

    def start(self, source, job):
        self.running.append(job)

    def poll(self):
        over, self.over = self.over, []
        return over

    def cancel(self, job):
        self.cancelled.append(job)

    def close(self, deadline):
        return True

    def finish(self, area, error=None):
        job = self.running.pop(0)
        for page, slot in zip(job.source.pages, job.dst_pages, strict=True):
            area.pages[slot].view("f4")[:] = page
        self.over.append(CopyResult(job, self.name, 7, 0.1, error))


@pytest.fixture
def landing(beside: tuple[KvPool, Staging]) -> tuple[KvPool, Staging, HandBackend, StagedCopier, Slots]:
    pool, staging = beside
    backend, slots = HandBackend(), Slots(range(4, SLOTS))
    return pool, staging, backend, StagedCopier({"hand": backend}, staging, slots), slots


def job(number: int, src: tuple[int, ...], dst: tuple[int, ...], *, pull: int = 1) -> Copy:
    return Copy(pull, number, Shard(0, src), dst)


def results(copier: StagedCopier, count: int) -> list[CopyResult]:
    deadline, found = time.monotonic() + 10.0, []
    while len(found) < count:
        assert time.monotonic() < deadline
        found += copier.finished()
        time.sleep(0.001)
    return found


def test_a_copy_counts_once_it_is_in_the_pool(landing) -> None:
    pool, staging, backend, copier, slots = landing
    thread = ByHand(staging)
    asked = job(0, (50, 51), (3, 9))
    copier.submit(Route(backend, Source()), asked)
    assert set(backend.running[0].dst_pages) <= set(range(4, SLOTS)) and slots.free == 4
    backend.finish(staging.area)
    assert copier.finished() == [] and slots.free == 4, "its bytes are in slots only"
    thread.do_one()
    (result,) = copier.finished()
    assert result == CopyResult(asked, "hand", 7, 0.1)
    assert (pool.tensor[3] == 50).all() and (pool.tensor[9] == 51).all() and slots.free == 6


def test_jobs_without_slots_wait_in_order(landing) -> None:
    _, staging, backend, copier, slots = landing
    jobs = [job(0, (1, 2, 3, 4), (1, 2, 3, 4)), job(1, (5, 6, 7), (5, 6, 7)), job(2, (8,), (8,))]
    for each in jobs:
        copier.submit(Route(backend, Source()), each)
    assert [one.number for one in backend.running] == [0], "the last one would fit, but it came last"
    for number in range(3):
        if number < len(backend.running) or backend.running:
            backend.finish(staging.area)
        (result,) = results(copier, 1)
        assert result.job == jobs[number]
    assert slots.free == 6


def test_a_cancelled_pull_keeps_slots_and_pages_until_its_copies_stopped(landing) -> None:
    _, staging, backend, copier, slots = landing
    copier.submit(Route(backend, Source()), job(0, (1, 2, 3, 4), (1, 2, 3, 4)))
    copier.submit(Route(backend, Source()), job(1, (5, 6, 7), (5, 6, 7)))
    copier.submit(Route(backend, Source()), job(0, (8,), (8,), pull=2))
    copier.cancel(1)
    (unbegun,) = copier.finished()
    assert unbegun.job.number == 1 and isinstance(unbegun.error, Cancelled)
    assert [one.number for one in backend.cancelled] == [0]
    backend.finish(staging.area, Cancelled("the copy was given up"))
    (stopped,) = results(copier, 1)
    assert stopped.job.name == (1, 0) and isinstance(stopped.error, Cancelled)
    (other,) = backend.running
    assert other.pull == 2
    backend.finish(staging.area)
    assert results(copier, 1)[0].ok and slots.free == 6


def test_a_proof_ends_in_its_slot(landing) -> None:
    pool, staging, backend, copier, slots = landing
    copier.submit(Route(backend, Source()), Copy(1, -1, Shard(0, (77,)), (3,), proof=12345))
    backend.finish(staging.area)
    (result,) = copier.finished()
    assert "brought other bytes" in result.error.message
    assert (pool.tensor[3] == 3).all() and slots.free == 6
