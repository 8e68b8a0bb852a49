"""Launches the scheduler's steps on the device and keeps its tables true.

It turns works into a `StepInput`, and says which of its rows are special; what the tables are told is the
business of `eyas.engine.device.occupants`. It does not decide what runs, nor what tokens mean; and it waits
for the device only where a grammar has to see the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial

import numpy as np

from eyas.engine.batch.prompt_scores import Asked
from eyas.engine.batch.sequence import Work
from eyas.engine.batch.tables import TableWrites
from eyas.engine.device.buckets import Buckets
from eyas.engine.device.certain import Certain, chunk_ends, staying, wanted
from eyas.engine.device.depths import Depths
from eyas.engine.device.executor import Executor
from eyas.engine.device.flight import DeviceFlight, Features, Results, Scored
from eyas.engine.device.masks import Nodes, StepMasks
from eyas.engine.device.occupants import Occupants, without_singles
from eyas.engine.device.special import SpecialRows
from eyas.engine.device.step import (
    Late,
    Layout,
    Placed,
    StepInput,
    StepShape,
    Wanted,
    pack,
)
from eyas.engine.grammar.grammars import Grammars
from eyas.engine.speculation.feature_ring import KEPT_ROWS

LATE_AT_ONCE = 64
"""Sequences whose waiting rows the head takes at once: no more rows than of a prompt's chunk."""


class DeviceRunner:
    """`ahead`: may a step be launched while another is in flight? `depths`: if these are adaptive."""

    def __init__(
        self,
        executor: Executor,
        buckets: Buckets,
        layout: Layout,
        grammars: Grammars,
        *,
        ahead: bool,
        depths: Depths | None = None,
    ) -> None:
        self.drafts = executor.state.drafter is not None
        self.ahead = ahead
        self.draft_wait_s = 0.0
        self._executor = executor
        self._buckets = buckets
        self._depths = depths
        self._layout = layout
        self._grammars = grammars
        self._occupants = Occupants(executor.state, layout, grammars)

    def launch(self, works: SequenceOf[Work]) -> DeviceFlight:
        """Starts a step; `land` of the result waits for it."""
        writes, joining = self._occupants.tell(works, self.draft_wait_s)
        depth, buckets = self._depth(works)
        if joining:  # they are told, and drafted for, before the step
            self._executor.join(self._occupants.joined(joining, buckets.width), writes.array())
            writes = TableWrites(self._executor.tables)
        self._catch_up(works, buckets.width)
        shape, placed = self._place(works, buckets)
        data, spans = pack(placed, shape, self._layout), self._occupants.spans(placed.chunks)
        asked = asked_rows(placed.chunks, shape.round_rows)
        certain, features_wanted = self._certain(placed, shape)
        held = held_slots(placed, shape)
        step = StepInput(shape, data, writes.array(), spans, bool(asked), features_wanted, held)
        self._executor.begin(step)
        scores = [Scored(work, one, self._executor.score(one)) for work, one in asked]
        features = self._features(placed.chunks, shape)
        rows = SpecialRows.of(shape, placed, self._grammars.eos_ids)
        finish = partial(self._finish, step, rows, certain)
        flight = DeviceFlight(shape, works, placed, finish, scores, features, depth)
        if not any(self._grammars.awaits(work.seq) for work in works):
            flight.complete()
        return flight

    def _certain(self, placed: Placed, shape: StepShape) -> tuple[Certain | None, Wanted | None]:
        """The step's features for a drafter elsewhere, still without rows, and what is to be asked for."""
        tap = self._executor.state.tap
        if tap is None:
            return None, None
        path_rows, ends = self._executor.state.path_rows(shape.width), chunk_ends(placed.chunks)
        stay = staying(placed, tap.windows)
        return Certain(None, path_rows, ends, stay), wanted(placed, shape, path_rows, ends, stay)

    def _finish(self, step: StepInput, rows: SpecialRows, certain: Certain | None) -> Results:
        """What follows the forward of a step that was begun; masks are filled while the device computes."""
        rows.fill(StepMasks(self._grammars, self._drafts(step.held, step.shape.width)))
        special = rows.told(self._executor.sample(rows.array()) if rows else ())
        words, event = self._executor.finish(step)
        if certain is not None:
            certain = replace(certain, rows=self._executor.certain)
        return Results(words, event, special, certain)

    def _drafts(self, held: SequenceOf[int], width: int) -> dict[int, Nodes]:
        """By slot, what the step that was begun verifies for those whose outputs are held to a grammar."""
        if not held:
            return {}
        found = self._executor.drafts()
        return {slot: Nodes.of(drafts, width) for slot, drafts in zip(held, found, strict=True)}

    def _depth(self, works: SequenceOf[Work]) -> tuple[int | None, Buckets]:
        """How deep the step drafts, if that may change, and its graphs."""
        if self._depths is None:
            return None, self._buckets
        rounds = [work for work in works if work.round]
        followed = [self._occupants.occupant(work).drafted for work in rounds]
        seqs = [work.seq for work in rounds]
        return self._depths.choose(seqs, followed, prompts=len(seqs) < len(works))

    def _catch_up(self, works: SequenceOf[Work], width: int) -> None:
        """The head takes what plain rounds left to it: before a step that drafts, or once one's is too much.

        Then all join: a call costs about the same for one sequence as for many.
        """
        if self._depths is None or not self.drafts:
            return
        known = ((work, self._occupants.occupant(work)) for work in works if work.round)
        followed = [(work, told) for work, told in known if told.drafted]
        due = width > 1 or any(told.waiting == KEPT_ROWS for _, told in followed)
        late = []
        for work, told in followed:
            if due and told.waiting:
                late.append((work.seq.slot, told.waiting))
                told.waiting, work.seq.draft_len = 0, work.seq.kv_len
            told.waiting += width == 1
        for first in range(0, len(late), LATE_AT_ONCE):
            some = late[first : first + LATE_AT_ONCE]
            sizes = late_sizes(self._layout.padding_slot)
            size = next(size for size in sizes if size >= len(some))
            some += [(self._layout.padding_slot, 0)] * (size - len(some))
            self._executor.catch_up(Late(np.array(some, np.int32).T.copy(), width))

    def _place(self, works: SequenceOf[Work], buckets: Buckets) -> tuple[StepShape, Placed]:
        """Those that nothing is drafted for have a row each, if the step's shape has such rows."""
        placed, least = self._occupants.place(works, buckets.width)
        shape = buckets.shape(least.batch, least.chunk, least.tiles, least.ends, singles=least.singles)
        return shape, placed if shape.singles else without_singles(placed)

    def _features(self, chunks: SequenceOf[Work], shape: StepShape) -> Features | None:
        """Of the last rows of prompts that others start from, here or elsewhere."""
        shared = self._occupants.shared_rows(chunks, shape.round_rows)
        if not shared:
            return None
        return Features([work for work, _ in shared], self._executor.features([row for _, row in shared]))

    def prompt_rows(self, rounds: int, many: bool) -> int:
        """How many prompt rows a step with this number of rounds should have; `many`: whether many wait."""
        buckets = self._buckets if self._depths is None else self._depths.beside_prompts()
        return buckets.mixed_prefill_budget(rounds, many)

    def copy_page(self, source: int, target: int) -> None:
        """Between the steps launched before and those after."""
        self._executor.copy_page(source, target)

    def wait(self) -> None:
        """Until the device has done all that was launched."""
        self._executor.wait()

    def close(self) -> bool:
        """After the last step. False: the device may hang."""
        return self._executor.close()


def held_slots(placed: Placed, shape: StepShape) -> list[int]:
    """Slots of the rounds whose drafts must be known here: those of outputs that are held to a grammar."""
    held = (work.seq for work in placed.rounds if work.seq.generation.request.params.grammar is not None)
    return [seq.slot for seq in held] if shape.width > 1 else []


def late_sizes(running: int) -> tuple[int, ...]:
    """How many sequences may be told to catch up at once, padding included, if that many run."""
    return tuple(1 << power for power in range((min(running, LATE_AT_ONCE) - 1).bit_length() + 1))


def asked_rows(chunks: SequenceOf[Work], first: int) -> list[tuple[Work, Asked]]:
    """Rows of prompts to be scored; the chunks' rows stand in the step from row `first` on."""
    found = []
    for work in chunks:
        asked = work.asked(first)
        first += len(work.tokens)
        if asked is not None:
            found.append((work, asked))
    return found
