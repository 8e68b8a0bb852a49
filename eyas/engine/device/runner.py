"""Launches the scheduler's steps on the device and keeps its tables true.

It turns works into a `StepInput`, and says which of its rows are special. It does not decide what runs, nor
what tokens mean; and it never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from eyas.engine.batch.prompt_scores import Asked
from eyas.engine.batch.sequence import Generation, Sequence, Work
from eyas.engine.batch.spans import Span
from eyas.engine.batch.tables import TableWrites
from eyas.engine.device.buckets import Buckets
from eyas.engine.device.executor import Executor
from eyas.engine.device.flight import Flight, Scored
from eyas.engine.device.special import SpecialRows, Told, occupy_special
from eyas.engine.device.step import Layout, StepInput, StepShape, pack, tiles_for


@dataclass
class _Known:
    """What the tables know of who sits in a slot: how many pages, and whether they follow its growth."""

    occupancy: int
    choice: int
    pages: int = 0
    grows: bool = False


class DeviceRunner:
    def __init__(
        self, executor: Executor, buckets: Buckets, layout: Layout, eos_ids: tuple[int, ...]
    ) -> None:
        self._executor = executor
        self._buckets = buckets
        self._layout = layout
        self._eos_ids = eos_ids
        self._occupants: dict[int, _Known] = {}  # by slot

    def launch(self, works: SequenceOf[Work]) -> Flight:
        rounds = [work.seq for work in works if work.round]
        rounds.sort(key=lambda seq: -seq.kv_len)  # attention begins with those that take longest
        chunks = [work for work in works if not work.round]
        ends = [work.seq for work in chunks if work.sample]
        tiles = tiles_for([len(work.tokens) for work in chunks], self._layout)
        shape = self._buckets.shape(len(rounds), sum(len(w.tokens) for w in chunks), tiles, len(ends))
        writes = TableWrites(self._executor.tables)
        for work in works:
            self._tell(work, writes)
        data, spans = pack(rounds, chunks, shape, self._layout), self._spans(chunks)
        asked = _asked(chunks, shape.round_rows)
        step = StepInput(shape, data, writes.array(), spans, scored=bool(asked))
        self._executor.begin(step)
        scores = [Scored(generation, one, self._executor.score(one)) for generation, one in asked]
        special = self._sample(shape, rounds, ends)
        result, event = self._executor.finish(step)
        return Flight(shape, works, _occupancies(rounds), _occupancies(ends), result, event, special, scores)

    def _sample(self, shape: StepShape, rounds: SequenceOf[Sequence], ends: SequenceOf[Sequence]) -> Told:
        """The special rows of the step that was begun."""
        rows = SpecialRows(self._eos_ids)
        for i, seq in enumerate(rounds):
            if seq.special:
                rows.add_round(i * shape.width, shape.width, seq)
        for i, seq in enumerate(ends):
            if seq.special:
                rows.add_end(shape.round_rows + i, seq)
        return rows.told(self._executor.sample(rows.array()) if rows else ())

    def _spans(self, chunks: SequenceOf[Work]) -> SequenceOf[Span]:
        if self._executor.state.prompts is None:
            return ()
        return [Span(work.seq.pages, work.start, len(work.tokens)) for work in chunks]

    def prompt_rows(self, rounds: int, many: bool) -> int:
        """How many a step with so many rounds should have, if few or many wait."""
        return self._buckets.mixed_prefill_budget(rounds, many)

    def copy_page(self, source: int, target: int) -> None:
        """Between the steps launched before and those after."""
        self._executor.copy_page(source, target)

    def close(self) -> None:
        """After the last step."""
        self._executor.close()

    def _tell(self, work: Work, writes: TableWrites) -> None:
        """What the tables do not yet know of the sequence: that it sits there, and its new pages."""
        seq, generation = work.seq, work.seq.generation
        told = self._occupants.get(seq.slot)
        if told is None or (told.occupancy, told.choice) != (seq.occupancy, seq.choice):
            params, speculative = generation.request.params, generation.request.speculative
            writes.occupy(seq.slot, params, seq.choice, speculative=speculative)
            if params.reads_history or params.min_tokens:
                occupy_special(writes, seq, self._eos_ids)
            told = self._occupants[seq.slot] = _Known(seq.occupancy, seq.choice)
        if work.round and not told.grows:  # its prompt came from elsewhere, or all but its last row is done
            writes.put("length", seq.slot, (work.start,))
            writes.put("root", seq.slot, work.tokens[:1])
        told.grows = told.grows or work.sample
        if told.pages < len(seq.pages):
            writes.put("pages", seq.slot, seq.pages[told.pages :], start=told.pages)
            told.pages = len(seq.pages)


def _asked(chunks: SequenceOf[Work], first: int) -> list[tuple[Generation, Asked]]:
    """Rows of prompts to be scored; the chunks' rows stand in the step from `first` on."""
    found = []
    for work in chunks:
        asked = work.asked(first)
        first += len(work.tokens)
        if asked is not None:
            found.append((work.seq.generation, asked))
    return found


def _occupancies(sequences: SequenceOf[Sequence]) -> list[tuple[Sequence, int]]:
    return [(seq, seq.occupancy) for seq in sequences]
