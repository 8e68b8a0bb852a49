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
from staging_rig import PAGE, PAGES, SLOTS, ByHand, staged

from eyas.common.errors import TransferFailed
from eyas.common.params import SamplingParams
from eyas.common.types import Choice, GenerationRequest, KvKind
from eyas.engine.batch.sequence import Generation, Kind
from eyas.engine.ipc.messages import Release, WatchOpened, WatchUpdate
from eyas.engine.ipc.outbox import Outbox
from eyas.engine.kv.leases import Leases
from eyas.engine.kv.offers import StagedOffers
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.pool import KvPool
from eyas.engine.kv.slots import Slots
from eyas.engine.kv.staging import Staging
from kv_transfer.owner import Owner


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
