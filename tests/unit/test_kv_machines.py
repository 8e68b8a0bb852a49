"""Owner and puller under any order of events: hypothesis invents the orders, a model keeps the books."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eyas.common.errors import TransferFailed
from eyas.common.types import KvHandle, KvKind, RankPages
from kv_transfer.backends.base import CopyJob, CopyResult
from kv_transfer.owner import LeaseOwner, PageOffer
from kv_transfer.puller import (
    DRAIN_S,
    RELEASE_S,
    AskVerdict,
    CloseWatch,
    OpenWatch,
    PagesFree,
    PullAttempt,
    PullComplete,
    PullIncomplete,
    PullState,
    SendRelease,
)

EPOCH = 5
LEASE = 30.0
BUDGET = settings(max_examples=60, stateful_step_count=40, deadline=None)

MAX_HANDLES = 3
handles = st.integers(1, MAX_HANDLES)
newer = st.sampled_from([0, 0, 0, 1, -1])  # attempts, counted from the current one
epochs = st.sampled_from([EPOCH, EPOCH, EPOCH, EPOCH - 1])


@dataclass
class LeaseBook:
    """What a handle's lease must be worth, told in the plainest way: the moment at which it lapses."""

    deadline: float
    lapses: float
    ready: bool = False
    ended: bool = False
    attempt: int = 0
    watch: int | None = None


class OwnerUnderAnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.owner = LeaseOwner("prefill:1", EPOCH, LEASE, itertools.count(1).__next__)
        self.now = 0.0
        self.books: dict[int, LeaseBook] = {}
        self.next_watch = 1
        self.freed: list[int] = []

    def alive(self, handle: int) -> LeaseBook | None:
        book = self.books.get(handle)
        if book is not None and self.now >= book.lapses:
            book.ended = True
        return None if book is None or book.ended else book

    @precondition(lambda self: len(self.books) < MAX_HANDLES)
    @rule(lasts=st.sampled_from([5.0, 45.0, 100.0]))
    def offer(self, lasts):
        deadline = self.now + lasts
        handle = self.owner.offer(PageOffer(KvKind.TARGET, "m", 40, (), deadline), self.now)
        assert handle.id not in self.books, "ids are never used again"
        self.books[handle.id] = LeaseBook(deadline, min(self.now + LEASE, deadline))

    @rule(handle=handles, tokens=st.integers(0, 40))
    def fill(self, handle, tokens):
        self.owner.filled(handle, tokens, self.now)

    @rule(handle=handles)
    def finish(self, handle):
        if book := self.alive(handle):
            book.ready = True
        self.owner.finished(handle, (), b"", self.now)

    @precondition(lambda self: self.now > 20.0)
    @rule(handle=handles)
    def give_up(self, handle):
        if book := self.alive(handle):
            book.ended = True
        self.owner.withdraw(handle, self.now)

    @rule(handle=handles, epoch=epochs, newer=newer)
    def open_watch(self, handle, epoch, newer):
        watch, self.next_watch = self.next_watch, self.next_watch + 1
        book = self.alive(handle)
        attempt = newer + (book.attempt if book else 1)
        accepted = book is not None and epoch == EPOCH and attempt >= book.attempt
        self.owner.sweep(self.now)
        self.hear()
        shown = KvHandle("prefill:1", epoch, 0, handle, KvKind.TARGET, "m", 40, ())
        self.owner.watch_opened(watch, shown, attempt, self.now)
        replies = {update.watch: update for update in self.hear()}
        assert (replies.pop(watch).failure is None) == accepted
        if accepted:
            loser, book.watch = book.watch, watch
            book.attempt, book.lapses = attempt, book.deadline
            assert set(replies) == ({loser} if loser is not None else set())
        else:
            assert not replies, "a refused Watch disturbs no other"

    @rule(back=st.integers(1, 3))
    def close_watch(self, back):
        watch = self.next_watch - back
        for handle, book in self.books.items():
            if book.watch == watch and self.alive(handle):
                book.watch, book.lapses = None, min(self.now + LEASE, book.deadline)
        self.owner.watch_closed(watch, self.now)

    @precondition(lambda self: any(book.ready for book in self.books.values()) or self.now > 20.0)
    @rule(handle=handles, epoch=epochs, newer=newer)
    def release(self, handle, epoch, newer):
        book = self.alive(handle)
        attempt = newer + (book.attempt if book else 1)
        current = book is not None and epoch == EPOCH and attempt >= book.attempt
        assert self.owner.release(handle, epoch, attempt, self.now) == (current and book.ready)
        if current:
            book.ended = True  # so that a second True would be caught

    @rule(seconds=st.sampled_from([0.0, 1.0, 9.0, 29.0, 30.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def step(self):
        self.owner.sweep(self.now)
        self.hear()
        ended = {handle for handle in self.books if not self.alive(handle)}
        assert set(self.freed) == ended, "a swept owner frees exactly what ended"

    def hear(self):
        updates, freed = self.owner.take()
        self.freed += freed
        assert len({update.watch for update in updates}) == len(updates)
        return updates

    @invariant()
    def nothing_is_freed_twice_or_forgotten(self):
        self.hear()
        assert len(set(self.freed)) == len(self.freed)
        assert len(self.freed) + self.owner.active == len(self.books)

    def teardown(self):
        self.now += 1000.0
        self.step()
        assert self.owner.active == 0, "nothing outlives its deadline"


@dataclass
class Loan:
    """The destination pages of one start, and what became of them."""

    pages: tuple[int, ...]
    copied: dict[int, int] = field(default_factory=dict)  # destination -> source
    running: dict[int, CopyJob] = field(default_factory=dict)


class PullUnderAnyOrder(RuleBasedStateMachine):
    """One pull of 5 pages (the last one partial), in two shards."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.deadline = 0.0, 60.0
        shards = (RankPages(0, (3, 4, 5, 8, 9)), RankPages(1, (3, 4, 5, 8, 9)))
        handle = KvHandle("prefill:1", EPOCH, 0, 1, KvKind.TARGET, "m", 70, shards)
        self.pull = PullAttempt(1, handle, 1, page_size=16, deadline=self.deadline)
        self.said: list[object] = []
        self.loan: Loan | None = None
        self.tokens = 0
        self.done_said = self.valid_said = False
        self.next_page = 100
        self.last_change, self.last_state = 0.0, self.pull.state

    @precondition(lambda self: self.pull.state is PullState.WAITING)
    @rule(skip=st.integers(0, 5))
    def start(self, skip):
        assert self.loan is None, "pages are lent one start at a time"
        pages = tuple(range(self.next_page, self.next_page + 5))
        self.next_page += 5
        self.loan = Loan(pages, copied={page: 0 for page in pages[:skip]})
        self.pull.start(pages, skip, self.now)

    @rule(tokens=st.integers(-5, 200))
    def ready(self, tokens):
        self.tokens = max(self.tokens, tokens)
        self.pull.ready(tokens, self.now)

    @rule()
    def done(self):
        self.done_said = True
        self.pull.done((), b"", self.now)

    @precondition(lambda self: self.loan is not None and self.loan.running)
    @rule(data=st.data(), works=st.sampled_from([True, True, True, False]))
    def copy_stops(self, data, works):
        number = data.draw(st.sampled_from(sorted(self.loan.running)))
        job = self.loan.running.pop(number)
        error = None if works else TransferFailed("The link broke.")
        self.pull.copied(CopyResult(job, "local", 1, 0.0, error), self.now)

    @precondition(lambda self: self.pull.state is PullState.VALIDATING)
    @rule(valid=st.sampled_from([True, True, False]))
    def released(self, valid):
        self.valid_said = valid
        self.pull.released(valid, self.now)

    @rule(steps=st.integers(1, 5))
    def go_well(self, steps):
        """The undisturbed next steps, so that some orders come far."""
        for _ in range(steps):
            if self.pull.state is PullState.WAITING:
                self.start(0)
            elif self.loan is not None and self.loan.running:
                _, job = self.loan.running.popitem()
                self.pull.copied(CopyResult(job, "local", 1, 0.0), self.now)
            elif not self.done_said:
                self.done()
            self.every_word_is_right()

    @rule(how=st.sampled_from(["preempt", "preempt", "break", "cancel", "stray verdict"]))
    def disturb(self, how):
        match how:
            case "preempt":
                self.pull.preempt(self.now)
            case "break":
                self.pull.failed(TransferFailed("The Watch broke."), self.now)
            case "cancel":
                self.pull.cancel(self.now)
            case "stray verdict" if self.pull.state is not PullState.VALIDATING:
                self.pull.released(True, self.now)

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 5.0, 11.0]))
    def wait(self, seconds):
        self.now += seconds

    @invariant()
    def every_word_is_right(self):
        for action in self.pull.take_actions():
            match action:
                case CopyJob():
                    self.check_copy(action)
                case PagesFree(pages):
                    assert self.loan is not None and pages == self.loan.pages, "freed once, as lent"
                    assert not self.loan.running, "freed only after the last copy stopped"
                    self.loan = None
                case PullComplete():
                    assert self.valid_said and self.done_said and not self.loan.running
                    assert set(self.loan.copied) == set(self.loan.pages), "every page is there"
                    self.loan = None
            self.said.append(action)
        for once in (OpenWatch, CloseWatch, AskVerdict | SendRelease, PullComplete, PullIncomplete):
            assert sum(isinstance(action, once) for action in self.said) <= 1
        if any(isinstance(action, CloseWatch) for action in self.said):
            released = [action for action in self.said if isinstance(action, AskVerdict | SendRelease)]
            assert released, "the owner is always told"

    def check_copy(self, job: CopyJob):
        assert self.loan is not None and self.pull.state in (PullState.PULLING, PullState.DRAINING)
        self.loan.running[job.number] = job
        for source, page in zip(job.source.pages, job.dst_pages, strict=True):
            index = self.loan.pages.index(page)
            assert source == (3, 4, 5, 8, 9)[index], "page i of the source becomes page i of the prompt"
            assert self.done_said or self.tokens >= 16 * (index + 1), "only what is final is read"
            assert page not in self.loan.copied or job.source.rank == 1, "once for each shard"
            self.loan.copied[page] = source

    @invariant()
    def nothing_is_stuck(self):
        if self.pull.state is not self.last_state:
            self.last_change, self.last_state = self.now, self.pull.state
        limit = {
            PullState.WAITING: self.deadline,
            PullState.PULLING: self.deadline,
            PullState.VALIDATING: min(self.last_change + RELEASE_S, self.deadline),
            PullState.DRAINING: self.last_change + 2 * DRAIN_S,  # preempted, then cancelled
        }.get(self.pull.state, math.inf)
        self.pull.sweep(self.now)
        assert self.now < limit or self.pull.state is not self.last_state

    def teardown(self):
        for _ in range(2):
            self.wait(self.deadline + 2 * DRAIN_S)
            self.pull.sweep(self.now)
        self.every_word_is_right()
        assert self.pull.state in (PullState.COMPLETE, PullState.FAILED)
        while self.loan is not None and self.loan.running:
            _, job = self.loan.running.popitem()
            self.pull.copied(CopyResult(job, "local", 1, 0.0), self.now)
        self.every_word_is_right()
        assert self.loan is None and self.pull.over, "in the end every page is used or free"


OwnerUnderAnyOrder.TestCase.settings = BUDGET
PullUnderAnyOrder.TestCase.settings = BUDGET
TestOwner = OwnerUnderAnyOrder.TestCase
TestPull = PullUnderAnyOrder.TestCase
