"""One attention rank's works as a step's input: what its tables must be told, and its rows in order.

The twin of what `eyas.engine.device.runner` does for one rank, without drafts: every round has one row. It
knows one rank's slots and pages, and no other rank.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from eyas.engine.batch.sequence import Work
from eyas.engine.batch.spans import Span
from eyas.engine.batch.tables import Tables, TableWrites
from eyas.engine.device.special import occupy_special
from eyas.engine.device.step import Layout, Placed, StepShape, tiles_for


@dataclass
class _Known:
    """What the tables know of who sits in a slot: how many pages, and whether they follow its growth."""

    occupancy: int
    choice: int
    pages: int = 0
    grows: bool = False


class Seats:
    """One rank's slots. `tables`: of any rank, for their layout; `layout`: with the rank's first page."""

    def __init__(self, tables: Tables, layout: Layout, eos_ids: tuple[int, ...]) -> None:
        self.layout = layout
        self._tables = tables
        self._eos_ids = eos_ids
        self._occupants: dict[int, _Known] = {}  # by slot

    def tell(self, works: SequenceOf[Work]) -> TableWrites:
        """What the rank's tables do not yet know of these sequences."""
        writes = TableWrites(self._tables)
        for work in works:
            self._tell(work, writes)
        return writes

    def place(self, works: SequenceOf[Work]) -> tuple[Placed, StepShape]:
        """In the order of their rows, and the least shape that holds them. Attention begins with those that
        take longest.
        """
        rounds = sorted((work for work in works if work.round), key=lambda work: -work.seq.kv_len)
        placed = Placed(rounds, (), [work for work in works if not work.round])
        counts = [len(work.tokens) for work in placed.chunks]
        tiles = tiles_for(counts, self.layout)
        return placed, StepShape(len(rounds), 1, sum(counts), tiles, len(placed.ends))

    def spans(self, chunks: SequenceOf[Work]) -> list[Span]:
        """The chunks, in pages of the rank's own pool."""
        return [Span(self._own(work.seq.pages), work.start, len(work.tokens)) for work in chunks]

    def _tell(self, work: Work, writes: TableWrites) -> None:
        seq = work.seq
        told = self._occupants.get(seq.slot)
        if told is None or (told.occupancy, told.choice) != (seq.occupancy, seq.choice):
            params = seq.generation.request.params
            writes.occupy(seq.slot, params, seq.choice, speculative=0)
            if params.reads_history or params.min_tokens:
                occupy_special(writes, seq, self._eos_ids)
            told = self._occupants[seq.slot] = _Known(seq.occupancy, seq.choice)
        if work.round and not told.grows:  # a fork, or all of its prompt but the last row was cached
            writes.put("length", seq.slot, (work.start,))
            writes.put("root", seq.slot, work.tokens[:1])
        told.grows = told.grows or work.sample
        if told.pages < len(seq.pages):
            writes.put("pages", seq.slot, self._own(seq.pages[told.pages :]), start=told.pages)
            told.pages = len(seq.pages)

    def _own(self, pages: SequenceOf[int]) -> list[int]:
        return [page - self.layout.first_page for page in pages]
