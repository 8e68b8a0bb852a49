"""What the batches of a draft worker share on its device, and the slot of each sequence in the tables."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from eyas.engine.batch.sequence import RingPlace
from eyas.engine.batch.tables import SlotTables, TableWrites
from eyas.engine.speculation.device import DeviceProposer


@dataclass(frozen=True)
class DraftState:
    """What the batches of a draft worker share on its device. `firsts`: as of `DeviceProposer`.
    `width`: of the head's features. `vocab`: the target's ids are below it.
    """

    proposer: DeviceProposer
    tables: SlotTables
    firsts: torch.Tensor
    width: int
    vocab: int

    @property
    def device(self) -> str:
        """As torch names it."""
        return self.proposer.pool.shape.device

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return self.proposer.pool.page_size

    @property
    def result_words(self) -> int:
        """Of each sequence: 1 where a feature was lost; then the drafts and their parents."""
        return 1 + 2 * self.tables.drafts.shape[1]


@dataclass(eq=False)
class DraftSeat:
    """A sequence's slot, for as long as it has one, and what the tables know of it: how many of its pages,
    and its mailbox.
    """

    slot: int
    pages: int = 0
    place: RingPlace | None = None  # that the tables know

    def write_pages(self, writes: TableWrites, pages: SequenceOf[int], first: int) -> None:
        """Its new ones. `first`: the place of its first page in the tables."""
        if self.pages < len(pages):
            writes.put("pages", self.slot, pages[self.pages :], start=first + self.pages)
            self.pages = len(pages)

    def write_place(self, writes: TableWrites, place: RingPlace) -> None:
        """Its mailbox and its ring, if they are new."""
        if self.place != place:
            writes.ring(self.slot, place)
            self.place = place


class DraftSeats:
    """Assigns slots: the least recently used makes room for a new sequence."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self._taken: OrderedDict[Hashable, DraftSeat] = OrderedDict()
        self.count = slots

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._taken

    def of(self, owner: Hashable) -> DraftSeat:
        """Its seat, a new one if it has none. Between two calls for it there may be `count` - 1 others."""
        seat = self._taken.pop(owner, None)
        if seat is None:
            slot = self._free.pop() if self._free else self._taken.popitem(last=False)[1].slot
            seat = DraftSeat(slot)
        self._taken[owner] = seat
        return seat


def padded_size(sizes: SequenceOf[int], count: int) -> int:
    """The least of ascending sizes that has room for this number of sequences; the number, if none has."""
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else count
