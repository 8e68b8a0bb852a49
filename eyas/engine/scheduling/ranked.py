"""Several schedulers as one: every attention rank has slots, a queue, pages and a prefix cache of its own.

A request goes to one rank, when it comes or when its pulled pages do, and stays there once it has begun, with
all its choices: they share the pages of its prompt. What a rank does with its sequences is the business of
its `Scheduler`; a step is what all of them compose, rank after rank.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf
from typing import TypeAlias

from eyas.engine.batch.sequence import Generation, Sequence, SequenceWork
from eyas.engine.ipc.messages import StateCache
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.prefix_cache import PrefixCache
from eyas.engine.scheduling.elsewhere import IncomingToRanks
from eyas.engine.scheduling.fairness import CallShares
from eyas.engine.scheduling.placement import RankOffer, choose
from eyas.engine.scheduling.scheduler import Scheduler


class RankedPages:
    """The pages of all ranks, numbered through: `pools[r]` has those from r * pools[0].num_pages on."""

    def __init__(self, pools: SequenceOf[PagePool]) -> None:
        self._pools = pools

    @property
    def used(self) -> int:
        """The number of pages with an owner."""
        return sum(pool.used for pool in self._pools)

    @property
    def copying(self) -> bool:
        """True while the device copies pages and no step follows yet."""
        return any(pool.copying for pool in self._pools)

    def launched(self) -> None:
        """Counts a launched step: of all ranks, an idle one too."""
        for pool in self._pools:
            pool.launched()

    def landed(self) -> None:
        """The oldest step in flight writes no more."""
        for pool in self._pools:
            pool.landed()

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to each page."""
        for page in pages:
            self._pools[self.rank_of(page)].share((page,))

    def drop(self, pages: Iterable[int]) -> None:
        """Removes an owner of each page."""
        for page in pages:
            self._pools[self.rank_of(page)].drop((page,))

    def rank_of(self, page: int) -> int:
        """The rank that owns a page."""
        return page // self._pools[0].num_pages


class RankedCache:
    """The prefix caches of all ranks; each holds its own rank's pages."""

    def __init__(self, caches: SequenceOf[PrefixCache]) -> None:
        self._caches = caches
        self.shape = caches[0].shape

    @property
    def changed(self) -> bool:
        """True if any cache has changes to report; see `PrefixCache.changed`."""
        return any(cache.changed for cache in self._caches)

    def take_changes(self, most: int) -> tuple[bytes, bytes]:
        """The changes of all ranks, one after another; see `PrefixCache.take_changes`; `most` pages of each.

        A prefix that two ranks hold is told twice, and is gone for those who hear of it once the first drops
        it: it is advice.
        """
        came, left = zip(*(cache.take_changes(most) for cache in self._caches), strict=True)
        return b"".join(came), b"".join(left)

    def origins(self, most: int) -> tuple[bytes, bytes, bytes]:
        """The context of the pages that `take_changes` reports next; see `PrefixCache.origins`."""
        before, tokens, salts = zip(*(cache.origins(most) for cache in self._caches), strict=True)
        return b"".join(before), b"".join(tokens), b"".join(salts)


class RankView:
    """The prompts that come from elsewhere, as one rank's scheduler sees them: those given its pages."""

    def __init__(self, incoming: IncomingToRanks, rank: int) -> None:
        self._incoming = incoming
        self._rank = rank

    def waiting(self) -> Iterable[Generation]:
        """Prompts that wait for pages, of any rank: none has been chosen for them."""
        return self._incoming.waiting()

    def coming(self) -> Iterable[Generation]:
        """Prompts that were given pages of this rank."""
        return filter(self._here, self._incoming.coming())

    def preempt(self) -> bool:
        """Take pages of this rank back from one of these, now or soon; False if none gives any back."""
        return self._incoming.preempt(self._here)

    def _here(self, generation: Generation) -> bool:
        return generation.rank == self._rank


class DataParallelScheduler:
    """The schedulers of all ranks behind the interface of one. `limits` are those of each rank."""

    host = None  # no rank's pages leave for the host's memory
    adapters = None  # and no rank has slots of adapters
    states = StateCache()  # models with some are not served by attention ranks

    def __init__(self, ranks: SequenceOf[Scheduler]) -> None:
        self._ranks = tuple(ranks)
        self.limits = ranks[0].limits
        self.tables = ranks[0].tables  # what is the same for all ranks of them
        self.pool = RankedPages([rank.pool for rank in ranks])
        self.cache = RankedCache([rank.cache for rank in ranks])
        self.preempted: list[Sequence] = []  # since the caller last emptied it

    @property
    def slots(self) -> int:
        """The number of sequences that a step may have."""
        return sum(rank.slots for rank in self._ranks)

    @property
    def probed(self) -> tuple[PagePool, PrefixCache]:
        """A pool and cache whose pages a link is tried with: any will do."""
        return self._ranks[0].probed

    @property
    def crowded(self) -> bool:
        """True if any rank is crowded (`Scheduler.crowded`): the others wait for it."""
        return any(rank.crowded for rank in self._ranks)

    @property
    def running(self) -> list[Sequence]:
        """Running sequences of all ranks, rank after rank."""
        return [seq for rank in self._ranks for seq in rank.running]

    @property
    def waiting(self) -> list[Sequence]:
        """Waiting sequences of all ranks, rank after rank."""
        return [seq for rank in self._ranks for seq in rank.waiting]

    @property
    def prompt_tokens(self) -> int:
        """Running total over all allocations."""
        return sum(rank.prompt_tokens for rank in self._ranks)

    @property
    def cached_tokens(self) -> int:
        """The number of `prompt_tokens` that came from a prefix cache."""
        return sum(rank.cached_tokens for rank in self._ranks)

    @property
    def preemptions(self) -> int:
        """The number of times that a sequence has lost its place."""
        return sum(rank.preemptions for rank in self._ranks)

    def enqueue(self, seq: Sequence) -> None:
        """Puts a sequence into the queue of its request's rank, which the first one chooses."""
        generation = seq.generation
        if generation.rank is None:
            generation.rank = self._chosen(seq.all_tokens(), seq.salt)
        self._of(generation).enqueue(seq)

    def remove(self, seq: Sequence) -> None:
        """Frees all that an ended or cancelled sequence holds. Its computed pages stay in the cache."""
        self._of(seq.generation).remove(seq)

    def arrived(self, seq: Sequence) -> None:
        """The sequence's KV has come, in pages of its rank: it waits for a slot there."""
        self._of(seq.generation).arrived(seq)

    def seat_adapters(self) -> bool:
        """False: there are none."""
        return False

    def join(self) -> Sequence | None:
        """Gives a slot to a sequence whose KV has come. None: nothing joins now."""
        return next((seq for rank in self._ranks if (seq := rank.join()) is not None), None)

    def fork(self, leader: Sequence, follower: Sequence) -> list[tuple[int, int]] | None:
        """Forks on the leader's rank, as `Scheduler.fork`."""
        return self._of(leader.generation).fork(leader, follower)

    def lend(self, generation: Generation, rows: int) -> tuple[list[int], int] | None:
        """Lends pages, as `Scheduler.lend`; the rank is chosen anew as long as there is no room."""
        rank = self._chosen(generation.request.prompt_ids, generation.request.salt)
        lent = self._ranks[rank].lend(generation, rows)
        if lent is not None:
            generation.rank = rank
        return lent

    def beside(self, leased: Collection[int]) -> int:
        """Pages beside the leased ones, as `Scheduler.beside`, on the rank that has the most."""
        taken = Counter(map(self.pool.rank_of, leased))
        return max(rank.pool.num_pages - taken[number] for number, rank in enumerate(self._ranks))

    @property
    def unowned(self) -> int:
        """Pages without an owner, as `Scheduler.unowned`, on the rank that has the most."""
        return max(rank.unowned for rank in self._ranks)

    def first(self, generations: SequenceOf[Generation]) -> Generation:
        """The generation whose turn it is, by the shares of all ranks together."""
        return min(generations, key=CallShares.together(rank.shares() for rank in self._ranks).turn)

    def remember(self, seq: Sequence, below: int | None = None) -> None:
        """Caches the sequence's pages, as `Scheduler.remember`."""
        self._of(seq.generation).remember(seq, below)

    def passed(self, work: SequenceWork) -> None:
        """See `Scheduler.passed`."""
        self._of(work.seq.generation).passed(work)

    def state_copies(self) -> list[tuple[int, int]]:
        """None: models with states are not served by attention ranks."""
        return []

    def disown(self, seq: Sequence) -> None:
        """See `Scheduler.disown`."""
        self._of(seq.generation).disown(seq)

    def flush(self) -> int | None:
        """Flushes all ranks or none, as `Scheduler.flush`."""
        if self.pool.used:
            return None
        return sum(rank.flush() or 0 for rank in self._ranks)

    def retract(self) -> int:
        """See `Scheduler.retract`: on all ranks."""
        count = sum(rank.retract() for rank in self._ranks)
        self._take_preempted()
        return count

    def complete_rows(self, seq: Sequence) -> int:
        """The rows that may be cached, as `Scheduler.complete_rows`."""
        return self._of(seq.generation).complete_rows(seq)

    def schedule(self) -> list[SequenceWork]:
        """Composes the next step, rank after rank. Empty when nothing can run on any."""
        works = self._composed()
        # What waits now could not run: another rank may take it, with the next step if there is one.
        if self._level() and not works:
            works = self._composed()
        return works

    def _composed(self) -> list[SequenceWork]:
        works = list(itertools.chain.from_iterable(rank.schedule() for rank in self._ranks))
        self._take_preempted()
        return works

    def _take_preempted(self) -> None:
        for rank in self._ranks:
            self.preempted += rank.preempted
            rank.preempted = []

    def _level(self) -> bool:
        """A rank that has a slot and no queue gets a request from the longest queue, one that has not begun.

        Else requests would wait behind long ones while another rank is idle. Did one get one?
        """
        moved = False
        longest = max(self._ranks, key=lambda rank: len(rank.waiting))
        for number, rank in enumerate(self._ranks):
            if rank.waiting or len(rank.running) + len(rank.joining) >= rank.slots:
                continue
            seq = longest.pass_on()
            if seq is None:
                break
            seq.generation.rank = number
            rank.enqueue(seq)
            moved = True
        return moved

    def _of(self, generation: Generation) -> Scheduler:
        """The scheduler of a request. Without a rank it has nothing anywhere: any scheduler says so."""
        return self._ranks[generation.rank or 0]

    def _chosen(self, tokens: SequenceOf[int], salt: bytes) -> int:
        return choose([_place(rank, tokens, salt) for rank in self._ranks])


def _place(rank: Scheduler, tokens: SequenceOf[int], salt: bytes) -> RankOffer:
    sequences = len(rank.running) + len(rank.waiting) + len(rank.joining)
    return RankOffer(rank.cache.reach(tokens, salt), sequences, rank.pool.free)


Schedulers: TypeAlias = Scheduler | DataParallelScheduler
"""What an engine schedules with."""
