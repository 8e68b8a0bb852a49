"""Where other workers read the pages that are offered to them: in the pool itself, or in staging beside it.

It places pages and says when they can be read there. Who may read them, and for how long, is the lease's
business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from eyas.common.errors import EyasError
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.slots import Slots
from eyas.engine.kv.staging import Staging, Then


class Placed(Protocol):
    """Pages of one handle, from its offer until its end. `numbers` are what the handle names."""

    numbers: tuple[int, ...]

    def show(self, count: int, then: Then) -> None:
        """The first `count` pages are filled: `then` is called once they can be read, in order."""
        ...

    def end(self) -> None:
        """The lease is over: the pages lose this owner as soon as nothing reads them."""
        ...


class Offers(Protocol):
    """The pages of one group."""

    @property
    def layout_hash(self) -> str:
        """What their bytes mean."""
        ...

    def reserve(self, id: str, count: int) -> bool:
        """Room for `count` pages of the generation `id`, if not reserved before; False: not now."""
        ...

    def leave(self, id: str) -> None:
        """What was reserved and not placed is free."""
        ...

    def place(self, id: str, pages: list[int]) -> Placed:
        """Pages that have one owner more for this; their room is reserved."""
        ...

    def poll(self) -> None:
        """Once a loop: what can be read since the last call is told."""
        ...

    @property
    def copying(self) -> bool:
        """Will `poll` have something to tell soon, without anything else happening?"""
        ...


@dataclass
class _InPool:
    pool: PagePool
    pages: list[int]
    numbers: tuple[int, ...]

    def show(self, count: int, then: Then) -> None:
        then(None)

    def end(self) -> None:
        self.pool.drop(self.pages)


@dataclass(frozen=True)
class PoolOffers:
    """The pool is in a file: its pages are read where they are."""

    layout_hash: str
    pool: PagePool

    def reserve(self, id: str, count: int) -> bool:
        """Always True: no room beyond the pages themselves is needed."""
        return True

    def leave(self, id: str) -> None:
        """There is nothing to free."""

    def place(self, id: str, pages: list[int]) -> Placed:
        """Offers the pages under their own numbers."""
        return _InPool(self.pool, pages, tuple(pages))

    def poll(self) -> None:
        """Everything was told when it was shown."""

    @property
    def copying(self) -> bool:
        """Always False: nothing is copied."""
        return False


@dataclass
class _Staged:
    """`numbers` are slots, held until the end; the pool's pages are held until all of them were copied."""

    offers: StagedOffers
    pages: list[int]
    numbers: tuple[int, ...]
    _shown: int = 0
    _running: int = 0
    _ended: bool = False

    def show(self, count: int, then: Then) -> None:
        fresh = slice(self._shown, count)
        self._shown, self._running = max(self._shown, count), self._running + 1
        self.offers.staging.copy_out(self.pages[fresh], self.numbers[fresh], partial(self._copied, then))

    def end(self) -> None:
        self._ended = True
        self._settle()

    def _copied(self, then: Then, error: EyasError | None) -> None:
        self._running -= 1
        if not self._ended:
            then(error)
        self._settle()

    def _settle(self) -> None:
        if self._running:
            return
        if self.pages and (self._ended or self._shown == len(self.pages)):
            self.offers.pool.drop(self.pages)
            self.pages = []
        if self._ended and self.numbers:
            self.offers.slots.give(self.numbers)
            self.numbers = ()


@dataclass(frozen=True)
class StagedOffers:
    """The pool is a device's: its pages are copied to slots, and read there."""

    layout_hash: str
    pool: PagePool
    staging: Staging
    slots: Slots
    _reserved: dict[str, list[int]] = field(default_factory=dict)

    def reserve(self, id: str, count: int) -> bool:
        """Takes `count` slots, or none; False: too few are free now."""
        if id not in self._reserved:
            slots = self.slots.take(count)
            if slots is None:
                return False
            self._reserved[id] = slots
        return True

    def leave(self, id: str) -> None:
        """Frees the slots that were reserved and not placed."""
        self.slots.give(self._reserved.pop(id, []))

    def place(self, id: str, pages: list[int]) -> Placed:
        """Offers the pages under the numbers of the slots that were reserved for them."""
        return _Staged(self, pages, tuple(self._reserved.pop(id)))

    def poll(self) -> None:
        """Tells which copies have ended since the last call."""
        self.staging.poll()

    @property
    def copying(self) -> bool:
        """Whether a copy to a slot still runs."""
        return self.staging.copying
