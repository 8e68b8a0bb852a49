"""Staging beside a pool that is in no file: slots have one owner, pages pass whole, everything comes back."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eyas.common.errors import Cancelled, TransferFailed
from eyas.common.params import SamplingParams
from eyas.common.types import Choice, GenerationRequest, KvKind, Shard
from eyas.engine.batch.sequence import Generation, Kind
from eyas.engine.ipc.messages import Release, WatchOpened, WatchUpdate
from eyas.engine.ipc.outbox import Outbox
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.leases import Leases
from eyas.engine.kv.offers import StagedOffers
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.kv.slots import Slots
from eyas.engine.kv.staged_copier import StagedCopier
from eyas.engine.kv.staging import Staging
from kv_transfer.backends.base import Backend, Copy, CopyResult, Source
from kv_transfer.owner import Owner
from kv_transfer.route import Route

PAGE, PAGES, SLOTS = 4, 24, 10
SHAPE = PoolShape(KvFormat(2, 1, 4), pages=PAGES, page_size=PAGE)


class ByHand:
    """The copy thread of a staging, whose jobs are done when the test says so, in order."""

    def __init__(self, staging: Staging) -> None:
        staging._thread.close(time.monotonic() + 5.0)
        self.jobs: list[tuple[int, object]] = []
        self.out: list[tuple[list[int], tuple[int, ...]]] = []  # pages and slots of the jobs
        self.broken: TransferFailed | None = None
        staging._thread = self  # type: ignore[assignment]
        self._staging, self._copy_out = staging, staging.copy_out
        staging.copy_out = self.copy_out  # type: ignore[method-assign]

    def copy_out(self, pages, slots, then) -> None:
        self.out.append((pages, slots))
        self._copy_out(pages, slots, then)

    def submit(self, job: int, do: object) -> None:
        self.jobs.append((job, do))

    def do_one(self) -> None:
        number, do = self.jobs.pop(0)
        self.out = self.out[1:]
        if self.broken is None:
            do()  # type: ignore[operator]
        self._staging._running.pop(number)(self.broken)

    def finished(self) -> list[object]:
        return []

    def close(self, deadline: float) -> bool:
        return True


def staged(folder: Path) -> tuple[KvPool, Staging]:
    """A pool that is in no file, every page full of its own number, and staging beside it."""
    pool = KvPool(SHAPE)
    for page in range(PAGES):
        pool.tensor[page] = page
    return pool, Staging(pool, folder / "staging", SLOTS)


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[tuple[KvPool, Staging]]:
    pool, staging = staged(tmp_path)
    yield pool, staging
    pool.close()
    assert list(tmp_path.iterdir()) == []


def wait(staging: Staging, told: list[object], count: int) -> None:
    deadline = time.monotonic() + 10.0
    while len(told) < count:
        assert time.monotonic() < deadline
        staging.poll()
        time.sleep(0.001)


# --- the thread -------------------------------------------------------------------------------------


def test_pages_go_out_and_come_back_whole_and_in_order(beside: tuple[KvPool, Staging]) -> None:
    pool, staging = beside
    told: list[object] = []
    before = staging.area.checksum(SLOTS)
    staging.copy_out([3, 4, 9, 20], [7, 8, 1, 2], told.append)
    staging.copy_out([], [], lambda error: told.append("nothing"))
    staging.copy_in([8, 1], [11, 12], told.append)
    staging.copy_in([99], [0], told.append)
    wait(staging, told, 4)
    assert told[:3] == [None, "nothing", None] and isinstance(told[3], TransferFailed)
    assert (pool.tensor[11] == 4).all() and (pool.tensor[12] == 9).all() and (pool.tensor[0] == 0).all()
    rows = torch.frombuffer(staging.area.pages.data, dtype=torch.float32).view(SLOTS + 1, -1)
    assert [float(row[0]) for row in rows[[7, 8, 1, 2]]] == [3, 4, 9, 20]
    assert staging.area.checksum(SLOTS) == before, "the proof page is nobody's slot"


# --- the owner's side: offers -------------------------------------------------------------------------


class Offering(RuleBasedStateMachine):
    """Prompts are reserved for, offered, filled, finished, cancelled, watched and released at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(f"/dev/shm/eyas-test-{time.monotonic_ns()}")
        self.folder.mkdir()
        self.pool, self.staging = staged(self.folder)
        self.thread = ByHand(self.staging)
        self.pages, self.slots, self.outbox = PagePool(PAGES), Slots(range(SLOTS)), Outbox()
        owner = Owner("here", 1, 1e6, itertools.count(1).__next__)
        offers = StagedOffers("m", self.pages, self.staging, self.slots)
        self.leases = Leases(owner, self.pages, PAGE, {KvKind.TARGET: offers}, self.outbox)
        self.ids = itertools.count()
        self.queue: list[Generation] = []
        self.running: dict[str, tuple[Generation, list[int], int]] = {}  # pages of it, rows filled
        self.handles: dict[int, tuple[list[int], tuple[int, ...]]] = {}  # alive: pages, slots
        self.readable: dict[int, int] = {}  # by handle, as watchers were told

    @rule(rows=st.integers(1, 5 * PAGE))
    def arrive(self, rows):
        request = GenerationRequest(
            f"r{next(self.ids)}", tuple(range(rows)), SamplingParams(), (Choice(0),), timeout_s=1e6
        )
        self.queue.append(Generation(request, 1, Kind.PREFILL, arrived=0.0, deadline=1e12))

    @precondition(lambda self: self.queue)
    @rule()
    def begin(self):
        """The head of the queue begins if there is room; those behind it wait their turn."""
        first = self.queue[0]
        count = -(-len(first.request.prompt_ids) // PAGE)
        free = self.slots.free
        if not self.leases.reserve(first):
            assert free < count
            return
        assert self.leases.reserve(first), "reserved once, reserved for good"
        if count > self.pages.free:
            return
        pages = self.pages.take(count)
        (handle,) = self.leases.offer(self.queue.pop(0), pages)
        self.running[first.id] = first, pages, 0
        self.handles[handle.id] = pages, handle.shards[0].pages
        self.leases.watch_opened(WatchOpened(handle.id, handle, 1))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), rows=st.integers(1, 7))
    def fill(self, data, rows):
        generation, pages, filled = self.running[data.draw(st.sampled_from(list(self.running)))]
        rows = min(filled + rows, len(generation.request.prompt_ids))
        self.running[generation.id] = generation, pages, rows
        self.leases.filled(generation, rows)
        if rows == len(generation.request.prompt_ids):
            self.leases.finished(generation, (), b"")
            self.end(generation.id)

    def end(self, id):
        _, pages, _ = self.running.pop(id)
        self.pages.drop(pages)

    @precondition(lambda self: self.running or self.queue)
    @rule(data=st.data())
    def cancel(self, data):
        waiting = {generation.id: generation for generation in self.queue}
        id = data.draw(st.sampled_from([*self.running, *waiting]))
        self.leases.withdraw(waiting[id] if id in waiting else self.running[id][0])
        if id in waiting:
            self.queue.remove(waiting[id])
        else:
            self.end(id)

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def release(self, data):
        self.leases.release(Release(1, data.draw(st.sampled_from(list(self.handles))), 1, 1))

    @precondition(lambda self: self.thread.jobs)
    @rule()
    def copy_one(self):
        self.thread.do_one()

    @rule()
    def look_after(self):
        self.leases.poll(time.monotonic())
        alive = {id for id in self.handles if id in self.leases._placed}
        for event in self.outbox.take():
            if isinstance(event, WatchUpdate) and event.failure is None and event.watch in alive:
                rows = -(-event.tokens // PAGE) if event.done else event.tokens // PAGE
                self.readable[event.watch] = rows
        self.handles = {id: held for id, held in self.handles.items() if id in alive}
        self.readable = {id: rows for id, rows in self.readable.items() if id in alive}

    @invariant()
    def readable_pages_are_whole(self):
        """What a watcher was told of lies in the handle's slots, whatever became of the pool's pages."""
        for id, count in self.readable.items():
            pages, slots = self.handles[id]
            for page, slot in list(zip(pages, slots, strict=True))[:count]:
                assert (self.staging._host[slot] == page).all()

    @invariant()
    def no_slot_has_two_owners(self):
        held = [slot for _, slots in self.handles.values() for slot in slots]
        assert len(held) == len(set(held))
        assert not set(held) & set(self.slots._free)

    @invariant()
    def nothing_is_free_that_a_copy_reads_or_writes(self):
        for pages, slots in self.thread.out:
            assert not set(slots) & set(self.slots._free)
            assert all(map(self.pages.owners, pages))

    def teardown(self):
        for id in list(self.handles):
            self.leases.release(Release(1, id, 1, 1))
        for generation in self.queue:
            self.leases.withdraw(generation)
        for id in list(self.running):
            self.leases.withdraw(self.running[id][0])
            self.end(id)
        self.leases.poll(time.monotonic())
        while self.thread.jobs:
            self.thread.do_one()
        self.leases.poll(time.monotonic())
        assert self.slots.free == SLOTS and self.pages.free == PAGES
        self.pool.close()
        self.folder.rmdir()


Offering.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestOffering = Offering.TestCase


@pytest.mark.parametrize("fault", ["slots are given back at once", "told before they are copied"])
def test_the_model_finds_what_it_is_for(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The power check: two mistakes that staging must not make are found."""
    from hypothesis.stateful import run_state_machine_as_test

    from eyas.engine.kv import offers

    if fault == "slots are given back at once":
        monkeypatch.setattr(offers._Staged, "end", lambda self: _end_early(self))
    else:
        monkeypatch.setattr(offers._Staged, "show", lambda self, count, then: then(None))
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Offering, settings=settings(max_examples=300, database=None, deadline=None))


def _end_early(placed) -> None:
    placed._ended = True
    placed.offers.slots.give(placed.numbers)
    placed.offers.pool.drop(placed.pages)
    placed.numbers, placed.pages = (), []


def test_a_copy_out_that_fails_fails_the_handle(beside: tuple[KvPool, Staging]) -> None:
    _, staging = beside
    thread, outbox, pages = ByHand(staging), Outbox(), PagePool(PAGES)
    thread.broken = TransferFailed("the device is gone")
    owner = Owner("here", 1, 1e6, itertools.count(1).__next__)
    slots = Slots(range(SLOTS))
    offers = StagedOffers("m", pages, staging, slots)
    leases = Leases(owner, pages, PAGE, {KvKind.TARGET: offers}, outbox)
    request = GenerationRequest("r", tuple(range(8)), SamplingParams(), (Choice(0),), timeout_s=1e6)
    generation = Generation(request, 1, Kind.PREFILL, arrived=0.0, deadline=1e12)
    taken = pages.take(2)
    assert leases.reserve(generation)
    (handle,) = leases.offer(generation, taken)
    leases.watch_opened(WatchOpened(5, handle, 1))
    leases.finished(generation, (), b"")
    pages.drop(taken)
    thread.do_one()
    leases.poll(time.monotonic())
    (update,) = outbox.take()
    assert update.failure.message == "the device is gone"
    assert slots.free == SLOTS and pages.free == PAGES


# --- the puller's side: landings ------------------------------------------------------------------------


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
