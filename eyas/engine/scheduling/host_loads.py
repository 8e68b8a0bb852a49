"""Loads of prompt pages from host memory: a sequence leaves the queue until its pages are in the cache.

Pages are loaded into the prefix cache, not for a sequence, which then matches them like any other pages. So a
cancelled sequence leaves nothing to clean up. If a load fails or is slow, the prompt is computed. Where the
host tier has cold stores, pages come from the stores to the host first, in the same way; the first sequences
of the queue are prefetched before they are scheduled.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

from eyas.common.errors import EyasError
from eyas.engine.batch.sequence import Sequence
from eyas.engine.ipc.messages import HostCache
from eyas.engine.kv.cold_tier import ColdTier
from eyas.engine.kv.host_tier import HostTier
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.prefix_cache import PrefixCache

LEAST_TOKENS = 256  # a load takes one iteration of the loop, which can compute fewer itself
LOAD_TIMEOUT_S = 1.0  # the maximum time that a sequence waits for its pages
LOOK_AHEAD = 4  # the number of queued sequences whose pages are prefetched from stores


class LoadDecision(enum.Enum):
    """The decision about the sequence that is scheduled next."""

    COMPUTE = "compute"  # no pages to load, or loading would take longer
    WAIT = "wait"  # stays first in the queue: the running loads need the free pages
    LOADS = "loads"  # leaves the queue until `HostLoads.poll` returns it


@dataclass(eq=False)
class _ColdFetch:
    """Pages on their way from a store to the host. `sequence`: waits for them, until `deadline` (monotonic
    seconds) at the latest; None once it has stopped waiting. `queued`: the sequence in the queue for which
    they are prefetched.
    """

    sequence: Sequence | None
    deadline: float
    queued: Sequence | None = field(default=None, kw_only=True)


class _Wait(NamedTuple):
    """The sequence that stays first in the queue, and the sizes it was judged by: saves lookups."""

    sequence: Sequence | None = None
    sizes: tuple[int, int] = (0, 0)


@dataclass(eq=False)
class _HostLoad(_ColdFetch):
    """Pages on their way from the host. After the load `pages` contain the first rows of `tokens`.

    `ahead`: the number of further pages that the sequence needs to run.
    """

    tokens: SequenceOf[int]
    salt: bytes
    pages: list[int]
    ahead: int


class HostLoads:
    """Runs the loads of waiting sequences.

    `page_size`: rows per page. `prompt_rate`: tokens of a prompt that this engine computes per second.
    `cold`: the stores behind the tier.
    """

    def __init__(
        self, tier: HostTier, pool: PagePool, cache: PrefixCache, page_size: int, prompt_rate: float
    ) -> None:
        self.tier = tier
        self.cold: ColdTier | None = None
        self._pool = pool
        self._cache = cache
        self._size = page_size
        self._rate = prompt_rate
        self._loads: list[_HostLoad] = []
        self._fetches: list[_ColdFetch] = []
        self._returned: list[Sequence] = []
        self._wait = _Wait()

    def close(self, deadline: float) -> bool:
        """Ends all copies. False if one still runs at `deadline` (monotonic seconds): no memory is freed."""
        if self.cold is not None and not self.cold.close(deadline):
            return False
        return self.tier.memory.close(deadline)

    @property
    def counts(self) -> HostCache:
        """Running totals."""
        memory = self.tier.memory
        loaded = self.tier.loaded * self._size
        host = (self.tier.cached_pages, loaded, memory.bytes_out, memory.bytes_in)
        if self.cold is None:
            return HostCache(*host)
        cold = self.cold.counts
        stores = (cold.hits * self._size, cold.misses, cold.bytes_out, cold.bytes_in)
        return HostCache(*host, *stores, cold.failures, cold.slow, self.cold.trouble)

    @property
    def changed(self) -> bool:
        """True if `take_changes` has something to report."""
        return self.tier.changed

    def take_changes(self, most: int) -> tuple[bytes, bytes]:
        """Takes the names of pages saved to and dropped from the host; see `HostTier.take_changes`."""
        return self.tier.take_changes(most)

    @property
    def loading(self) -> bool:
        """True if pages are on their way from the host into the cache, or to the host for a sequence."""
        return bool(self._loads or self._fetches)

    @property
    def copying(self) -> bool:
        """True if a copy runs, so that `poll` must be called soon."""
        return self.tier.busy or (self.cold is not None and self.cold.busy)

    def ask(self, sequence: Sequence, tokens: SequenceOf[int], pages: int) -> LoadDecision:
        """Starts to load the pages that continue the cached prefix of `tokens`, if loading is faster.

        `pages`: the number that the sequence needs to run. A sequence waits for loads only once.
        """
        if sequence.fetched:
            return LoadDecision.COMPUTE
        if self._awaits(sequence):
            return LoadDecision.LOADS
        if self._wait.sequence is sequence and self._judge(*self._wait.sizes) is LoadDecision.WAIT:
            return LoadDecision.WAIT
        cached = self._cache.match(tokens, sequence.salt)
        names = self.tier.find(self._cache.names_after(tokens, cached, sequence.salt))
        if fetch := self._fetch(sequence, tokens, cached, len(names)):
            self._pool.drop(cached)
            fetch.sequence = sequence
            return LoadDecision.LOADS
        sizes = len(names), pages - len(cached)
        answer = self._judge(*sizes)
        if answer is not LoadDecision.LOADS:
            self._pool.drop(cached)
            self._wait = _Wait(sequence if answer is LoadDecision.WAIT else None, sizes)
            return answer
        fresh = self._pool.take(len(names), settled=True)
        joined = [*cached, *fresh]
        until, ahead = time.monotonic() + LOAD_TIMEOUT_S, pages - len(joined)
        load = _HostLoad(sequence, until, tokens, sequence.salt, joined, ahead)
        self._loads.append(load)
        sequence.fetched = True
        self.tier.load(names, fresh, partial(self._stopped, load))
        return answer

    def _fetch(
        self, sequence: Sequence, tokens: SequenceOf[int], cached: SequenceOf[int], found: int
    ) -> _ColdFetch | None:
        """Starts to fetch the pages after the `found` host pages from the stores, once per sequence.

        None: no fetch started, or it ended immediately (no free slot, or its first page is on its way).
        """
        left = (len(tokens) - 1) // self._size - len(cached) - found
        if self.cold is None or sequence.sought:
            return None
        sequence.sought = True
        if left * self._size < LEAST_TOKENS:
            return None
        if not self.cold.pays():
            return None
        fetch = _ColdFetch(None, time.monotonic() + LOAD_TIMEOUT_S)
        self._fetches.append(fetch)
        names = islice(self._cache.names_after(tokens, cached, sequence.salt), found, None)
        self.cold.fetch(names, fetch.deadline, partial(self._fetched, fetch))
        return fetch if fetch in self._fetches else None

    def look_ahead(self, waiting: Iterable[Sequence]) -> None:
        """Runs once per loop: prefetches pages of the first queued sequences from the stores."""
        if self.cold is None or len(self._fetches) >= LOOK_AHEAD:
            return
        for sequence in islice(waiting, LOOK_AHEAD):
            if not sequence.sought and sequence.generation.scores is None:
                tokens = sequence.all_tokens()
                cached = self._cache.match(tokens, sequence.salt)
                names = self.tier.find(self._cache.names_after(tokens, cached, sequence.salt))
                if fetch := self._fetch(sequence, tokens, cached, len(names)):
                    fetch.queued = sequence
                self._pool.drop(cached)

    def _awaits(self, sequence: Sequence) -> bool:
        """Makes a sequence wait for its prefetch, if one runs; otherwise returns False."""
        for fetch in self._fetches:
            if fetch.queued is sequence:
                fetch.sequence, fetch.queued = sequence, None
                return True
        return False

    @property
    def _waiting(self) -> list[_ColdFetch]:
        return [*self._loads, *self._fetches]

    def _fetched(self, fetch: _ColdFetch) -> None:
        self._fetches.remove(fetch)
        if fetch.sequence is not None:
            self._returned.append(fetch.sequence)

    def _judge(self, count: int, needed: int) -> LoadDecision:
        """Decides about a sequence that needs `needed` pages; `count` of them could be loaded."""
        tokens = count * self._size
        if tokens < LEAST_TOKENS or self.tier.load_s(count) >= tokens / self._rate:
            return LoadDecision.COMPUTE
        pool = self._pool
        if needed + sum(load.ahead for load in self._loads) > pool.num_pages - pool.used:
            return LoadDecision.WAIT if self._loads else LoadDecision.COMPUTE
        if count > pool.settled:
            self._cache.evict(count - pool.settled, spare=True)
        if count <= pool.settled:
            return LoadDecision.LOADS
        soon = self._loads or self._cache.spared or count <= pool.free
        return LoadDecision.WAIT if soon else LoadDecision.COMPUTE

    def _stopped(self, load: _HostLoad, error: EyasError | None) -> None:
        self._loads.remove(load)
        if error is None:
            self._cache.insert(load.tokens, load.pages, len(load.pages) * self._size, salt=load.salt)
        self._pool.drop(load.pages)
        if load.sequence is not None:
            self._returned.append(load.sequence)

    def forget(self, sequence: Sequence) -> None:
        """Forgets a removed sequence. The pages being loaded for it are still cached."""
        for waiting in self._waiting:
            if waiting.sequence is sequence:
                waiting.sequence = None
        if self._wait.sequence is sequence:
            self._wait = _Wait()

    def poll(self, now: float) -> list[Sequence]:
        """Runs once per loop: returns the sequences that rejoin the queue."""
        self.tier.poll()
        if self.cold is not None:
            self.cold.poll()
        for waiting in self._waiting:
            if waiting.sequence is not None and now > waiting.deadline:
                self._returned.append(waiting.sequence)
                waiting.sequence = None
        back, self._returned = self._returned, []
        return back
