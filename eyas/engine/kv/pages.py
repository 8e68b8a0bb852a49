"""Page accounting: which pages of a pool are free, and how many owners each used page has.

It knows numbers only: neither what a page contains nor who its owners are. A kept page outlives its owners:
without an owner it is idle, which is neither used nor free, until `forget` frees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class PagePool:
    """A free list and an owner count per page. Each `take` and each `share` of a page needs one `drop`.

    `used`: the number of pages with an owner. `on_idle` is called for each kept page that loses its last
    owner. Misuse raises AssertionError.
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
        """The number of free pages."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes `count` free pages, with one owner each. The caller has checked `free`."""
        if count > len(self._free):
            raise AssertionError(f"{count} pages asked for, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        self.used += count
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to each page, which must be used or idle."""
        for page in pages:
            if not self._refs[page]:
                if not self._kept[page]:
                    raise AssertionError(f"page {page} is free and cannot be shared")
                self.used += 1
            self._refs[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Removes an owner of each page. A page without owners is free, or idle if it is kept."""
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
        """Lets a used page outlive its owners, with its content."""
        if not self._refs[page] or self._kept[page]:
            raise AssertionError(f"page {page} has no owner, or is kept already")
        self._kept[page] = True

    def forget(self, page: int) -> None:
        """Frees an idle page."""
        if self._refs[page] or not self._kept[page]:
            raise AssertionError(f"page {page} is not idle")
        self._kept[page] = False
        self._free.append(page)

    def owners(self, page: int) -> int:
        """The number of owners of a page."""
        return self._refs[page]
