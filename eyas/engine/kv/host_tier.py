"""The host tier: copies pages that will soon be evicted from the prefix cache to host memory, and loads them
back.

A page is copied while it is still cached, idle and among the next to be evicted, so nothing waits for the
copy. A page that is evicted before its copy has ended is not saved. A full tier drops its least recently used
page.

A tier that is larger than the pool copies each page as soon as it is idle and no step in flight may write it;
until then new sequences get other pages, because under load few pages stay idle for long. The same holds if
pages are passed on to a shared store (`on_saved`), where each should be found when this worker is gone.
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

AHEAD = 1024  # pages that are copied in advance: the next to be evicted
BATCH = 64  # pages per copy, so that little is lost when one is stopped
MOST_IDLE = 1024  # newly idle pages that one iteration considers, at most


class TierMemory(Protocol):
    """Host memory for pages, in slots of which the first `ready` can be used. `poll` calls each `then`."""

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
        """Begins to copy pages to slots."""
        ...

    def copy_in(self, slots: Sequence[int], pages: Sequence[int], then: Then) -> None:
        """Begins to copy slots to pages."""
        ...

    def poll(self) -> None:
        """Calls the callbacks of copies that have stopped."""
        ...

    def close(self, deadline: float) -> bool:
        """Ends all copies; False if one still runs at `deadline` (monotonic seconds)."""
        ...


@dataclass(slots=True)
class _HostPage:
    """A page in host memory. `copies`: running copies from or to its slot; the first one fills it."""

    slot: int
    copies: int = 0
    filled: bool = False


class HostTier:
    """Owns the slots of `memory`. One thread uses it."""

    def __init__(self, pool: PagePool, cache: PrefixCache, memory: TierMemory) -> None:
        self._pool = pool
        self._cache = cache
        self.memory = memory
        self._pages: OrderedDict[bytes, _HostPage] = OrderedDict()  # by name, least recently used first
        self._free: list[int] = []
        self._known = 0  # slots that have been ready
        self._ahead = min(AHEAD, pool.num_pages)
        self._seen = 0  # the cache's turnover when pages were last chosen
        self._arrived = 0  # and its arrivals
        self.on_saved: Callable[[Sequence[bytes]], None] | None = None  # called with the names of saved pages
        self._saving: set[CacheNode] = set()  # being copied
        self._later: list[CacheNode] = []  # to be copied once no step may write them
        self._changes: dict[bytes, bool] = {}  # to report: True for saved pages, False for dropped ones
        self.cached_pages = 0  # pages that can be loaded
        self.loaded = 0  # running total of loaded pages

    @property
    def busy(self) -> bool:
        """True if `poll` should be called soon."""
        return self.memory.copying or bool(self._later)

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def find(self, names: Iterable[bytes]) -> list[bytes]:
        """The leading names whose pages can be loaded, up to the first that cannot."""
        return list(takewhile(lambda name: name in self._pages and self._pages[name].filled, names))

    def load(self, names: Sequence[bytes], pages: Sequence[int], then: Then) -> None:
        """Begins to copy saved pages to pages of the pool that no step in flight writes."""
        for name in names:
            self._pages[name].copies += 1
        self._touch(names)
        slots = [self._pages[name].slot for name in names]
        self.memory.copy_in(slots, pages, partial(self._was_loaded, names, then))

    def clear(self) -> int:
        """Drops every page that can be loaded, while none is being loaded; returns their number.

        A page that is being saved is dropped when its copy ends, since it has left the cache by then. A page
        that is being written to a store keeps its slot until `release`.
        """
        filled = [(name, page) for name, page in self._pages.items() if page.filled]
        for name, page in filled:
            self._empty(name, page)
            if not page.copies:
                self._free.append(self._pages.pop(name).slot)
        return len(filled)

    def hold(self, names: Sequence[bytes]) -> list[int]:
        """The slots of saved pages, which are not dropped before `release`."""
        for name in names:
            self._pages[name].copies += 1
        return [self._pages[name].slot for name in names]

    def release(self, names: Sequence[bytes]) -> None:
        """Ends a `hold`: the pages may be dropped; those that were cleared meanwhile are dropped now."""
        for name in names:
            page = self._pages[name]
            page.copies -= 1
            if not page.filled and not page.copies:
                self._free.append(self._pages.pop(name).slot)

    def reserve(self, names: Sequence[bytes]) -> list[int]:
        """Reserves slots for these pages, which are not saved yet, as far as slots suffice, until
        `settle`.
        """
        slots: list[int] = []
        for name in names:
            if name in self._pages or (slot := self._slot()) is None:
                break
            self._pages[name] = _HostPage(slot, copies=1)
            slots.append(slot)
        return slots

    def settle(self, names: Sequence[bytes], count: int) -> None:
        """Ends a load into reserved slots: the first `count` pages were loaded, the others were not."""
        for name in names[:count]:
            self._pages[name].copies -= 1
            self._fill(name, self._pages[name])
        for name in names[count:]:
            self._free.append(self._pages.pop(name).slot)
        self._touch(names[:count])

    def load_s(self, pages: int) -> float:
        """The expected seconds to load `pages`, by the rate of all copies so far; 0.0 before the first."""
        memory = self.memory
        return pages * memory.page_bytes * memory.copy_s / max(memory.bytes_out + memory.bytes_in, 1)

    def poll(self) -> None:
        """Handles stopped copies, and begins to save pages; called once per iteration of the loop."""
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
            self._seen = self._cache.turnover  # bounds the work by a few times the turnover
            self._save(self._cache.next_out(min(self._ahead, self._known)))

    def _save(self, nodes: Iterable[CacheNode]) -> list[CacheNode]:
        """Saves the pages that are not saved yet; returns those that a step in flight may still write.

        (More nodes than slots would evict each other.)
        """
        is_quiet, saved = self._pool.is_quiet, self._pages
        soon: list[CacheNode] = []
        later: list[CacheNode] = []
        old: list[bytes] = []
        for node in nodes:
            if not is_quiet(node.page):
                later += () if node.name in saved else (node,)
            elif node.name in saved:
                old.append(node.name)
            else:
                soon.append(node)
        self._touch(old)
        self._copy_out(soon)
        return later

    def _copy_out(self, nodes: Sequence[CacheNode]) -> None:
        """Begins to copy pages out, as far as slots suffice."""
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
        """A free slot, if necessary that of the least recently used page; None if copies use all slots."""
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
    def changed(self) -> bool:
        """True if `take_changes` has something to report."""
        return bool(self._changes)

    def take_changes(self, most: int) -> tuple[bytes, bytes]:
        """(packed short names of saved pages, of dropped pages) since the last call, at most `most` of them.

        A page that was saved and dropped between two calls is not reported.
        """
        names: dict[bool, list[bytes]] = {True: [], False: []}
        for name in list(islice(self._changes, most)):
            names[self._changes.pop(name)].append(name[:SHORT_BYTES])
        return b"".join(names[True]), b"".join(names[False])

    def _fill(self, name: bytes, page: _HostPage) -> None:
        page.filled = True
        self.cached_pages += 1
        self._record_change(name, saved=True)

    def _empty(self, name: bytes, page: _HostPage) -> None:
        page.filled = False
        self.cached_pages -= 1
        self._record_change(name, saved=False)

    def _record_change(self, name: bytes, *, saved: bool) -> None:
        if self._changes.pop(name, None) is None:
            self._changes[name] = saved

    def _touch(self, names: Sequence[bytes]) -> None:
        """Marks pages as recently used, a prefix more recently than its continuation."""
        for name in reversed(names):
            self._pages.move_to_end(name)

    def _touch_above(self, nodes: Sequence[CacheNode]) -> None:
        """Marks the pages before newly saved ones as more recently used, so that prefixes are dropped
        last.
        """
        new = {node.name for node in nodes}
        for node in nodes:
            above = node.parent
            while above is not None and above.name in self._pages and above.name not in new:
                self._pages.move_to_end(above.name)
                above = above.parent

    def _was_saved(self, nodes: Sequence[CacheNode], error: EyasError | None) -> None:
        """Ends a copy. A page that left the cache meanwhile may have been overwritten, and is not saved."""
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
