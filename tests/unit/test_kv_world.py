"""Owner, pullers and real bytes in one small world with a slow and lossy wire.

Whatever is freed is scribbled over at once, copies go page by page, messages arrive late or never, and
time jumps. One promise is checked: a pull that completes holds exactly the bytes that were offered.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from eyas.common.errors import TransferFailed
from eyas.common.types import KvHandle, KvKind, RankPages
from kv_transfer.backends.base import CopyJob, CopyResult, copy_pages
from kv_transfer.owner import LeaseOwner, LeaseUpdate, PageOffer
from kv_transfer.puller import (
    AskVerdict,
    CloseWatch,
    OpenWatch,
    PagesFree,
    PullAttempt,
    PullComplete,
    PullState,
    SendRelease,
)

EPOCH, LEASE = 5, 30.0
POOL_PAGES, PAGE_BYTES, PROMPT_PAGES = 9, 4, 3
SCRIBBLE = 255

Message = Callable[[], None]


@dataclass
class Prompt:
    """A handle on the owner's side, and the bytes its pages are to hold: [PROMPT_PAGES, PAGE_BYTES]."""

    handle: KvHandle
    truth: np.ndarray
    filled: int = 0
    attempts: int = 0


@dataclass
class Job:
    """A copy under way: `left` are the single pages that were not copied yet."""

    copy: CopyJob
    left: list[CopyJob] = field(default_factory=list)


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.source = np.full((POOL_PAGES, PAGE_BYTES), SCRIBBLE, np.uint8)
        self.destination = np.full((POOL_PAGES, PAGE_BYTES), SCRIBBLE, np.uint8)
        self.source_free = list(range(POOL_PAGES))  # the last freed is the first reused
        self.destination_free = list(range(POOL_PAGES))
        self.owner = LeaseOwner("prefill:1", EPOCH, LEASE, itertools.count(1).__next__)
        self.prompts: dict[int, Prompt] = {}
        self.pulls: dict[
            int, tuple[PullAttempt, Prompt, int]
        ] = {}  # with its attempt; the number is the watch too
        self.lent: dict[int, tuple[int, ...]] = {}  # destination pages by pull, in the prompt's order
        self.jobs: dict[int, Job] = {}  # by the order in which they were asked for
        self.jobs_asked = 0
        self.up: deque[Message] = deque()  # to the owner, in order
        self.down: deque[Message] = deque()  # what the Watches say, in order
        self.verdicts: deque[Message] = deque()  # answers to Release, which overtake Watches at will
        self.kept: list[tuple[tuple[int, ...], np.ndarray]] = []  # completed pulls: pages and truth

    # --- the owner's worker ---

    @precondition(lambda self: len(self.source_free) >= PROMPT_PAGES)
    @rule(lasts=st.sampled_from([40.0, 200.0]))
    def offer(self, lasts):
        pages = tuple(self.source_free.pop() for _ in range(PROMPT_PAGES))
        shards = (RankPages(0, pages),)
        offer = PageOffer(KvKind.TARGET, "m", PROMPT_PAGES, shards, self.now + lasts)
        handle = self.owner.offer(offer, self.now)
        first = 3 * handle.id % 200
        truth = np.repeat(np.arange(first, first + PROMPT_PAGES, dtype=np.uint8)[:, None], PAGE_BYTES, 1)
        self.prompts[handle.id] = Prompt(handle, truth)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def fill_a_page(self, data):
        self.fill(data.draw(st.sampled_from(list(self.prompts.values()))))

    def fill(self, prompt):
        if prompt.filled < PROMPT_PAGES:
            self.source[prompt.handle.shards[0].pages[prompt.filled]] = prompt.truth[prompt.filled]
            prompt.filled += 1
            self.owner.filled(prompt.handle.id, prompt.filled, self.now)
        else:
            self.owner.finished(prompt.handle.id, (), b"", self.now)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def withdraw(self, data):
        self.owner.withdraw(data.draw(st.sampled_from(list(self.prompts))), self.now)

    @rule()
    def owner_step(self):
        self.owner.sweep(self.now)
        updates, freed = self.owner.take()
        for update in updates:
            self.down.append(lambda update=update: self.hear(update))
        for handle in freed:
            pages = self.prompts.pop(handle).handle.shards[0].pages
            self.source[list(pages)] = SCRIBBLE
            self.source_free += pages

    def hear(self, update: LeaseUpdate):
        pull = self.pulls[update.watch][0]
        if update.failure is not None:
            pull.failed(update.failure, self.now)
        elif update.done:
            pull.done((), b"", self.now)
        else:
            pull.ready(update.tokens, self.now)

    # --- the pullers' worker ---

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), newer=st.booleans())
    def attach(self, data, newer):
        prompt = data.draw(st.sampled_from(list(self.prompts.values())))
        prompt.attempts += newer
        number = len(self.pulls) + 1
        pull = PullAttempt(number, prompt.handle, prompt.attempts, page_size=1, deadline=self.now + 200.0)
        self.pulls[number] = (pull, prompt, prompt.attempts)
        self.puller_step()

    @precondition(lambda self: len(self.destination_free) >= PROMPT_PAGES)
    @rule()
    def lend_pages(self):
        waiting = [number for number, (pull, _, _) in self.pulls.items() if pull.state is PullState.WAITING]
        if waiting:
            pages = tuple(self.destination_free.pop() for _ in range(PROMPT_PAGES))
            self.lent[waiting[0]] = pages
            self.pulls[waiting[0]][0].start(pages, 0, self.now)
            self.puller_step()

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), how=st.sampled_from(["preempt", "cancel", "break"]))
    def disturb(self, data, how):
        copying = [job.copy.pull for job in self.jobs.values()]
        pull = self.pulls[data.draw(st.sampled_from(copying or list(self.pulls)))][0]
        match how:
            case "preempt":
                pull.preempt(self.now)
            case "cancel":
                pull.cancel(self.now)
            case "break":
                pull.failed(TransferFailed("The Watch broke."), self.now)
        self.puller_step()

    @rule()
    def puller_step(self):
        for number, (pull, prompt, attempt) in self.pulls.items():
            pull.sweep(self.now)
            handle = prompt.handle
            for action in pull.take_actions():
                match action:
                    case OpenWatch():
                        self.up.append(
                            lambda n=number, h=handle, a=attempt: self.owner.watch_opened(n, h, a, self.now)
                        )
                    case CloseWatch():
                        self.up.append(lambda n=number: self.owner.watch_closed(n, self.now))
                    case AskVerdict():
                        self.up.append(lambda n=number, h=handle, a=attempt: self.answer_release(n, h, a))
                    case SendRelease():
                        self.up.append(lambda h=handle, a=attempt: self.release(h, a))
                    case CopyJob():
                        pages = zip(action.source.pages, action.dst_pages, strict=True)
                        single = [CopyJob(number, 0, RankPages(0, (s,)), (d,)) for s, d in pages]
                        self.jobs_asked += 1
                        self.jobs[self.jobs_asked] = Job(action, single)
                    case PagesFree(pages):
                        self.destination[list(pages)] = SCRIBBLE
                        self.destination_free += pages
                        assert self.lent.pop(number) == pages
                    case PullComplete():
                        self.kept.append((self.lent.pop(number), prompt.truth))
                        self.check_kept()

    def release(self, handle: KvHandle, attempt: int) -> bool:
        valid = self.owner.release(handle.id, handle.epoch, attempt, self.now)
        self.owner_step()
        return valid

    def answer_release(self, number: int, handle: KvHandle, attempt: int):
        valid = self.release(handle, attempt)
        self.verdicts.append(lambda: self.pulls[number][0].released(valid, self.now))

    def check_kept(self):
        for pages, truth in self.kept:
            np.testing.assert_array_equal(self.destination[list(pages)], truth)

    # --- the machinery between them ---

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def copy_a_page(self, data):
        self.work_on(data.draw(st.sampled_from(list(self.jobs))))

    def work_on(self, number: int):
        job = self.jobs[number]
        if job.left:
            copy_pages(job.left.pop(0), self.source, self.destination)
        else:
            del self.jobs[number]
            self.pulls[job.copy.pull][0].copied(CopyResult(job.copy, "local", 0, 0.0), self.now)
            self.puller_step()

    @rule(data=st.data(), lost=st.booleans())
    def deliver(self, data, lost):
        wires = [wire for wire in (self.up, self.down, self.verdicts) if wire]
        if wires:
            message = data.draw(st.sampled_from(wires)).popleft()
            if not lost:
                message()
            self.puller_step()

    @precondition(lambda self: self.kept)
    @rule()
    def finish_a_sequence(self):
        self.check_kept()
        pages, _ = self.kept.pop(0)
        self.destination[list(pages)] = SCRIBBLE
        self.destination_free += pages

    @rule(rounds=st.integers(1, 4), hearing=st.booleans())
    def fine_weather(self, rounds, hearing):
        """Nothing goes wrong for a while (but perhaps the Watches are late), so that pulls come far."""
        for _ in range(rounds):
            for prompt in list(self.prompts.values()):
                self.fill(prompt)
            self.owner_step()
            for wire in (self.up, self.verdicts, self.down if hearing else deque()):
                while wire:
                    wire.popleft()()
            self.puller_step()
            if len(self.destination_free) >= PROMPT_PAGES:
                self.lend_pages()
            for _ in range(4):
                if self.jobs:
                    self.work_on(max(self.jobs))  # an older copy may lag behind

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 15.0, 31.0]))
    def wait(self, seconds):
        self.now += seconds

    def teardown(self):
        for _ in range(4):
            self.now += 300.0
            self.owner_step()
            self.puller_step()
            while self.jobs:
                self.work_on(min(self.jobs))
        self.check_kept()
        assert len(self.source_free) == POOL_PAGES, "the owner got every page back"
        kept = sum(len(pages) for pages, _ in self.kept)
        assert len(self.destination_free) + kept == POOL_PAGES, "the pullers kept or freed every page"
        assert all(pull.over for pull, _, _ in self.pulls.values())


World.TestCase.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)
TestWorld = World.TestCase
