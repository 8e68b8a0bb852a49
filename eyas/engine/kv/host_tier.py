"""The host tier: pages about to be evicted from the prefix cache are copied to host memory, and come back.

A page is copied while it is still in the cache, idle and among the next to be evicted, so nothing waits for a
copy. One that is evicted before its copy has ended is lost to the tier. A full tier drops the page that left,
or was wanted, longest ago. A tier that is larger than the pool copies each page as soon as it is idle and no
step in flight may write it, and until then sequences that have no page yet are given others: under load few
pages are idle, and those not for long. So it is where pages go on from here (`on_saved`): each shall be there
when this worker is not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import Protocol

from eyas.common.errors import EyasError
from eyas.common.page_names import SHORT_BYTES
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.prefix_cache import CacheNode, PrefixCache
from kv_transfer.copy_threads import Then

AHEAD = 1024  # pages that are copied in advance: the ones that are evicted next
BATCH = 64  # pages per copy: one that stopped early is no great loss
MOST_IDLE = 1024  # pages that fell idle, looked at per loop where all go on


class TierMemory(Protocol):
    """Slots for pages, of which the first `ready` can be used. `poll` calls each `then`."""

    ready: int
    page_bytes: int
    bytes_out: int
    bytes_in: int
    copy_s: float

    @property
    def copying(self) -> bool:
        """True while there is a copy that `poll` has not reported."""
        ...

    def copy_out(self, pages: Sequence[int], slots: Sequence[int], then: Then) -> None:
        """Pages to slots."""
        ...

    def copy_in(self, slots: Sequence[int], pages: Sequence[int], then: Then) -> None:
        """Slots to pages."""
        ...

    def poll(self) -> None:
        """Tells of the copies that have stopped."""
        ...

    def close(self, deadline: float) -> bool:
        """Ends all copies; False if one still runs at `deadline` (monotonic seconds)."""
        ...


@dataclass(slots=True)
class _HostPage:
    """A page on the host. `copies` of its slot run; the first one fills it."""

    slot: int
    copies: int = 0
    filled: bool = False


class HostTier:
    """Owns the slots of `memory`. One thread uses it."""

    def __init__(self, pool: PagePool, cache: PrefixCache, memory: TierMemory) -> None:
        self._pool = pool
        self._cache = cache
        self.memory = memory
        self._pages: OrderedDict[bytes, _HostPage] = OrderedDict()  # by name; the next to be dropped first
        self._free: list[int] = []
        self._known = 0  # slots that were ready, ever
        self._ahead = min(AHEAD, pool.num_pages)
        self._seen = 0  # of the cache's turnover, when pages were last chosen
        self._arrived = 0  # and of its arrivals
        self.on_saved: Callable[[Sequence[bytes]], None] | None = None  # hears what came from the pool
        self._saving: set[CacheNode] = set()  # copies of these run
        self._later: list[CacheNode] = []  # and of these will, once no step may write them
        self._changes: dict[bytes, bool] = {}  # since they were last told: whether the page came
        self.cached_pages = 0  # pages that can come back
        self.loaded = 0  # pages that came back, ever

    @property
    def busy(self) -> bool:
        """True if `poll` will have something to do soon."""
        return self.memory.copying or bool(self._later)

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def find(self, names: Iterable[bytes]) -> list[bytes]:
        """The first of these names, as many as are here without a gap."""
        return list(takewhile(lambda name: name in self._pages and self._pages[name].filled, names))

    def load(self, names: Sequence[bytes], pages: Sequence[int], then: Then) -> None:
        """Copies what was found to pages that no step in flight writes."""
        for name in names:
            self._pages[name].copies += 1
        self._touch(names)
        slots = [self._pages[name].slot for name in names]
        self.memory.copy_in(slots, pages, partial(self._was_loaded, names, then))

    def clear(self) -> int:
        """Drops every page that can come back, while none is being loaded; returns how many there were.

        One that is being copied is dropped as its copy ends: one that comes has left the cache by then, and
        one that is written to a store keeps its slot until `release`.
        """
        filled = [(name, page) for name, page in self._pages.items() if page.filled]
        for name, page in filled:
            self._empty(name, page)
            if not page.copies:
                self._free.append(self._pages.pop(name).slot)
        return len(filled)

    def hold(self, names: Sequence[bytes]) -> list[int]:
        """The slots of pages that can come back, which stay until `release`."""
        for name in names:
            self._pages[name].copies += 1
        return [self._pages[name].slot for name in names]

    def release(self, names: Sequence[bytes]) -> None:
        """What `hold` held may be dropped, and what was cleared meanwhile is."""
        for name in names:
            page = self._pages[name]
            page.copies -= 1
            if not page.filled and not page.copies:
                self._free.append(self._pages.pop(name).slot)

    def reserve(self, names: Sequence[bytes]) -> list[int]:
        """Slots for the first of these pages, as many as there is room for, until `settle`: none is here."""
        slots: list[int] = []
        for name in names:
            if name in self._pages or (slot := self._slot()) is None:
                break
            self._pages[name] = _HostPage(slot, copies=1)
            slots.append(slot)
        return slots

    def settle(self, names: Sequence[bytes], count: int) -> None:
        """Ends a load: of the pages that `reserve` gave slots to, the first `count` have come, and no other
        will.
        """
        for name in names[:count]:
            self._pages[name].copies -= 1
            self._fill(name, self._pages[name])
        for name in names[count:]:
            self._free.append(self._pages.pop(name).slot)
        self._touch(names[:count])

    def load_s(self, pages: int) -> float:
        """Seconds that loading `pages` takes, as copies went until now; 0.0 before the first."""
        memory = self.memory
        return pages * memory.page_bytes * memory.copy_s / max(memory.bytes_out + memory.bytes_in, 1)

    def poll(self) -> None:
        """Runs once a loop: takes copies that stopped, and copies pages that will be evicted soon."""
        self.memory.poll()
        self._free += range(self._known, self.memory.ready)
        self._known = self.memory.ready
        turnover = self._cache.turnover - self._seen
        early = self.on_saved is not None or self._known > self._pool.num_pages
        arrived = self._cache.arrivals - self._arrived
        if early and (arrived or self._later):
            self._seen, self._arrived = self._cache.turnover, self._cache.arrivals
            idle = self._cache.last_in(min(arrived, MOST_IDLE, self._known))
            nodes = dict.fromkeys((*filter(self._cache.holds, self._later), *idle))
            self._later = self._save(nodes)
            self._cache.spared = {*self._saving, *self._later}
        elif self._pool.free < self._ahead and turnover >= min(self._ahead // 4, BATCH * 4):
            self._seen = self._cache.turnover  # no more pages are looked at than went by, a few times over
            self._save(self._cache.next_out(min(self._ahead, self._known)))

    def _save(self, nodes: Iterable[CacheNode]) -> list[CacheNode]:
        """Copies those that are not here; returns those that a step in flight may still write.

        (More than there are slots would take each other's.)
        """
        is_quiet, here = self._pool.is_quiet, self._pages
        soon: list[CacheNode] = []
        later: list[CacheNode] = []
        old: list[bytes] = []
        for node in nodes:
            if not is_quiet(node.page):
                later += () if node.name in here else (node,)
            elif node.name in here:
                old.append(node.name)
            else:
                soon.append(node)
        self._touch(old)
        self._copy_out(soon)
        return later

    def _copy_out(self, nodes: Sequence[CacheNode]) -> None:
        """Copies pages out, as many of them as there are slots for."""
        fresh: list[CacheNode] = []
        for node in nodes:
            slot = self._slot()
            if slot is None:
                break
            self._pages[node.name] = _HostPage(slot, copies=1)
            fresh.append(node)
        self._saving.update(fresh)
        self._cache.spared |= self._saving
        self._touch([node.name for node in fresh])
        self._touch_above(fresh)
        for first in range(0, len(fresh), BATCH):
            nodes = fresh[first : first + BATCH]
            pages, slots = [node.page for node in nodes], [self._pages[node.name].slot for node in nodes]
            self.memory.copy_out(pages, slots, partial(self._was_saved, nodes))

    def _slot(self) -> int | None:
        """An empty one, if need be of the page that is dropped for it; None: copies need all of them."""
        if self._free:
            return self._free.pop()
        if not self._pages:
            return None
        name, oldest = next(iter(self._pages.items()))
        if oldest.copies:
            return None
        del self._pages[name]
        if oldest.filled:
            self._empty(name, oldest)
        return oldest.slot

    @property
    def untold(self) -> bool:
        """True if `news` has something."""
        return bool(self._changes)

    def news(self, most: int) -> tuple[bytes, bytes]:
        """(packed short names of pages that came here, of pages that left) since they were last asked for.

        At most `most` pages. A page that came and left in between is not named.
        """
        names: dict[bool, list[bytes]] = {True: [], False: []}
        for name in list(islice(self._changes, most)):
            names[self._changes.pop(name)].append(name[:SHORT_BYTES])
        return b"".join(names[True]), b"".join(names[False])

    def _fill(self, name: bytes, page: _HostPage) -> None:
        page.filled = True
        self.cached_pages += 1
        self._note(name, here=True)

    def _empty(self, name: bytes, page: _HostPage) -> None:
        page.filled = False
        self.cached_pages -= 1
        self._note(name, here=False)

    def _note(self, name: bytes, *, here: bool) -> None:
        if self._changes.pop(name, None) is None:
            self._changes[name] = here

    def _touch(self, names: Sequence[bytes]) -> None:
        """Moves pages to the end of the eviction order, a prefix behind its continuation."""
        for name in reversed(names):
            self._pages.move_to_end(name)

    def _touch_above(self, nodes: Sequence[CacheNode]) -> None:
        """Lets the pages before the first new pages of a text outlive them as well."""
        here = {node.name for node in nodes}
        for node in nodes:
            above = node.parent
            while above is not None and above.name in self._pages and above.name not in here:
                self._pages.move_to_end(above.name)
                above = above.parent

    def _was_saved(self, nodes: Sequence[CacheNode], error: EyasError | None) -> None:
        """A page that left the cache meanwhile may have been overwritten before it was read."""
        saved: list[bytes] = []
        self._saving.difference_update(nodes)
        self._cache.spared.difference_update(nodes)
        for node in nodes:
            page = self._pages[node.name]
            page.copies -= 1
            if error is None and self._cache.holds(node):
                self._fill(node.name, page)
                saved.append(node.name)
            else:
                del self._pages[node.name]
                self._free.append(page.slot)
        if saved and self.on_saved is not None:
            self.on_saved(saved)

    def _was_loaded(self, names: Sequence[bytes], then: Then, error: EyasError | None) -> None:
        for name in names:
            self._pages[name].copies -= 1
        self.loaded += len(names) if error is None else 0
        then(error)
