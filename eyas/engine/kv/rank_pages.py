"""One rank's pages by their heads: some heads of some pages, gathered and scattered on its device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch

from eyas.common.types import PageShare
from eyas.engine.kv.pool import PoolShape
from eyas.engine.kv.rank_states import StatesByHeads
from eyas.engine.states.store import StateStore

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class PagesByHeads:
    """`pages` [pages, elements of a page] of a pool of that shape, the proof page too; `whole`: as bytes.

    A part of a page has the rows of heads in their order, and in each of them the heads of the share: uint8
    [page rows, heads, bytes of a head], flat. A slot of states has as many parts as pages: what the share has
    of it, cut into them.
    """

    def __init__(self, pages: torch.Tensor, shape: PoolShape) -> None:
        self.whole = pages.view(torch.uint8)
        self.stream = torch.cuda.Stream(pages.device) if pages.is_cuda else None
        geometry = shape.geometry
        self.head_bytes, self.rows, self.heads = geometry.head_bytes, geometry.page_rows, geometry.kv_heads
        self.word = next(word for word in _WORDS if self.head_bytes % word.itemsize == 0)
        self._heads = self.whole.view(self.word).unflatten(1, (geometry.page_rows, geometry.kv_heads, -1))
        self._first, self._slot = shape.pages, shape.slot_pages
        self._states: StatesByHeads | None = None
        self._changing = threading.Lock()  # of slots: what came is put among what is there, by one at a time
        if shape.states is not None:
            memory = self.whole[shape.pages : shape.all_pages].view(shape.slots, -1)
            self._states = StatesByHeads(StateStore(shape.states, memory), geometry.kv_heads)

    def is_whole(self, share: PageShare) -> bool:
        """Whether a share is all of a page, byte for byte. (Of a slot of states it has another order.)"""
        return not share.heads or (share.heads == self.heads and self._states is None)

    def part_bytes(self, share: PageShare) -> int:
        """Bytes of each page that are of a share."""
        return self.rows * share.heads * self.head_bytes if share.heads else self.whole.shape[1]

    def gather(self, pages: Sequence[int], share: PageShare) -> torch.Tensor:
        """uint8 [len(pages), bytes of a part], on the device."""
        taken: torch.Tensor = self._of(share)[self.index(pages)]
        parts = taken.flatten(1).view(torch.uint8)
        for slot, places in self._slots(pages):
            row = self._row(slot, share)
            for place, number in places:
                parts[place] = row[number]
        return parts

    def scatter(self, parts: torch.Tensor, pages: Sequence[int], share: PageShare) -> None:
        """Stores parts uint8 [len(pages), bytes], which are on the device; the other heads stay as they
        are.
        """
        if self._states is not None:
            self._scatter_states(self._states, parts, pages, share)
            of_heads = [place for place, page in enumerate(pages) if page < self._first]
            pages, parts = [pages[place] for place in of_heads], parts[of_heads]
        heads = self._of(share)
        words = parts.view(self.word).unflatten(1, heads.shape[1:])
        heads.index_copy_(0, self.index(pages), words)

    def copy_whole(
        self, slots: torch.Tensor, pages: Sequence[int], places: Sequence[int], *, out: bool
    ) -> None:
        """Scattered pages to places of `slots` [slots, bytes of a page], or back, in two operations."""
        here, there = self.whole.view(self.word), slots.view(self.word)
        rows, at = self.index(pages), self.index(places)
        if out:
            there.index_copy_(0, at, here.index_select(0, rows))
        else:
            here.index_copy_(0, rows, there.index_select(0, at))

    def index(self, numbers: Sequence[int]) -> torch.Tensor:
        """int64 [n], on the device."""
        return torch.tensor(numbers, dtype=torch.int64, device=self.whole.device)

    def _scatter_states(
        self, states: StatesByHeads, parts: torch.Tensor, pages: Sequence[int], share: PageShare
    ) -> None:
        for slot, places in self._slots(pages):
            with self._changing:
                row = self._row(slot, share)
                for place, number in places:
                    row[number] = parts[place]
                states.write(slot, share, row.flatten())

    def _slots(self, pages: Sequence[int]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """The slots of states that have some of `pages`: (where these stand in `pages`, which of the slot's
        they are).
        """
        places: dict[int, list[tuple[int, int]]] = {}
        if self._states is not None:
            for place, page in enumerate(pages):
                if self._first <= page < self.whole.shape[0] - 1:
                    slot, number = divmod(page - self._first, self._slot)
                    places.setdefault(slot, []).append((place, number))
        yield from places.items()

    def _row(self, slot: int, share: PageShare) -> torch.Tensor:
        """A share's part of a slot: uint8 [pages of a slot, bytes of a part]."""
        assert self._states is not None
        width = self.part_bytes(share)
        row: torch.Tensor = self._states.read(slot, share, self._slot * width).view(-1, width)
        return row

    def _of(self, share: PageShare) -> torch.Tensor:
        heads: torch.Tensor = self._heads[:, :, share.first : share.first + share.heads]
        return heads
