"""Launches the scheduler's steps on one to N attention ranks and keeps their tables true.

It turns works into a `StepInput` for each rank, and says which of its rows are special; the writes to tables
is the business of `eyas.engine.device.slot_table`. It does not decide what runs, nor what tokens mean; and it
waits for a device only where a grammar has to see the drafts.

Several ranks have tables and pages of their own, and share their experts, those of a draft head too. So all
begin each step in one shape, that of the rank with the most to do, an idle one with rows of padding. What is
launched beside steps is launched on all of them too, for as many sequences or rows.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial

import numpy as np

from eyas.engine.batch.prompt_scores import ScoreRequest
from eyas.engine.batch.sequence import SequenceWork
from eyas.engine.device.buckets import DepthBuckets, GraphBuckets
from eyas.engine.device.executor import StepExecutor
from eyas.engine.device.flight import (
    AcceptedFeatures,
    LaunchedStep,
    PromptFeatures,
    RankPart,
    ScoredPrompt,
    StepOutput,
    chunk_ends,
    feature_request,
    mailed_ends,
    staying,
)
from eyas.engine.device.slot_table import SlotOccupant, SlotTable, without_singles
from eyas.engine.device.special import DraftNodes, SpecialReport, SpecialRows, StepMasks, padding_rows
from eyas.engine.device.step import (
    NO_MASKS,
    ArrivedState,
    CatchUp,
    FeatureRequest,
    MailedPrompts,
    PlacedBatch,
    StepInput,
    StepLayout,
    StepShape,
    pack,
)
from eyas.engine.grammar.grammars import GrammarManager
from eyas.engine.grammar.state import MaskRoom
from eyas.engine.speculation.feature_rows import RING_ROWS

MAX_CATCH_UPS = 64
"""Sequences whose waiting rows the head takes at once: no more rows than of a prompt's chunk."""


class DeviceRunner:
    """`layouts`: of each attention rank's pages. `ahead`: may a step be launched while another is in flight?
    `depths`: if these are adaptive, on one rank.
    """

    def __init__(
        self,
        executor: StepExecutor,
        buckets: GraphBuckets,
        layouts: SequenceOf[StepLayout],
        grammars: GrammarManager,
        *,
        ahead: bool,
        depths: DepthBuckets | None = None,
    ) -> None:
        self.drafts = executor.state.drafter is not None
        self.ahead = ahead
        self.draft_wait_s = 0.0
        self._executor = executor
        self._buckets = buckets
        self._depths = depths
        self._grammars = grammars
        self._padding_slot = layouts[0].padding_slot
        self._ranks = [SlotTable(executor.state, layout, grammars) for layout in layouts]

    def launch(self, works: SequenceOf[SequenceWork]) -> LaunchedStep:
        """Starts a step; `land` of the result waits for it."""
        mine = self._by_rank(works)
        writes, joining, arrived = self._tell(mine)
        depth, buckets = self._depth(works)
        if any(joining):  # written to the tables, and drafted for, before the step
            writes = self._join(joining, writes, buckets.headed)
        self._catch_up(works, buckets)
        shape, placed = self._place(mine, buckets)
        to_score = [score_requests(each.chunks, shape.round_rows) for each in placed]
        grammar_slots = [slots_with_grammar(each, shape) for each in placed]
        forced = [
            rank.forced_rows(own) if slots else []
            for rank, own, slots in zip(self._ranks, mine, grammar_slots, strict=True)
        ]
        certain, features = self._certain(placed[0], shape)
        steps = [
            StepInput(
                shape,
                pack(each, shape, rank.layout),
                own_writes,
                rank.spans(each.chunks),
                any(to_score),
                features,
                slots,
                states,
                any(one.experts for asked in to_score for _, one in asked),
                own_forced,
                MailedPrompts.of(each.chunks, shape.round_rows),
            )
            for rank, each, own_writes, slots, states, own_forced in zip(
                *(self._ranks, placed, writes, filled(grammar_slots, self._padding_slot), arrived, forced),
                strict=True,
            )
        ]
        self._executor.begin(*steps)
        parts = self._parts(placed, to_score, shape)
        special = [SpecialRows.of(shape, each, self._grammars.eos_ids) for each in placed]
        finish = partial(self._finish, steps[0], special, grammar_slots, certain)
        flight = LaunchedStep(shape, works, parts, finish, depth)
        if not any(self._grammars.awaits(work.seq) for work in works):
            flight.complete()
        return flight

    def _by_rank(self, works: SequenceOf[SequenceWork]) -> list[SequenceOf[SequenceWork]]:
        if len(self._ranks) == 1:
            return [works]
        mine: list[list[SequenceWork]] = [[] for _ in self._ranks]
        for work in works:
            mine[work.seq.generation.rank or 0].append(work)
        return list(mine)

    def _tell(
        self, mine: SequenceOf[SequenceOf[SequenceWork]]
    ) -> tuple[list[np.ndarray], list[list[SequenceWork]], list[list[ArrivedState]]]:
        """Updates each rank's tables with the step, or before it; gives the writes, the sequences that join,
        and the states that are new.
        """
        updates = [rank.tell(own, self.draft_wait_s) for rank, own in zip(self._ranks, mine, strict=True)]
        writes, joining, arrived = zip(*updates, strict=True)
        return [own.array() for own in writes], list(joining), list(arrived)

    def _join(
        self, joining: SequenceOf[list[SequenceWork]], writes: SequenceOf[np.ndarray], width: int
    ) -> list[np.ndarray]:
        """Applies the writes before the step and drafts for the sequences that join: on all ranks at once,
        for as many.
        """
        joined = [
            rank.joined(own, width, own_writes)
            for rank, own, own_writes in zip(self._ranks, joining, writes, strict=True)
        ]
        if len(joined) > 1:
            most, head_width = max(map(len, joining)), max(each.features.shape[1] for each in joined)
            joined = [each.filled(most, head_width, self._padding_slot) for each in joined]
        self._executor.join(*joined)
        return [own_writes[:, :0] for own_writes in writes]

    def _certain(
        self, placed: PlacedBatch, shape: StepShape
    ) -> tuple[AcceptedFeatures | None, FeatureRequest | None]:
        """The step's features for a drafter elsewhere, still without rows, and what is to be asked for."""
        tap = self._executor.state.tap
        if tap is None:
            return None, None
        path_rows, ends = self._executor.state.path_rows(shape.width), chunk_ends(placed.chunks)
        stay, mailed = staying(placed, tap.windows), mailed_ends(placed.chunks, tap.windows)
        request = feature_request(placed, shape, path_rows, ends, stay)
        return AcceptedFeatures(None, path_rows, ends, stay, mailed), request

    def _parts(
        self,
        placed: SequenceOf[PlacedBatch],
        to_score: SequenceOf[list[tuple[SequenceWork, ScoreRequest]]],
        shape: StepShape,
    ) -> list[RankPart]:
        """Each rank's, with what is asked for of the rows of its prompts."""
        scored = [
            [ScoredPrompt(work, one, self._executor.score(one).of_rank(rank)) for work, one in own]
            for rank, own in enumerate(to_score)
        ]
        return [RankPart(*part) for part in zip(placed, scored, self._features(placed, shape), strict=True)]

    def _finish(
        self,
        step: StepInput,
        special: SequenceOf[SpecialRows],
        grammar_slots: SequenceOf[SequenceOf[int]],
        certain: AcceptedFeatures | None,
    ) -> StepOutput:
        """Samples after the forward of a step in progress; masks are filled while the device computes.

        `step`: rank 0's; `grammar_slots`: each rank's slots whose drafts are to be known.
        """
        every, masked = self._drafts(grammar_slots, step.shape.width), []
        for rank, (rows, drafts) in enumerate(zip(special, every, strict=True)):
            room = MaskRoom(self._executor.mask_rows(most, rank)) if (most := rows.most_masked) else None
            rows.fill(StepMasks(self._grammars, drafts), room)
            masked.append(NO_MASKS if room is None else rows.masked(room))
        if any(len(each.places) for each in masked):
            self._executor.mask(*masked)
        reports = self._sample(special)
        words, event = self._executor.finish(step)
        if certain is not None:
            certain = replace(certain, rows=self._executor.certain)
        return StepOutput(words, event, reports, certain)

    def _drafts(self, grammar_slots: SequenceOf[SequenceOf[int]], width: int) -> list[dict[int, DraftNodes]]:
        """The drafts, by rank and slot, that the step in progress verifies for outputs with a grammar."""
        every: list[dict[int, DraftNodes]] = [{} for _ in grammar_slots]
        if any(grammar_slots):
            every = [
                {slot: DraftNodes.of(drafts, width) for slot, drafts in zip(slots, own, strict=False)}
                for slots, own in zip(grammar_slots, self._executor.drafts().tolist(), strict=True)
            ]
        for rank, own_drafts in zip(self._ranks, every, strict=True):
            rank.verified = own_drafts
        return every

    def _sample(self, special: SequenceOf[SpecialRows]) -> list[SpecialReport]:
        if not any(special):
            return [rows.report(()) for rows in special]
        arrays = [rows.array() for rows in special]
        if len(arrays) > 1:
            most, padding = max(map(len, arrays)), self._padding_slot
            vocab = self._executor.state.model.config.vocab_size
            fillers = [padding_rows(most - len(rows), padding, vocab)[:, : rows.shape[1]] for rows in arrays]
            arrays = [np.concatenate(pair) for pair in zip(arrays, fillers, strict=True)]
        reports = self._executor.sample(*arrays)
        return [rows.report([each[rank] for each in reports]) for rank, rows in enumerate(special)]

    def _depth(self, works: SequenceOf[SequenceWork]) -> tuple[int | None, GraphBuckets]:
        """The draft depth of the step, if it may change, and its graphs."""
        if self._depths is None:
            return None, self._buckets
        rounds = [work for work in works if work.round]
        followed = [self._occupant(work).drafted for work in rounds]
        seqs = [work.seq for work in rounds]
        return self._depths.choose(seqs, followed, prompts=len(seqs) < len(works))

    def _occupant(self, work: SequenceWork) -> SlotOccupant:
        return self._ranks[work.seq.generation.rank or 0].occupant(work)

    def _catch_up(self, works: SequenceOf[SequenceWork], buckets: GraphBuckets) -> None:
        """The head takes what rounds without it left: before a step in which it drafts, or once one's is too
        much. As many rows wait as a round may have made certain: the device knows how many it did.

        Then all join: a call costs about the same for one sequence as for many.
        """
        if self._depths is None or not self.drafts:
            return
        drafts, leaves = buckets.headed > 1, buckets.width if buckets.headed == 1 else 0
        known = ((work, self._occupant(work)) for work in works if work.round)
        followed = [(work, occupant) for work, occupant in known if occupant.drafted]
        due = drafts or any(occupant.waiting + leaves > RING_ROWS for _, occupant in followed)
        behind = []
        for work, occupant in followed:
            if due and occupant.waiting:
                behind.append((work.seq.slot, 1))
                occupant.waiting, work.seq.draft_len = 0, work.seq.kv_len
            occupant.waiting += leaves
        for first in range(0, len(behind), MAX_CATCH_UPS):
            some = behind[first : first + MAX_CATCH_UPS]
            size = next(size for size in catch_up_sizes(self._padding_slot) if size >= len(some))
            some += [(self._padding_slot, 0)] * (size - len(some))
            self._executor.catch_up(CatchUp(np.array(some, np.int32).T.copy(), buckets.headed))

    def _place(
        self, mine: SequenceOf[SequenceOf[SequenceWork]], buckets: GraphBuckets
    ) -> tuple[StepShape, list[PlacedBatch]]:
        """The shape of every rank's step, and its rows in it: those that nothing is drafted for have a row
        each, if the shape has such rows.
        """
        placed, least = zip(
            *(rank.place(own, buckets.width) for rank, own in zip(self._ranks, mine, strict=True)),
            strict=True,
        )
        one = common_shape(least)
        sizes = one.batch, one.chunk, one.tiles, one.ends, one.singles, one.prompts
        shape = buckets.shape(*sizes)
        if self._executor.state.adapters is not None and any(each.adapted for each in placed):
            shape = replace(shape, adapted=True)
        return shape, [each if shape.singles else without_singles(each) for each in placed]

    def _features(self, placed: SequenceOf[PlacedBatch], shape: StepShape) -> list[PromptFeatures | None]:
        """The features of the last rows of each rank's prompts that others start from, here or elsewhere."""
        shared = [
            rank.shared_rows(each.chunks, shape.round_rows)
            for rank, each in zip(self._ranks, placed, strict=True)
        ]
        if not any(shared):
            return [None] * len(shared)
        features = self._executor.features(*filled([[row for _, row in own] for own in shared], 0))
        return [
            PromptFeatures([work for work, _ in own], rows[: len(own)])
            for own, rows in zip(shared, features, strict=True)
        ]

    def prompt_rows(self, rounds: int, many: bool) -> int:
        """The number of prompt rows a rank with this number of rounds should have; `many`: whether
        many wait.
        """
        return self._beside_prompts.mixed_prefill_budget(rounds, many)

    def long_prompt_rows(self, rounds: int, ahead: int) -> int:
        """Those of long prompts with `ahead` tokens ahead, if not many wait."""
        return self._beside_prompts.long_prompt_rows(rounds, ahead)

    @property
    def _beside_prompts(self) -> GraphBuckets:
        return self._buckets if self._depths is None else self._depths.beside_prompts()

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page of one rank, between the steps launched before and those after."""
        rank = source // self._ranks[1].layout.first_page if len(self._ranks) > 1 else 0
        first = self._ranks[rank].layout.first_page
        self._executor.copy_page(source - first, target - first, rank)

    def copy_state(self, source: int, target: int) -> None:
        """Copies a slot of states, between the steps launched before and those after."""
        self._executor.copy_state(source, target)

    def wait(self) -> None:
        """Waits until the device has done all that was launched."""
        self._executor.wait()

    def close(self) -> bool:
        """Closes the executor after the last step. False: a device may hang."""
        return self._executor.close()


def common_shape(least: SequenceOf[StepShape]) -> StepShape:
    """The shape of all ranks: it holds the most that any has of anything.

    What nothing is drafted for has rows of its own where that makes no step larger: one rank's may stand
    beside another's rounds.
    """
    if len(least) == 1:
        return least[0]
    batch, singles = max(each.batch for each in least), max(each.singles for each in least)
    chunk, tiles = max(each.chunk for each in least), max(each.tiles for each in least)
    ends, most = max(each.ends for each in least), max(each.batch + each.singles for each in least)
    if batch + singles > most:
        batch, singles = most, 0
    prompts = max(each.prompts for each in least)
    return StepShape(batch, least[0].width, chunk, tiles, ends, singles, prompts)


def filled(lists: SequenceOf[SequenceOf[int]], padding: int) -> SequenceOf[SequenceOf[int]]:
    """Pads all lists to the length of the longest."""
    most = max(map(len, lists))
    return [[*own, *[padding] * (most - len(own))] for own in lists]


def slots_with_grammar(placed: PlacedBatch, shape: StepShape) -> list[int]:
    """Slots of the rounds whose outputs have a grammar: their drafts must be known here."""
    seqs = (work.seq for work in placed.rounds if work.seq.generation.request.params.grammar is not None)
    return [seq.slot for seq in seqs] if shape.width > 1 else []


def catch_up_sizes(running: int) -> tuple[int, ...]:
    """The numbers of sequences that may catch up at once, padding included, if that many run."""
    return tuple(1 << power for power in range((min(running, MAX_CATCH_UPS) - 1).bit_length() + 1))


def score_requests(chunks: SequenceOf[SequenceWork], first: int) -> list[tuple[SequenceWork, ScoreRequest]]:
    """Rows of prompts to be scored; the chunks' rows stand in the step from row `first` on."""
    requests = []
    for work in chunks:
        request = work.score_request(first)
        first += len(work.tokens)
        if request is not None:
            requests.append((work, request))
    return requests
