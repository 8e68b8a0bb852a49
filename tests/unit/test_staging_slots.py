"""Staging beside a pool that is in no file: slots have one owner, pages pass whole, everything comes back."""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from staging_rig import PAGE, PAGES, SLOTS, ByHand, staged

from eyas.common.errors import TransferFailed
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, KvKind, RequestChoice
from eyas.engine.batch.sequence import Generation, GenerationKind
from eyas.engine.ipc.messages import PagesStaged, ReleaseLease, StagePages, UnstagePages
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.kv.leases import LeaseTable
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.pool import KvPool
from eyas.engine.kv.slots import SlotAllocator
from eyas.engine.kv.stager import PageStager, StagingOutlet
from eyas.engine.kv.staging import PageStaging
from kv_transfer.gpu.driver import CopyBlock
from kv_transfer.owner import LeaseOwner
from tests.unit.fake_gpu import FakeDriver

TARGET = KvKind.TARGET


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[tuple[KvPool, PageStaging]]:
    pool, staging = staged(tmp_path)
    yield pool, staging
    pool.close()
    assert list(tmp_path.iterdir()) == []


def wait(staging: PageStaging, told: list[object], count: int) -> None:
    deadline = time.monotonic() + 10.0
    while len(told) < count:
        assert time.monotonic() < deadline
        staging.poll()
        time.sleep(0.001)


# --- the thread -------------------------------------------------------------------------------------


def test_pages_go_out_and_come_back_whole_and_in_order(beside: tuple[KvPool, PageStaging]) -> None:
    pool, staging = beside
    told: list[object] = []
    staging.copy_out([3, 4, 9, 20], [7, 8, 1, 2], told.append)
    staging.copy_out([], [], lambda error: told.append("nothing"))
    staging.copy_in([8, 1], [11, 12], told.append)
    staging.copy_in([99], [0], told.append)
    wait(staging, told, 4)
    assert told[:3] == [None, "nothing", None] and isinstance(told[3], TransferFailed)
    assert (pool.tensor[11] == 4).all() and (pool.tensor[12] == 9).all() and (pool.tensor[0] == 0).all()
    rows = torch.frombuffer(staging.area.pages.data, dtype=torch.float32).view(SLOTS, -1)
    assert [float(row[0]) for row in rows[[7, 8, 1, 2]]] == [3, 4, 9, 20]


def test_the_proof_page_goes_out_as_any_other(beside: tuple[KvPool, PageStaging]) -> None:
    pool, staging = beside
    told: list[object] = []
    staging.copy_out([PAGES], [5], told.append)
    wait(staging, told, 1)
    assert staging.area.checksum(5) == pool.checksum == zlib.crc32(pool.pages[PAGES].numpy().tobytes())


# --- the owner's side -------------------------------------------------------------------------------


def prompt(id: str, rows: int) -> Generation:
    made = GenerationRequest(id, tuple(range(rows)), SamplingParams(), (RequestChoice(0),), timeout_s=1e6)
    return Generation(made, 1, GenerationKind.PREFILL, arrived=0.0, deadline=1e12)


class StagedOwner:
    """An owner of staged pages: leases, a stager, and its copy thread by hand."""

    def __init__(self, folder: Path) -> None:
        self.pool, self.staging = staged(folder)
        self.thread = ByHand(self.staging)
        self.pages, self.slots, self.outbox = PagePool(PAGES), SlotAllocator(range(SLOTS)), EventOutbox()
        owner = LeaseOwner("here", 1, 1e6, itertools.count(1).__next__)
        self.leases = LeaseTable(owner, self.pages, PAGE, {TARGET: "m"}, self.outbox)
        outlets = {TARGET: StagingOutlet(self.staging, self.slots, proof=PAGES)}
        self.stager = PageStager(outlets, self.leases.covers, self.outbox)
        self.calls = itertools.count(1)

    def lease(self, count: int) -> tuple[int, tuple[int, ...]]:
        """A handle and its pages."""
        taken = self.pages.take(count)
        (handle,) = self.leases.offer(prompt(f"r{taken[0]}", count * PAGE), taken)
        self.pages.drop(taken)
        return handle.id, tuple(taken)

    def stage(self, handle: int, *pages: int, puller: str = "b") -> int:
        call = next(self.calls)
        self.stager.stage(StagePages(call, TARGET, handle, pages, puller))
        return call

    def release(self, handle: int) -> None:
        self.leases.release(ReleaseLease(1, handle, 1, 1))
        self.leases.poll(time.monotonic())

    def told(self) -> dict[int, PagesStaged]:
        return {event.call: event for event in self.outbox.take() if isinstance(event, PagesStaged)}


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[StagedOwner]:
    made = StagedOwner(tmp_path)
    yield made
    made.pool.close()


def test_a_driver_copies_the_runs_of_whole_pages_in_one_call(
    beside: tuple[KvPool, PageStaging],
) -> None:
    """The same pages to the same slots, and back, as by torch."""
    (pool, staging), calls, over = beside, [], []

    class Driver(FakeDriver):
        def copy_host(self, blocks: Sequence[CopyBlock], *, out: bool) -> None:
            calls.append((len(blocks), out))
            super().copy_host(blocks, out=out)

    staging._driver = Driver()  # type: ignore[assignment]
    staging.copy_out([7, 8, 3, 3], [0, 1, 2, 5], over.append)
    wait(staging, over, 1)
    expected = pool.pages[[7, 8, 3, 3]].view(torch.uint8)
    assert torch.equal(staging._host[[0, 1, 2, 5]], expected)
    staging.copy_in([0, 1, 2], [10, 11, 4], over.append)
    wait(staging, over, 2)
    assert torch.equal(pool.pages[[10, 11, 4]].view(torch.uint8), expected[:3])
    assert over == [None, None] and calls == [(3, True), (2, False)]


def test_only_leased_pages_and_the_proof_page_are_staged(owner: StagedOwner) -> None:
    mine, pages = owner.lease(3)
    other, secret = owner.lease(2)
    good = [owner.stage(mine, *pages[1:]), owner.stage(0, PAGES)]
    probe = owner.stage(0, PAGES, PAGES)  # a link is measured by several copies of the proof page
    bad = [
        owner.stage(mine, *secret),
        owner.stage(0, pages[0]),
        owner.stage(mine, PAGES),
        owner.stage(77, pages[0]),
        owner.stage(mine, *pages * 4),
    ]
    owner.stager.stage(StagePages(99, KvKind.DRAFT, mine, pages, "b"))
    told = owner.told()
    assert set(told) == {*bad, 99} and all(staged.failure is not None for staged in told.values())
    while owner.thread.jobs:
        owner.thread.do_one()
    told = owner.told()
    assert [len(told[call].slots) for call in (*good, probe)] == [2, 1, 2]
    owner.release(other)
    assert owner.told() == {} and owner.stage(other, *secret) in owner.told()


def test_a_call_that_waited_until_its_lease_ended_is_refused(owner: StagedOwner) -> None:
    mine, pages = owner.lease(8)
    first, second = owner.stage(mine, *pages), owner.stage(mine, *pages)
    owner.release(mine)
    owner.stager.unstage(UnstagePages(first))
    (answer,) = owner.told().values()
    assert answer.call == second and "under the lease" in answer.failure.message
    assert owner.slots.free == 2, "the first one's copy runs on"
    owner.thread.do_one()
    assert not owner.told() and owner.slots.free == SLOTS


def test_calls_are_served_in_order_and_a_gap_is_used(owner: StagedOwner) -> None:
    mine, pages = owner.lease(8)
    first, second, third = (owner.stage(mine, *pages[:count], puller=f"{count}") for count in (8, 6, 1))
    owner.thread.do_one()
    assert set(owner.told()) == {first} and not owner.thread.jobs, "the third would fit, but it came last"
    owner.stager.unstage(UnstagePages(second))
    owner.thread.do_one()
    assert set(owner.told()) == {third}
    for call in (first, third):
        owner.stager.unstage(UnstagePages(call))
        owner.stager.unstage(UnstagePages(call))
    assert owner.slots.free == SLOTS


def test_a_puller_that_has_stopped_leaves_slots_to_others(owner: StagedOwner) -> None:
    """It says of no window that it has read it, and its slots come back only when their time is over."""
    mine, pages = owner.lease(8)
    stopped = [owner.stage(mine, *pages[:2], puller="stopped") for _ in range(7)]
    for _ in range(9):
        other = owner.stage(mine, *pages[:2], puller="well")
        while owner.thread.jobs:
            owner.thread.do_one()
        told = owner.told()
        assert other in told, "it waits for the one that has stopped"
        owner.stager.unstage(UnstagePages(other))
    assert owner.slots.free == SLOTS - 6, "three windows of five are what one may have"
    assert [call in owner.stager._waiting for call in stopped] == [False] * 3 + [True] * 4
    for call in stopped:
        owner.stager.unstage(UnstagePages(call))
    while owner.thread.jobs:
        owner.thread.do_one()
    assert owner.slots.free == SLOTS and not owner.stager.outlets[TARGET].quota._taken


def test_a_copy_that_fails_is_told_and_keeps_no_slot(owner: StagedOwner) -> None:
    mine, pages = owner.lease(8)
    first, second = owner.stage(mine, *pages), owner.stage(mine, *pages)
    owner.thread.broken = TransferFailed("the device is gone")
    owner.thread.do_one()
    owner.thread.broken = None
    assert owner.told()[first].failure.message == "the device is gone"
    owner.thread.do_one()
    assert owner.told()[second].failure is None
    owner.stager.unstage(UnstagePages(first))
    owner.stager.unstage(UnstagePages(second))
    assert owner.slots.free == SLOTS


class Asking(RuleBasedStateMachine):
    """Fronts ask for windows and give them back at any moment, while leases come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(f"/dev/shm/eyas-test-{time.monotonic_ns()}")
        self.folder.mkdir()
        self.rig = StagedOwner(self.folder)
        self.handles: dict[int, tuple[int, ...]] = {}
        self.asked: dict[int, tuple[int, ...]] = {}  # calls that have not ended, with pages
        self.staged: dict[int, tuple[int, ...]] = {}  # those that were answered, with slots

    @precondition(lambda self: self.rig.pages.free >= 5)
    @rule(count=st.integers(1, 5))
    def lease(self, count):
        handle, pages = self.rig.lease(count)
        self.handles[handle] = pages

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def stage(self, data):
        handle = data.draw(st.sampled_from(list(self.handles)))
        pages = tuple(data.draw(st.lists(st.sampled_from(self.handles[handle]), min_size=1, max_size=5)))
        self.asked[self.rig.stage(handle, *pages)] = pages

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def unstage(self, data):
        call = data.draw(st.sampled_from(list(self.asked)))
        self.end(call)

    def end(self, call):
        del self.asked[call]
        self.staged.pop(call, None)
        self.rig.stager.unstage(UnstagePages(call))

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def release(self, data):
        handle = data.draw(st.sampled_from(list(self.handles)))
        del self.handles[handle]
        self.rig.release(handle)

    @precondition(lambda self: self.rig.thread.jobs)
    @rule()
    def copy_one(self):
        self.rig.thread.do_one()

    @rule()
    def hear(self):
        for call, event in self.rig.told().items():
            if call not in self.asked:
                continue  # its stream has ended
            if event.failure is None:
                self.staged[call] = event.slots
            else:
                self.end(call)

    @invariant()
    def what_was_told_lies_in_its_slots(self):
        for call, slots in self.staged.items():
            for page, slot in zip(self.asked[call], slots, strict=True):
                assert (self.rig.staging.area.pages[slot].view("f4") == page).all()

    @invariant()
    def no_slot_has_two_owners(self):
        held = [slot for slots in self.staged.values() for slot in slots]
        held += [slot for _, slots in self.rig.thread.out for slot in slots]
        assert len(held) == len(set(held))
        assert not set(held) & set(self.rig.slots._free)

    def teardown(self):
        for call in list(self.asked):
            self.end(call)
        while self.rig.thread.jobs:
            self.rig.thread.do_one()
        for handle in self.handles:
            self.rig.release(handle)
        assert self.rig.slots.free == SLOTS and self.rig.pages.free == PAGES
        assert not self.rig.stager._calls and not self.rig.stager._waiting
        self.rig.pool.close()
        self.folder.rmdir()


Asking.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestAsking = Asking.TestCase


@pytest.mark.parametrize("fault", ["slots are given back at once", "told before they are copied"])
def test_the_model_finds_what_it_is_for(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The power check: two mistakes that staging must not make are found."""
    if fault == "slots are given back at once":
        monkeypatch.setattr(PageStager, "_settle", _given_at_once)
    else:
        monkeypatch.setattr(PageStager, "_copy", _told_early)
    quick = settings(max_examples=300, database=None, deadline=None, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Asking, settings=settings(quick, report_multiple_bugs=False))


_copy = PageStager._copy


def _told_early(self, command: StagePages) -> bool:
    began = _copy(self, command)
    if began:
        self.outbox.add(PagesStaged(command.call, tuple(self._calls[command.call].slots)))
    return began


def _given_at_once(self, call: int, staged: Any) -> None:
    if not staged.needed and self._calls.pop(call, None):
        staged.outlet.slots.give(staged.slots)
