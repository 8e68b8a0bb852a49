"""The slots of recurrent states: of running sequences, and of cached prefixes from which others resume.

A kept state is evicted when a slot is needed, in LRU order: states at spaced positions of a long prompt
before those at the end of a prompt or an answer. It is evicted with its page, too. Slots are copied in the
order of the steps, so the source of a copy needs an owner only until the copy is queued.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from eyas.engine.ipc.messages import StateCache
from eyas.engine.kv.pages import PagePool

NO_STATE = -1
"""The slot number for "no state"."""


class StateKeeper(Protocol):
    """A position in the prefix cache. `state`: the slot of the state at this position, or NO_STATE."""

    state: int


class StateSlots:
    """Owns all state slots. `pool`: their accounting. `copies`: (source, target) to copy before the next
    step.
    """

    def __init__(self, slots: int) -> None:
        self.pool = PagePool(slots)
        self.pool.on_idle = self._slot_idle
        self.copies: list[tuple[int, int]] = []
        self.hits = 0  # running total of sequences that resumed from a kept state
        self.resumed_tokens = 0  # running total of tokens that they did not compute
        self.missed_tokens = 0  # running total of cached tokens computed again without a state
        self._keepers: dict[int, StateKeeper] = {}  # by kept slot
        # Kept slots without an owner, the next to be evicted first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._spaced: OrderedDict[int, None] = OrderedDict()  # at spaced positions: evicted first

    @property
    def kept(self) -> int:
        """The number of states that the cache keeps."""
        return len(self._keepers)

    @property
    def counts(self) -> StateCache:
        """Counts of slots and states, for the front."""
        return StateCache(
            slots=self.pool.num_pages,
            used=self.pool.used,
            kept=self.kept,
            hits=self.hits,
            tokens=self.resumed_tokens,
            missed=self.missed_tokens,
        )

    def take(self, source: int = NO_STATE, *, settled: bool = False) -> int | None:
        """Takes a slot with one owner, and copies `source` to it if given; None if no slot can be freed.

        `settled`: for a slot that a transfer will write, so that no step in flight may.
        """
        kept = () if source == NO_STATE else (source,)
        self.pool.share(kept)
        room = self._make_room(settled=settled)
        slot = self.pool.take(1, settled=settled)[0] if room else None
        if slot is not None and kept:
            self._copy(source, slot)
        self.pool.drop(kept)
        return slot

    def fork(self, source: int) -> int | None:
        """Takes a slot and copies `source`, which has an owner, to it; None if no slot can be freed."""
        slot = self.take()
        if slot is not None:
            self._copy(source, slot)
        return slot

    def snapshot(self, keeper: StateKeeper, source: int, *, spaced: bool) -> None:
        """Keeps a copy of `source`, which has an owner, if a slot can be freed; one at a spaced position
        evicts no state of the other kind.
        """
        if keeper.state != NO_STATE:
            self._touch(keeper.state)
        elif not spaced or self.pool.free or self._spaced:
            slot = self.fork(source)
            if slot is not None:
                self.keep(keeper, slot, spaced=spaced)
                self.pool.drop((slot,))

    def keep(self, keeper: StateKeeper, slot: int, *, spaced: bool = False) -> None:
        """Keeps the slot itself, which has an owner and will not be written again, unless `keeper` has
        one.
        """
        if keeper.state != NO_STATE:
            self._touch(keeper.state)
            return
        keeper.state = slot
        self._keepers[slot] = keeper
        if spaced:
            self._spaced[slot] = None
        self.pool.keep(slot)

    def forget(self, keeper: StateKeeper) -> None:
        """Evicts the state of a position, if it has one."""
        slot, keeper.state = keeper.state, NO_STATE
        if slot != NO_STATE:
            del self._keepers[slot]
            self._idle.pop(slot, None)
            self._spaced.pop(slot, None)
            self.pool.forget(slot)

    def _copy(self, source: int, target: int) -> None:
        self.pool.copied()
        self.copies.append((source, target))

    def _make_room(self, *, settled: bool) -> bool:
        """Evicts one kept state if there is no free slot; False if all are in use."""
        pool = self.pool
        if not pool.free:
            slot = next(
                (slot for slots in (self._spaced, self._idle) for slot in slots if self._rests(slot)),
                NO_STATE,
            )
            if slot == NO_STATE:
                return False
            self.forget(self._keepers[slot])
        return bool(pool.settled if settled else pool.free)

    def _rests(self, slot: int) -> bool:
        return not self.pool.owners(slot)

    def _touch(self, slot: int) -> None:
        for slots in (self._idle, self._spaced):
            if slot in slots:
                slots.move_to_end(slot)

    def _slot_idle(self, slot: int) -> None:
        self._idle[slot] = None
        self._touch(slot)


class PagesAndStates(PagePool):
    """Pages of keys and values, followed by the state slots as pages, `each` pages per slot.

    A caller that shares or drops the pages of a slot passes all of them.
    """

    def __init__(self, num_pages: int, states: StateSlots, each: int) -> None:
        super().__init__(num_pages)
        self.states = states
        self._each = each

    def pages_of(self, slot: int) -> list[int]:
        """The pages of a slot."""
        first = self.num_pages + slot * self._each
        return list(range(first, first + self._each))

    def slot_of(self, pages: Iterable[int]) -> int:
        """The slot whose pages are among these; NO_STATE if there is none."""
        return next(iter(self._slots(pages)), NO_STATE)

    def slots_beside(self, pages: Iterable[int]) -> int:
        """The number of slots that are not among these pages."""
        return self.states.pool.num_pages - len(self._slots(pages))

    def copied(self) -> None:
        super().copied()
        self.states.pool.copied()

    def launched(self) -> None:
        super().launched()
        self.states.pool.launched()

    def landed(self) -> None:
        super().landed()
        self.states.pool.landed()

    def share(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        super().share(self._rows(pages))
        self.states.pool.share(self._slots(pages))

    def drop(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        super().drop(self._rows(pages))
        self.states.pool.drop(self._slots(pages))

    def _rows(self, pages: Iterable[int]) -> list[int]:
        return [page for page in pages if page < self.num_pages]

    def _slots(self, pages: Iterable[int]) -> list[int]:
        behind = (page - self.num_pages for page in pages if page >= self.num_pages)
        return [page // self._each for page in behind if page % self._each == 0]
