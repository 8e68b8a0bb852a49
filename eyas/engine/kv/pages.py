"""Page accounting: which pages of a pool are free, and how many owners each used page has.

It knows numbers only: neither what a page contains nor who its owners are. A page that is kept outlives its
owners: without any it is idle, neither used nor free, until it is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class PagePool:
    """A free list and an owner count per page. Every page taken or shared must be dropped once.

    `used` counts each page that has an owner once. `on_idle` hears of each kept page that loses its last.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._refs = [0] * num_pages
        self._kept = bytearray(num_pages)
        self.used = 0
        self.on_idle: Callable[[int], None] = lambda page: None

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages with one owner each. The caller has checked `free`."""
        if count > len(self._free):
            raise AssertionError(f"{count} pages asked for, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        self.used += count
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for each page."""
        for page in pages:
            if not self._refs[page]:
                if not self._kept[page]:
                    raise AssertionError(f"page {page} is free and cannot be shared")
                self.used += 1
            self._refs[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One owner less; a page without owners is free, unless it is kept."""
        for page in pages:
            if not self._refs[page]:
                raise AssertionError(f"page {page} has no owner to drop it")
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            self.used -= 1
            if self._kept[page]:
                self.on_idle(page)
            else:
                self._free.append(page)

    def keep(self, page: int) -> None:
        """Its owners may leave it now: it stays, with what it contains."""
        if not self._refs[page] or self._kept[page]:
            raise AssertionError(f"page {page} has no owner, or is kept already")
        self._kept[page] = True

    def forget(self, page: int) -> None:
        """An idle page is free."""
        if self._refs[page] or not self._kept[page]:
            raise AssertionError(f"page {page} is not idle")
        self._kept[page] = False
        self._free.append(page)

    def owners(self, page: int) -> int:
        return self._refs[page]
