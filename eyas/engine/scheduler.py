"""The scheduler: who runs in the next step, and who owns which pages. Torch-free, deterministic.

It composes every step as a list of `Work`: decode rows and verify trees of the running sequences first,
then prompt chunks under a token budget. Pages come from one pool, shared with the prefix cache; when they
run out the last admitted sequence goes back to the queue and is recomputed later. It knows nothing of
tensors, transports or time.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from eyas.engine.pages import PagePool
from eyas.engine.prefix_cache import PrefixCache
from eyas.engine.sequence import Kind, Sequence, Work
from kv_transfer.layout import pages_for

MANY_CHUNKS = 6
"""So many chunks as go beside one sequence wait, and prompts go ahead of the pace of the running ones."""


@dataclass(frozen=True)
class Limits:
    """Sizes that bound a step. `round_rows`: rows the widest verify or draft round may write.

    `rounds_ahead`: for how many rounds a running sequence has pages, this one included: one more where the
    next round is launched before this one's result is known. `beside`: prompt rows beside so many decoding
    sequences, while few prompt tokens wait or (True) many (None: as many as in a step of prompts alone).
    `yield_tokens_per_s`: a prompt of n tokens lets shorter ones go first that come within
    n / yield_tokens_per_s seconds (0: nobody yields).
    """

    page_size: int
    max_running: int
    chunk_tokens: int
    round_rows: int
    rounds_ahead: int = 2
    beside: Callable[[int, bool], int] | None = None
    yield_tokens_per_s: float = 0.0

    @property
    def rows_ahead(self) -> int:
        return self.rounds_ahead * self.round_rows

    def most_rows(self, pages: int) -> int:
        """Rows of the longest sequence that `pages` pages can hold."""
        return pages * self.page_size - self.rows_ahead


class Scheduler:
    def __init__(self, pool: PagePool, cache: PrefixCache, limits: Limits) -> None:
        self.pool = pool
        self.cache = cache
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.preempted: list[Sequence] = []  # since the caller last looked
        self.prompt_tokens = 0  # of all allocations so far, and how many of them were cached
        self.cached_tokens = 0
        self.preemptions = 0
        self.reclaim: Callable[[], bool] = lambda: False  # take pages back from a pull, now or soon
        self.pull_since: Callable[[], float] = lambda: math.inf  # arrival of who next pulls into free pages
        self._slots = list(range(limits.max_running - 1, -1, -1))  # free ones
        self._seats = itertools.count()
        self._starved = False  # a running sequence waits for such pages: nobody else may take them

    # --- sequences come and go -----------------------------------------------------------------------

    def enqueue(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """The sequence ended or was cancelled: its computed pages stay in the cache, unreferenced."""
        if seq in self.running:
            self._stand_up(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self._give_back(seq)

    def join(self, seq: Sequence) -> bool:
        """A sequence whose KV is already here (`pages`, `kv_len`) starts decoding, if a slot is free."""
        if self._taken >= self.limits.max_running:
            return False
        self._sit_down(seq)
        return True

    def fork(self, leader: Sequence, follower: Sequence) -> tuple[int, int] | None:
        """Give `follower` the leader's prompt rows: whole pages shared, the page of the last row copied.

        Returns (source page, copy), to be copied by the caller before the next step; or None if there is no
        page or slot, and then the follower waits and computes its rows itself.
        """
        rows, size = len(leader.prompt), self.limits.page_size
        boundary = (rows - 1) // size
        fresh = pages_for(rows + self.limits.rows_ahead, size) - boundary
        if len(self.running) >= self.limits.max_running or not self._make_room(fresh):
            self.waiting.appendleft(follower)
            return None
        shared, own = leader.pages[:boundary], self.pool.take(fresh)
        self.pool.share(shared)
        follower.pages = [*shared, *own]
        follower.kv_len = rows
        follower.draft_len = min(leader.draft_len, rows - 1)
        self._sit_down(follower)
        return leader.pages[boundary], own[0]

    # --- pages ---------------------------------------------------------------------------------------

    def allocate(
        self, tokens: SequenceOf[int], rows: int, computed: int | None = None
    ) -> tuple[list[int], int] | None:
        """Pages for `rows` rows of `tokens`: (pages, how many of them came from the cache); None: no room.

        No page with row `computed`, or one after it, comes from the cache.
        """
        cached = self.cache.match(tokens if computed is None else tokens[: computed + 1])
        fresh = pages_for(rows, self.limits.page_size) - len(cached)
        if self._starved or not self._make_room(fresh):
            self.pool.drop(cached)
            return None
        self.prompt_tokens += len(tokens)
        self.cached_tokens += len(cached) * self.limits.page_size
        return cached + self.pool.take(fresh), len(cached)

    def fits(self, rows: int) -> bool:
        """Could a sequence of `rows` rows ever run, alone?"""
        return rows <= self.limits.most_rows(self.pool.num_pages)

    def remember(self, seq: Sequence) -> None:
        """Cache the sequence's whole pages: those that have draft KV too, where that lives in the pages."""
        rows = min(seq.kv_len, seq.draft_len) if self.cache.lookahead else seq.kv_len
        self.cache.insert(seq.all_tokens(), seq.pages, rows)

    # --- one step ------------------------------------------------------------------------------------

    def schedule(self) -> list[Work]:
        """The next step. Empty when nothing can run."""
        self._starved = False
        works = [self._decode(seq) for seq in list(self.running) if self._may_decode(seq)]
        budget = self._chunk_budget(len(works))
        for seq in self.running:
            if seq.missing > 1 and budget > 0:
                works.append(self._chunk(seq, budget))
                budget -= len(works[-1].tokens)
        while budget > 0 and self.waiting and self._admit(seq := self._next_waiting()):
            self.waiting.remove(seq)
            self._sit_down(seq)
            works.append(self._chunk(seq, budget))
            budget -= len(works[-1].tokens)
        return works

    def _next_waiting(self) -> Sequence:
        """Who is admitted next: the first, or whoever came early for how little there is to compute."""
        rate = self.limits.yield_tokens_per_s
        if not rate or self.waiting[0].output:  # one that was preempted goes first
            return self.waiting[0]
        return min(self.waiting, key=lambda seq: seq.generation.arrived + len(seq.prompt) / rate)

    def _may_decode(self, seq: Sequence) -> bool:
        # `running` may have lost this sequence to a preemption earlier in the same step
        if seq.missing > 1 or not seq.pages:
            return False
        if seq.in_flight and len(seq.output) + seq.in_flight >= seq.generation.request.params.max_tokens:
            return False  # what is in flight ends it
        return seq.generation.kind is Kind.PREFILL or self._reserve(seq)

    def _decode(self, seq: Sequence) -> Work:
        root = seq.output[-1] if seq.output else seq.prompt[-1]
        tree = seq.tree
        if tree is None:
            return Work(seq, seq.kv_len, [root], None, sample=True, round=True)
        return Work(seq, seq.kv_len, [root, *tree.tokens], tree, sample=True, round=True)

    def _chunk(self, seq: Sequence, budget: int) -> Work:
        stop = min(seq.kv_len + budget, len(seq))
        return Work(seq, seq.kv_len, seq.tokens(seq.kv_len, stop), None, sample=stop == len(seq))

    def _admit(self, seq: Sequence) -> bool:
        """Give a waiting sequence pages for all its rows, if there is a slot for it and its forks."""
        if self._taken + 1 + len(seq.forks) > self.limits.max_running:
            return False
        if seq.in_flight or self.pull_since() < seq.generation.arrived:
            return False
        ahead = 0 if seq.generation.kind is Kind.PREFILL else self.limits.rows_ahead
        scores = seq.generation.scores
        found = self.allocate(seq.all_tokens(), len(seq) + ahead, None if scores is None else scores.next)
        if found is None:
            return False
        seq.pages, cached = found
        seq.kv_len = seq.draft_len = cached * self.limits.page_size
        seq.generation.cached_tokens = max(seq.generation.cached_tokens, seq.kv_len)
        return True

    def _reserve(self, seq: Sequence) -> bool:
        """Pages for all rows that rounds may write meanwhile; may preempt sequences admitted later."""
        rows = seq.kv_len + self.limits.rows_ahead
        need = pages_for(rows, self.limits.page_size) - len(seq.pages)
        while need > 0 and not self._make_room(need):
            if self.reclaim():
                self._starved = not self._make_room(need)
                if self._starved:
                    return False  # this sequence waits: the pages come when the copies have stopped
                continue
            victim = next(s for s in reversed(self.running) if s.generation.kind is not Kind.PREFILL)
            self._preempt(victim)
            if victim is seq:
                return False
        if need > 0:
            seq.pages += self.pool.take(need)
        return True

    def _chunk_budget(self, decoding: int) -> int:
        """Prompt rows of this step. Beside decode rows a few, unless many prompt tokens wait."""
        limits = self.limits
        if not decoding or limits.beside is None:
            return limits.chunk_tokens
        few, many, backlog = limits.beside(decoding, False), MANY_CHUNKS * limits.beside(1, False), 0
        for seq in itertools.chain(self.running, self.waiting):
            backlog += max(seq.missing - 1, 0)
            if backlog > many:
                return limits.beside(decoding, True)
        return few

    @property
    def _taken(self) -> int:
        """Slots of those who run, and those that prompts of several choices will need at their end."""
        return sum(1 + len(seq.forks) for seq in self.running)

    def _sit_down(self, seq: Sequence) -> None:
        """Into the running batch, on a slot of its own."""
        self.running.append(seq)
        seq.slot, seq.seat = self._slots.pop(), next(self._seats)

    def _stand_up(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._slots.append(seq.slot)
        seq.slot = seq.seat = -1

    def _preempt(self, seq: Sequence) -> None:
        self._stand_up(seq)
        self._give_back(seq)
        self.waiting.appendleft(seq)
        self.preempted.append(seq)
        self.preemptions += 1

    def _make_room(self, count: int) -> bool:
        if count > self.pool.free:
            self.cache.evict(count - self.pool.free)
        return count <= self.pool.free

    def _give_back(self, seq: Sequence) -> None:
        self.remember(seq)
        self.pool.drop(seq.pages)
        seq.pages, seq.kv_len, seq.draft_len, seq.tree = [], 0, 0, None
