"""The cold tier: pages that came to host memory are written to stores behind it, and come back from there.

Both ways are beside the loop: a thread writes, and another reads. What it cannot write in time it leaves out.
A store that fails is left alone for a while, in the way in which it failed: one that is full still gives.
What it loses is computed again. So is what it gives more slowly than the engine computes, by the reads until
now: such a store is tried again now and then.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from eyas.common.errors import EyasError
from eyas.common.logging import OutageLog
from eyas.engine.kv.host_tier import HostTier
from eyas.engine.kv.stores.store import PageStore, Parts
from kv_transfer.copy_threads import CopyThreads

BATCH = 32  # pages that are read before it is looked how many came
READERS = 4  # threads of a batch
MOST_WRITES = 256  # pages that wait to be written
REST_S = 5.0  # a store that failed is asked again then
TRY_S = 30.0  # and one that was too slow
NEWEST = 0.2  # the weight of the newest read in a store's pace
ENOUGH = 8  # reads that show it: the first ones also dial

WRITES, READS = "writes", "reads"
Then: TypeAlias = Callable[[], None]
PartsOf: TypeAlias = Callable[[int], Parts]
_log = logging.getLogger("eyas.engine")


@dataclass(eq=False)
class _Fetch:
    """Pages on their way to host memory. `back`, and then `names`: those that no read was begun for."""

    names: Iterator[bytes]
    deadline: float  # monotonic seconds
    then: Then
    back: list[bytes] = field(default_factory=list)

    def take(self) -> list[bytes]:
        """The next ones, BATCH at most."""
        back, self.back = self.back, []
        return [*back, *itertools.islice(self.names, BATCH - len(back))]


@dataclass(eq=False)
class _ColdRead:
    """The read of some pages of a fetch that runs. `behind`: others that go on when it has ended."""

    fetch: _Fetch
    names: Sequence[bytes]
    behind: list[_Fetch] = field(default_factory=list)


@dataclass
class StorePace:
    """Seconds in which a store gives a page while READERS read, as `reads` went until `at` (monotonic)."""

    page_s: float
    at: float
    reads: int = 0

    def after(self, seconds: float, now: float) -> StorePace:
        """The pace after one more read, which took `seconds`."""
        newest = seconds / READERS
        if self.is_old(now):
            return StorePace(newest, now, 1)
        return StorePace(self.page_s + NEWEST * (newest - self.page_s), now, self.reads + 1)

    def is_old(self, now: float) -> bool:
        """Whether it says nothing any more."""
        return not self.reads or now > self.at + TRY_S


NO_PACE = StorePace(0.0, 0.0)


@dataclass(frozen=True)
class StoreRest:
    """A store is not asked until then (monotonic seconds), because of what it said."""

    until: float
    reason: str


@dataclass
class StoreCounts:
    """Running totals, of pages and bytes. `failures`: calls that a store did not answer as it should; `slow`:
    prompts that were computed because that was faster.
    """

    hits: int = 0
    misses: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    failures: int = 0
    slow: int = 0


class ColdTier:
    """Behind `tier`, whose slots' bytes `parts` gives. `stores`: the nearest first. `page_s`: seconds that
    the engine takes to compute a page. One thread uses it.
    """

    def __init__(self, tier: HostTier, parts: PartsOf, stores: Sequence[PageStore], page_s: float) -> None:
        self._tier = tier
        self._parts = parts
        self._stores = list(stores)
        self._page_s = page_s
        self._rests: dict[tuple[str, str], StoreRest] = {}  # by store, of writes and of reads
        self._outages = {(store.name, way): OutageLog(_log) for store in stores for way in (WRITES, READS)}
        self._paces: dict[str, StorePace] = {}  # by store
        self._numbers = itertools.count()
        self._out: CopyThreads[int] = CopyThreads("cold-out")
        self._in: CopyThreads[int] = CopyThreads("cold-in")
        self._readers = ThreadPoolExecutor(READERS, "cold-read")
        self._writing: dict[int, Sequence[bytes]] = {}
        self._reading: dict[int, _ColdRead] = {}
        self.counts = StoreCounts()
        tier.on_saved = self._saved

    @property
    def busy(self) -> bool:
        """True if `poll` will have something to report soon."""
        return bool(self._writing or self._reading)

    def pays(self) -> bool:
        """True if some store works, and gives a page sooner than it is computed, as far as is known.

        Counts a prompt for which only slow ones work.
        """
        awake = self._awake(READS)
        quick = any(map(self._is_quick, awake))
        self.counts.slow += bool(awake) and not quick
        return quick

    @property
    def trouble(self) -> str:
        """The faults of stores now, as sentences; "": none."""
        now = time.monotonic()
        faults = [rest.reason for rest in list(self._rests.values()) if rest.until > now]
        slow = (store for store in self._stores if not self._is_quick(store))
        faults += [f"the {store.name} gives a page more slowly than it is computed" for store in slow]
        return "; ".join(faults)

    def fetch(self, names: Iterator[bytes], deadline: float, then: Then) -> None:
        """Brings pages of these names to host memory, up to the first that no store has. `then`: it is over.

        None is begun after `deadline` (monotonic seconds).
        """
        self._next(_Fetch(names, deadline, then))

    def poll(self) -> None:
        """Runs once a loop: takes what was read and written."""
        for done in self._out.finished():
            self._tier.release(self._writing.pop(done.job))
            self.counts.bytes_out += done.bytes
        for done in self._in.finished():
            read = self._reading.pop(done.job)
            count = done.bytes // self._tier.memory.page_bytes
            self._tier.settle(read.names, count)
            self.counts.hits += count
            self.counts.misses += count < len(read.names)
            self.counts.bytes_in += done.bytes
            if count == len(read.names):
                self._next(read.fetch)
            else:
                read.fetch.then()
            for fetch in read.behind:
                self._next(fetch)

    def close(self, deadline: float) -> bool:
        """Ends the threads; False if one still runs at `deadline` (monotonic seconds)."""
        self._tier.on_saved = None
        closed = all([thread.close(deadline) for thread in (self._out, self._in)])
        self._readers.shutdown(wait=closed, cancel_futures=True)
        for store in self._stores:
            store.close()
        return closed

    def _saved(self, names: Sequence[bytes]) -> None:
        """Pages have come to host memory from the GPU: they are written, unless too many wait."""
        if sum(map(len, self._writing.values())) + len(names) > MOST_WRITES:
            return
        slots, number = self._tier.hold(names), next(self._numbers)
        self._writing[number] = names
        self._out.submit(number, partial(self._write, tuple(zip(names, slots, strict=True))))

    def _next(self, fetch: _Fetch) -> None:
        """Begins to read the next batch, if there is one, and room for it. Where another brings its first
        page, it goes on behind that: a text that many begin with is read once.
        """
        names = fetch.take() if time.monotonic() < fetch.deadline else []
        while names and not (names := names[len(self._tier.find(names)) :]):  # those came meanwhile
            names = fetch.take()
        slots = self._tier.reserve(names)
        fetch.back = names[len(slots) :]
        if slots:
            number, names = next(self._numbers), names[: len(slots)]
            self._reading[number] = _ColdRead(fetch, names)
            self._in.submit(number, partial(self._read, tuple(zip(names, slots, strict=True))))
        elif names and (others := [read for read in self._reading.values() if names[0] in read.names]):
            others[0].behind.append(fetch)
        else:
            fetch.then()

    # --- on threads ------------------------------------------------------------------------------------

    def _write(self, pages: Sequence[tuple[bytes, int]]) -> int:
        """The bytes written."""
        return sum(self._put(store, pages) for store in self._awake(WRITES))

    def _put(self, store: PageStore, pages: Sequence[tuple[bytes, int]]) -> int:
        try:
            count = sum(store.put(name, self._parts(slot)) for name, slot in pages)
        except EyasError as error:
            self._failed(store, WRITES, error)
            return 0
        self._worked(store, WRITES)
        return count

    def _read(self, pages: Sequence[tuple[bytes, int]]) -> int:
        """The bytes of the first pages that came, without a gap. None is looked for behind one."""
        gaps: list[int] = []

        def came(place: int, page: tuple[bytes, int]) -> bool:
            if gaps and place > min(gaps):
                return False
            here = self._read_one(*page)
            if not here:
                gaps.append(place)
            return here

        reads = [self._readers.submit(came, *place) for place in enumerate(pages)]
        wait(reads)  # those behind a gap too: they write to slots that are free when this returns
        return len(list(itertools.takewhile(Future.result, reads))) * self._tier.memory.page_bytes

    def _read_one(self, name: bytes, slot: int) -> bool:
        """Whether it came. Stores nearer than the one that had it get it, too."""
        nearer: list[PageStore] = []
        for store in filter(self._is_quick, self._awake(READS)):
            try:
                began = time.monotonic()
                here = store.get(name, self._parts(slot))
                self._worked(store, READS)
                self._took(store, time.monotonic() - began, here=here)
                if here:
                    for other in nearer:
                        self._put(other, [(name, slot)])
                    return True
                nearer.append(store)
            except EyasError as error:
                self._failed(store, READS, error)
        return False

    def _took(self, store: PageStore, seconds: float, *, here: bool) -> None:
        """A look that met nothing is quick, unless the store is slow."""
        now = time.monotonic()
        pace = self._paces.get(store.name, NO_PACE)
        if here or seconds / READERS > self._page_s:
            self._paces[store.name] = pace.after(seconds, now)

    def _is_quick(self, store: PageStore) -> bool:
        pace = self._paces.get(store.name, NO_PACE)
        known = pace.reads >= ENOUGH and not pace.is_old(time.monotonic())
        return not known or pace.page_s < self._page_s

    def _awake(self, way: str) -> list[PageStore]:
        now = time.monotonic()
        rests = [self._rests.get((store.name, way)) for store in self._stores]
        return [s for s, rest in zip(self._stores, rests, strict=True) if rest is None or rest.until <= now]

    def _failed(self, store: PageStore, way: str, error: EyasError) -> None:
        self.counts.failures += 1
        self._rests[store.name, way] = StoreRest(time.monotonic() + REST_S, error.message)
        text = "%s; its %s are tried every %g s"
        self._outages[store.name, way].failed(text, error.message, way, REST_S)

    def _worked(self, store: PageStore, way: str) -> None:
        self._outages[store.name, way].works("%s of the %s go on", way, store.name)
