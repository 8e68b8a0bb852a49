"""Page accounting: the free list of a pool, and the number of owners of each page.

A page that the prefix cache keeps outlives its owners: without an owner it is idle, neither used nor free,
until `forget`. A page that loses its last owner while a step is in flight, which may still write it, is in
limbo until that step has landed: later steps may use it, since they run after that step, but copies may not,
since nothing orders a copy behind a step. Page copies on the device between two steps count as part of the
second step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol


class PageOwners(Protocol):
    """The interface for further owners of pages that are in use."""

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to each page."""

    def drop(self, pages: Iterable[int]) -> None:
        """Removes an owner of each page."""


class PagePool:
    """A free list and an owner count per page. Each `take` and each `share` of a page needs one `drop`.

    Pages are numbered from `first` on. `used`: the number of pages with an owner. `on_idle` is called with
    each kept page that loses its last owner. Misuse raises AssertionError.
    """

    def __init__(self, num_pages: int, first: int = 0) -> None:
        self.num_pages = num_pages
        beyond = first + num_pages
        self._settled = list(range(beyond - 1, first - 1, -1))
        self._limbo: deque[int] = deque()  # in the order in which they were freed
        self._until = [0] * beyond  # per page: after this many landed steps no step writes it
        self._launched = self._landed = 0  # running totals of steps
        self.copying = False  # the device copies pages, and no step was launched since
        self._refs = [0] * beyond
        self._cached = bytearray(beyond)
        self.used = 0
        self.on_idle: Callable[[int], None] = lambda page: None

    @property
    def free(self) -> int:
        """The number of free pages, including those in limbo."""
        return len(self._settled) + len(self._limbo)

    @property
    def settled(self) -> int:
        """The number of free pages that no step in flight may write."""
        return len(self._settled)

    def copied(self) -> None:
        """Records that the device copies an owned page to another one, behind the steps in flight."""
        self.copying = True

    def launched(self) -> None:
        """Records the launch of a step, which may write any page that is owned now."""
        self._launched += 1
        self.copying = False

    def landed(self) -> None:
        """Records that the oldest step in flight has landed."""
        self._landed += 1
        while self._limbo and self._until[self._limbo[0]] <= self._landed:
            self._settled.append(self._limbo.popleft())

    def take(self, count: int, *, settled: bool = False) -> list[int]:
        """Takes `count` pages with one owner each. The caller has checked `free`.

        `settled`: for pages that a copy will write, which must not be in limbo; the caller has checked
        `settled`. Otherwise pages in limbo are taken first.
        """
        available = self.settled if settled else self.free
        if count > available:
            raise AssertionError(f"{count} pages requested, {available} free")
        unsettled = 0 if settled else min(count, len(self._limbo))
        pages = [self._limbo.pop() for _ in range(unsettled)]
        pages += [self._settled.pop() for _ in range(count - unsettled)]
        for page in pages:
            self._refs[page] = 1
        self.used += count
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to each page, which must be used or idle."""
        for page in pages:
            if not self._refs[page]:
                if not self._cached[page]:
                    raise AssertionError(f"page {page} is free and cannot be shared")
                self.used += 1
            self._refs[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Removes an owner of each page. A page without owners is free, or idle if the cache keeps it."""
        for page in pages:
            if not self._refs[page]:
                raise AssertionError(f"page {page} has no owner to drop it")
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            self.used -= 1
            self._until[page] = self._launched + self.copying
            if self._cached[page]:
                self.on_idle(page)
            else:
                self._release(page)

    def keep(self, page: int) -> None:
        """Keeps a used page, with its content, beyond its last owner."""
        if not self._refs[page] or self._cached[page]:
            raise AssertionError(f"page {page} has no owner, or is kept already")
        self._cached[page] = True

    def forget(self, page: int) -> None:
        """Stops keeping a page: it is freed now if it is idle, else with its last owner."""
        if not self._cached[page]:
            raise AssertionError(f"page {page} is not kept")
        self._cached[page] = False
        if not self._refs[page]:
            self._release(page)

    def is_kept(self, page: int) -> bool:
        """True if the page is kept beyond its last owner."""
        return bool(self._cached[page])

    def owners(self, page: int) -> int:
        """The number of owners of a page."""
        return self._refs[page]

    def is_quiet(self, page: int) -> bool:
        """True if no step in flight may write the page, which has no owner."""
        return self._until[page] <= self._landed

    def _release(self, page: int) -> None:
        if self.is_quiet(page):
            self._settled.append(page)
        else:
            self._limbo.append(page)
