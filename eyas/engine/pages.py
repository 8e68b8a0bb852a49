"""Page accounting: which pages of a pool are free, and how many owners each used page has.

It knows numbers only: neither what a page contains nor who its owners are.
"""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """A free list and a reference count a page. Every page taken or shared must be dropped once."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._refs = [0] * num_pages
        self.drops = 0  # ever
        self.claims = 0  # owners of all pages together: 0 if and only if nothing is held

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.num_pages - len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages with one owner each. The caller has checked `free`."""
        if count > len(self._free):
            raise AssertionError(f"{count} pages asked for, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        self.claims += count
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for each page."""
        for page in pages:
            if self._refs[page] == 0:
                raise AssertionError(f"page {page} is free and cannot be shared")
            self._refs[page] += 1
            self.claims += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One owner less; a page without owners is free."""
        for page in pages:
            if self._refs[page] == 0:
                raise AssertionError(f"page {page} was already free")
            self._refs[page] -= 1
            self.claims -= 1
            self.drops += 1
            if self._refs[page] == 0:
                self._free.append(page)

    def owners(self, page: int) -> int:
        return self._refs[page]
