"""Assigns the slots of a draft worker's tables, and writes each sequence's entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from eyas.common.config import MOST_STEPS
from eyas.engine.batch.tables import SlotTables, TableWrites
from eyas.engine.speculation.draft_worker.draft_runner import DraftInput


@dataclass(eq=False)
class DraftSeat:
    """A sequence's slot, for as long as it has one, and how many of its pages the tables know."""

    slot: int
    pages: int = 0


class DraftSeats:
    """The least recently asked for makes room for a new sequence."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self._taken: OrderedDict[Hashable, DraftSeat] = OrderedDict()
        self.count = slots

    def of(self, owner: Hashable) -> DraftSeat:
        """Its seat, a new one if it has none. Between two calls for it there may be `count` - 1 others."""
        seat = self._taken.pop(owner, None)
        if seat is None:
            slot = self._free.pop() if self._free else self._taken.popitem(last=False)[1].slot
            seat = DraftSeat(slot)
        self._taken[owner] = seat
        return seat


class SeatTables:
    """Seats of sequences, of which the `tables` are told. `alignment`: rows per entry of a page table."""

    def __init__(self, tables: SlotTables, alignment: int) -> None:
        self.seats = DraftSeats(tables.padding_slot)
        self._tables, self._alignment = tables, alignment

    def take(self, inputs: SequenceOf[DraftInput]) -> tuple[list[int], np.ndarray]:
        """Each one's slot; what is new about them but for lengths, int32 [2, n] for `SlotTables.apply`."""
        writes, slots = TableWrites(self._tables), []
        for one in inputs:
            seat, new = self.seats.of(one.owner), one.extension
            if not seat.pages:
                writes.occupy(seat.slot, one.params, one.choice, speculative=MOST_STEPS)
            if seat.pages < len(new.pages):
                first = new.offset // self._alignment
                writes.put("pages", seat.slot, new.pages[seat.pages :], start=first + seat.pages)
                seat.pages = len(new.pages)
            slots.append(seat.slot)
        return slots, writes.array()
