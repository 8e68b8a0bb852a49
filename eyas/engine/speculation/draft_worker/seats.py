"""Who has which slot of a draft worker's tables, and what the tables know of a sequence in its slot.

It knows owners by what they are equal to, and pages as numbers; what runs in a slot it does not know.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from eyas.common.config import MOST_STEPS
from eyas.engine.batch.tables import Tables, TableWrites
from eyas.engine.speculation.draft_worker.draft_runner import Asked


@dataclass(eq=False)
class Seat:
    """A sequence's slot, for as long as it has one, and how many of its pages the tables know."""

    slot: int
    pages: int = 0


class Seats:
    """The least recently asked for makes room for a new sequence."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self._taken: OrderedDict[Hashable, Seat] = OrderedDict()
        self.count = slots

    def of(self, owner: Hashable) -> Seat:
        """Its seat, a new one if it has none. Between two calls for it there may be `count` - 1 others."""
        seat = self._taken.pop(owner, None)
        if seat is None:
            slot = self._free.pop() if self._free else self._taken.popitem(last=False)[1].slot
            seat = Seat(slot)
        self._taken[owner] = seat
        return seat

    def held(self, owner: Hashable) -> Seat | None:
        """Its seat, if it has one: a sequence that lost its seat gets another."""
        return self._taken.get(owner)


class Seating:
    """Seats of sequences, of which the `tables` are told. `alignment`: rows per entry of a page table."""

    def __init__(self, tables: Tables, alignment: int) -> None:
        self.seats = Seats(tables.padding_slot)
        self._tables, self._alignment = tables, alignment

    def take(
        self, asked: SequenceOf[Asked], lent: SequenceOf[int] | None = None
    ) -> tuple[list[int], np.ndarray]:
        """Each one's slot, and what is new about them but for lengths, int32 [2, n] for `Tables.apply`.

        `lent`: how many of each one's last pages are others the next time (None: no page is).
        """
        writes, slots = TableWrites(self._tables), []
        for i, one in enumerate(asked):
            seat, new = self.seats.of(one.owner), one.extension
            if not seat.pages:
                writes.occupy(seat.slot, one.params, one.choice, speculative=MOST_STEPS)
            if seat.pages < len(new.pages):
                first = new.offset // self._alignment
                writes.put("pages", seat.slot, new.pages[seat.pages :], start=first + seat.pages)
                seat.pages = len(new.pages) - (lent[i] if lent else 0)
            slots.append(seat.slot)
        return slots, writes.array()
