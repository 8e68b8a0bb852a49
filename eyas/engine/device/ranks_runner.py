"""Launches the steps of all attention ranks at once, in one shape: that of the rank with the most to do.

Every rank has a scheduler, tables and pages of its own; the ranks' experts serve all rows, and so those of a
draft head do. So an idle rank takes every step, and every pass of its drafts, with rows of padding, and
captured graphs stay in step. What is launched beside steps is launched on all ranks too, for as many. It
decides neither what runs nor on which rank, and waits for a device only where a grammar has
to see the drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from eyas.engine.batch.landed import Landed
from eyas.engine.batch.sequence import Work
from eyas.engine.device.buckets import Buckets
from eyas.engine.device.flight import DeviceFlight, Features, Results, Scored
from eyas.engine.device.led_ranks import LedRanks
from eyas.engine.device.masks import Nodes, StepMasks
from eyas.engine.device.occupants import Occupants, without_singles
from eyas.engine.device.runner import asked_rows, held_slots
from eyas.engine.device.special import SpecialRows, Told, padding_rows
from eyas.engine.device.step import Placed, StepInput, StepShape, pack
from eyas.engine.grammar.grammars import Grammars
from eyas.engine.sampling.scores import Scores


@dataclass
class RanksFlight:
    """A step of all ranks: `parts`, each its rank's, which end together. `launched`: monotonic seconds."""

    shape: StepShape
    works: SequenceOf[Work]
    parts: SequenceOf[DeviceFlight]
    depth: None = None
    launched: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        """Have the devices done it? Asked without waiting."""
        return self.parts[0].over

    def complete(self) -> None:
        """Launches what follows the forwards, if that is not done."""
        for part in self.parts:
            part.complete()

    def land(self) -> list[Landed]:
        """Waits for the devices."""
        return [landed for part in self.parts for landed in part.land()]


class RanksRunner:
    """`occupants`: of each rank. `ahead`: may a step be launched while another is in flight?"""

    draft_wait_s = 0.0  # their drafts are made inside the step

    def __init__(
        self,
        executor: LedRanks,
        buckets: Buckets,
        occupants: SequenceOf[Occupants],
        grammars: Grammars,
        *,
        ahead: bool,
    ) -> None:
        self.drafts = executor.state.drafter is not None
        self.ahead = ahead
        self._executor = executor
        self._buckets = buckets
        self._occupants = occupants
        self._grammars = grammars

    def launch(self, works: SequenceOf[Work]) -> RanksFlight:
        """Starts a step; `land` of the result waits for it."""
        mine: list[list[Work]] = [[] for _ in self._occupants]
        for work in works:
            mine[work.seq.generation.rank or 0].append(work)
        writes = self._tell(mine)
        shape, placed = self._place(mine)
        asked = [asked_rows(each.chunks, shape.round_rows) for each in placed]
        held = [held_slots(each, shape) for each in placed]
        steps = [
            StepInput(
                shape,
                pack(each, shape, occupants.layout),
                told,
                spans=occupants.spans(each.chunks),
                scored=any(asked),
                held=slots,
            )
            for occupants, each, told, slots in zip(
                self._occupants, placed, writes, _filled(held, self._padding), strict=True
            )
        ]
        self._executor.begin_each(steps)
        scores = [
            [Scored(work, one, _of_rank(self._executor.score(one), rank)) for work, one in of_rank]
            for rank, of_rank in enumerate(asked)
        ]
        features = self._features(placed, shape)
        finish = self._finisher(steps[0], placed, held)
        parts = [
            DeviceFlight(shape, own, each, _part(finish, rank), scores[rank], features[rank])
            for rank, (own, each) in enumerate(zip(mine, placed, strict=True))
        ]
        flight = RanksFlight(shape, works, parts)
        if not any(self._grammars.awaits(work.seq) for work in works):
            flight.complete()
        return flight

    def prompt_rows(self, rounds: int, many: bool) -> int:
        """How many prompt rows a rank with this number of rounds should have; `many`: whether many wait."""
        return self._buckets.mixed_prefill_budget(rounds, many)

    def copy_page(self, source: int, target: int) -> None:
        """Of one rank; between the steps launched before and those after."""
        pages = self._occupants[1].layout.first_page
        self._executor.copy_page_of(source // pages, source % pages, target % pages)

    def wait(self) -> None:
        """Until the device has done all that was launched."""
        self._executor.wait()

    def close(self) -> bool:
        """After the last step. False: a device may hang."""
        return self._executor.close()

    @property
    def _padding(self) -> int:
        return self._executor.tables.padding_slot

    def _tell(self, mine: SequenceOf[list[Work]]) -> list[np.ndarray]:
        """What each rank's tables must still be told with the step. Where sequences join, on any rank, all is
        told before it, and drafted for them: on all ranks at once, for as many.
        """
        writes, joining = zip(
            *(occupants.tell(own) for occupants, own in zip(self._occupants, mine, strict=True)), strict=True
        )
        told = [each.array() for each in writes]
        if not any(joining):
            return told
        width = self._buckets.width
        joined = [
            occupants.joined(own, width) for occupants, own in zip(self._occupants, joining, strict=True)
        ]
        most, head_width = max(map(len, joining)), max(each.features.shape[1] for each in joined)
        joined = [each.filled(most, head_width, self._padding) for each in joined]
        self._executor.join_each(joined, told)
        return [each[:, :0] for each in told]

    def _place(self, mine: SequenceOf[list[Work]]) -> tuple[StepShape, list[Placed]]:
        """The shape of every rank's step, and its rows in it."""
        placed, least = zip(
            *(
                occupants.place(own, self._buckets.width)
                for occupants, own in zip(self._occupants, mine, strict=True)
            ),
            strict=True,
        )
        shape = self._shape(least)
        return shape, [each if shape.singles else without_singles(each) for each in placed]

    def _shape(self, least: SequenceOf[StepShape]) -> StepShape:
        """Of every rank's step: it holds the most that any has of anything. What nothing is drafted for has
        rows of its own where that makes no step larger: one rank's may stand beside another's rounds.
        """
        batch, singles = max(each.batch for each in least), max(each.singles for each in least)
        chunk, tiles = max(each.chunk for each in least), max(each.tiles for each in least)
        ends, most = max(each.ends for each in least), max(each.batch + each.singles for each in least)
        if batch + singles > most:
            batch, singles = most, 0
        return self._buckets.shape(batch, chunk, tiles, ends, singles=singles)

    def _features(self, placed: SequenceOf[Placed], shape: StepShape) -> list[Features | None]:
        """Of each rank's prompts that others start from. All ranks give as many rows."""
        pairs = zip(self._occupants, placed, strict=True)
        shared = [occupants.shared_rows(each.chunks, shape.round_rows) for occupants, each in pairs]
        if not any(shared):
            return [None] * len(shared)
        found = self._executor.features_each(_filled([[row for _, row in own] for own in shared], 0))
        return [
            Features([work for work, _ in own], rows[: len(own)])
            for own, rows in zip(shared, found, strict=True)
        ]

    def _finisher(
        self, step: StepInput, placed: SequenceOf[Placed], held: SequenceOf[SequenceOf[int]]
    ) -> Callable[[], list[Results]]:
        """What launches the rest of a step that was begun, once; the results of each rank. `step`: rank 0's
        input; `held`: each rank's slots whose drafts are to be known.
        """
        special = [SpecialRows.of(step.shape, each, self._grammars.eos_ids) for each in placed]

        @cache
        def finish() -> list[Results]:
            drafts = self._drafts(held, step.shape.width)
            for rows, own in zip(special, drafts, strict=True):
                rows.fill(StepMasks(self._grammars, own))
            told = self._sample(special)
            words, event = self._executor.finish(step)
            return [Results(own, event, reports) for own, reports in zip(words, told, strict=True)]

        return finish

    def _drafts(self, held: SequenceOf[SequenceOf[int]], width: int) -> list[dict[int, Nodes]]:
        """Of each rank, by slot, what the step that was begun verifies."""
        if not any(held):
            return [{} for _ in held]
        found = self._executor.drafts()
        return [
            {slot: Nodes.of(drafts, width) for slot, drafts in zip(slots, own, strict=False)}
            for slots, own in zip(held, found, strict=True)
        ]

    def _sample(self, special: SequenceOf[SpecialRows]) -> list[Told]:
        if not any(special):
            return [rows.told(()) for rows in special]
        arrays = [rows.array() for rows in special]
        most, padding = max(map(len, arrays)), self._padding
        vocab = self._executor.state.model.config.vocab_size
        filled = [
            np.concatenate((rows, padding_rows(most - len(rows), padding, vocab)[:, : rows.shape[1]]))
            for rows in arrays
        ]
        reports = self._executor.sample_each(filled)
        return [rows.told([each[rank] for each in reports]) for rank, rows in enumerate(special)]


def _part(finish: Callable[[], list[Results]], rank: int) -> Callable[[], Results]:
    return lambda: finish()[rank]


def _filled(lists: SequenceOf[SequenceOf[int]], padding: int) -> list[list[int]]:
    """All as long as the longest."""
    most = max(map(len, lists))
    return [[*own, *[padding] * (most - len(own))] for own in lists]


def _of_rank(scores: Scores, rank: int) -> Scores:
    """`scores`: of all ranks, each [ranks, ...]."""
    return Scores(scores.own[rank], scores.ids[rank], scores.best[rank])
