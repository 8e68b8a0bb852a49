"""Turns the works of a step into its input: the writes to the tables, and the rows in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from eyas.common.config import MOST_STEPS
from eyas.engine.batch.sequence import Continuation, GenerationKind, RingPlace, Sequence, SequenceWork
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.batch.tables import TableWrites
from eyas.engine.batch.tree import NO_TREE, DraftTree
from eyas.engine.device.program import DeviceState
from eyas.engine.device.special import DraftNodes, occupy_special, reads_text
from eyas.engine.device.step import ArrivedState, JoinBatch, PlacedBatch, StepLayout, StepShape, tiles_for
from eyas.engine.grammar.grammars import GrammarManager
from eyas.engine.kernels.exchange.mailbox import polls_in

MOST_FORCED_AHEAD = 4
"""Sequences of a step for which it is looked what their grammars force behind it: up to 0.6 ms each."""


FIRST_ROUNDS = 2
"""Rounds behind a prompt that wait for a drafter that has the prompt's rows and has not answered yet. All
sequences of a step wait with them: as long as others, times the share of them that begin.
"""
BEGINNING = 4
"""The round behind these waits a fourth as long as others for such a drafter, and so does the first one of a
sequence whose drafter has heard of it by the fronts: with few sequences it may be in time.
"""


@dataclass
class SlotOccupant:
    """The sequence in a slot as the tables have it: its pages, and whether they follow its growth.

    `drafted`: something is proposed for it inside the step. `verified`: there may be drafts from elsewhere in
    the step that is being launched. `ring`: where its features go. `polls`: how often it looks for drafts in
    a mailbox. `mailed_steps`: since it has that, rounds and the step that mailed its prompt's end. `waiting`:
    rows that plain rounds have left to the head. `others`: as `pages`, by the names of the further tables.
    `continuation`: as the lookup knows it.
    """

    occupancy: int
    choice: int
    drafted: bool
    continuation: Continuation | None = None
    ring: RingPlace | None = None
    verified: bool = False
    polls: int = 0
    mailed_steps: int = 0
    waiting: int = 0
    pages: int = 0
    grows: bool = False
    others: dict[str, int] = field(default_factory=dict)


class SlotTable:
    """The slots of a device. `state`: of any attention rank, as all have the same; `layout`: with the rank's
    first page. `verified`: by slot the drafts of the step in flight, as far as the host has to know them.
    """

    def __init__(self, state: DeviceState, layout: StepLayout, grammars: GrammarManager) -> None:
        self.layout = layout
        self._state = state
        self._grammars = grammars
        self.verified: dict[int, DraftNodes] = {}
        self._occupants: dict[int, SlotOccupant] = {}  # by slot

    def occupant(self, work: SequenceWork) -> SlotOccupant:
        """The occupant of the slot of a sequence that has joined."""
        return self._occupants[work.seq.slot]

    def tell(
        self, works: SequenceOf[SequenceWork], draft_wait_s: float = 0.0
    ) -> tuple[TableWrites, list[SequenceWork], list[ArrivedState]]:
        """Updates the tables for these sequences; also gives those that join before the step: something is
        drafted for them from now on, and nothing has been; and states that are new here. `draft_wait_s`: as
        of `StepRunner`.
        """
        writes, polls = TableWrites(self._state.tables), polls_in(draft_wait_s)
        arrived = [
            ArrivedState(work.seq.state, work.seq.bound, work.start)
            for work in works
            if work.round and work.start > work.seq.bound and work.seq.state >= 0 and self._is_new(work)
        ]
        first = self._first_looks(works, polls)
        return writes, [work for work in works if self._tell(work, writes, polls, first)], arrived

    def _is_new(self, work: SequenceWork) -> bool:
        """Whether the sequence was not in its slot before."""
        occupant, seq = self._occupants.get(work.seq.slot), work.seq
        return occupant is None or (occupant.occupancy, occupant.choice) != (seq.occupancy, seq.choice)

    def joined(self, joining: SequenceOf[SequenceWork], width: int, writes: np.ndarray) -> JoinBatch:
        """`width`: rows of the rounds in the step that follows; `writes`: to the tables, before it."""
        size, words, features = self.layout.page_size, [], np.zeros((len(joining), 0), np.float32)
        for work in joining:
            row = work.start - 1
            (page,) = self._own(work.seq.pages[row // size : row // size + 1])
            words.append((work.seq.slot, work.tokens[0], row, page * size + row % size))
        if joining and self._drafts:
            rows = [work.seq.window.chunks[-1][-1:].float().cpu().numpy() for work in joining]
            features = np.concatenate(rows)
        packed = np.array(words, np.int32).reshape(-1, 4).T.copy()
        return JoinBatch(packed, features, width, writes)

    def place(self, works: SequenceOf[SequenceWork], width: int) -> tuple[PlacedBatch, StepShape]:
        """Places works in the order of their rows, with the least shape that holds them.

        Attention begins with those that take longest. `width`: rows of a round; those for which nothing is
        drafted need one.
        """
        rounds = _longest(work for work in works if work.round)
        wide = [self._is_wide(work, width) for work in rounds]
        placed = PlacedBatch(
            list(itertools.compress(rounds, wide)),
            [work for work, drafted in zip(rounds, wide, strict=True) if not drafted],
            [work for work in works if not work.round],
        )
        counts = [len(work.tokens) for work in placed.chunks]
        sizes = sum(counts), tiles_for(counts, self.layout), len(placed.ends)
        return placed, StepShape(len(placed.rounds), width, *sizes, len(placed.singles), len(counts))

    def spans(self, chunks: SequenceOf[SequenceWork]) -> list[QuerySpan]:
        """The chunks, in pages of the device's own pool, if something plans them."""
        if self._state.prompts is None:
            return []
        return [QuerySpan(self._own(work.seq.pages), work.start, len(work.tokens)) for work in chunks]

    def shared_rows(self, chunks: SequenceOf[SequenceWork], first: int) -> list[tuple[SequenceWork, int]]:
        """The last rows of prompts from which others start, and whose features these need; the chunks' rows
        stand in the step from row `first` on.
        """
        rows = []
        for work in chunks:
            first += len(work.tokens)
            if self._drafts and work.sample and work.seq.is_shared:
                rows.append((work, first - 1))
        return rows

    @property
    def _drafts(self) -> bool:
        return self._state.drafter is not None

    @property
    def _elsewhere(self) -> bool:
        return self._state.tap is not None

    def _is_wide(self, work: SequenceWork, width: int) -> bool:
        if self._elsewhere:
            return self.occupant(work).verified
        return width == 1 or self.occupant(work).drafted

    def _tell(self, work: SequenceWork, writes: TableWrites, polls: int, first: int) -> bool:
        """True: the sequence joins. The head, if there is one, has to run its newest draft row, which is
        counted as there.
        """
        seq, joins = work.seq, False
        tree = self._drafts_of(work) if self._elsewhere else self._forced(work)
        occupant = self._occupants.get(seq.slot)
        if occupant is None or self._is_new(work):
            joins = self._joins(work)
            seq.draft_len += joins and self._drafts
            occupant = self._occupants[seq.slot] = self._occupy(work, writes)
            tree = tree or NO_TREE  # the sequence before it in this slot has left some
        # Its prompt came from elsewhere, or all but its last row is done.
        if work.round and not occupant.grows:
            writes.put("length", seq.slot, (work.start,))
            writes.put("root", seq.slot, work.tokens[:1])
        occupant.grows = occupant.grows or work.sample
        occupant.verified = bool(tree) or seq.mailed
        if occupant.ring is not seq.ring:
            writes.ring(seq.slot, seq.ring)
            occupant.ring, occupant.mailed_steps = seq.ring, 0
        if seq.mailed and occupant.polls != (looks := self._looks(seq, occupant, polls, first)):
            writes.put("polls", seq.slot, (looks,))
            occupant.polls = looks
        occupant.mailed_steps += work.round or work.mailed_rows > 0
        if tree is not None:
            writes.draft(seq.slot, tree, branching=self._state.trees)
        if occupant.continuation is not seq.continuation:
            self._expect(work, occupant, writes)
        if occupant.pages < len(seq.pages):
            writes.put("pages", seq.slot, self._own(seq.pages[occupant.pages :]), start=occupant.pages)
            occupant.pages = len(seq.pages)
        if len(seq.tables) > 1:
            self._write_others(work, occupant, writes)
        return joins

    @staticmethod
    def _looks(seq: Sequence, occupant: SlotOccupant, polls: int, first: int) -> int:
        """How often a round looks for its drafts. While its drafter begins all others of the step might wait
        in vain with it. `first`: as of `_first_looks`.
        """
        if seq.answered:
            return polls
        if 0 < occupant.mailed_steps <= FIRST_ROUNDS:
            return first
        return max(polls // BEGINNING, 1) if occupant.mailed_steps == FIRST_ROUNDS + 1 else 1

    def _first_looks(self, works: SequenceOf[SequenceWork], polls: int) -> int:
        """How often FIRST_ROUNDS look for their drafts."""
        fresh = [work for work in works if work.round and work.seq.mailed and not work.seq.answered]
        known = [self.occupant(work).mailed_steps for work in fresh if not self._is_new(work)]
        beginning = sum(0 < steps <= FIRST_ROUNDS for steps in known)
        return max(polls * beginning // len(works), 1) if beginning else 1

    def _expect(self, work: SequenceWork, occupant: SlotOccupant, writes: TableWrites) -> None:
        """What recent answers say of a sequence has changed."""
        occupant.continuation = work.seq.continuation
        if self._state.lookup is not None and occupant.drafted:
            self._state.lookup.expect(writes, work.seq)

    def _write_others(self, work: SequenceWork, occupant: SlotOccupant, writes: TableWrites) -> None:
        """The pages of further groups of layers; those behind their windows are never read."""
        names = self._state.tables.sizes.page_tables[1:]
        for name, table in zip(names, work.seq.tables[1:], strict=True):
            written = occupant.others.get(name, 0)
            if written < len(table.pages):
                writes.put(name, work.seq.slot, self._own(table.pages[written:]), start=written)
                occupant.others[name] = len(table.pages)

    def _occupy(self, work: SequenceWork, writes: TableWrites) -> SlotOccupant:
        """The sequence takes its slot."""
        seq, lookup, request = work.seq, self._state.lookup, work.seq.generation.request
        params, limits, drafted = request.params, request.draft_limits, self._is_drafted_for(work)
        deepest = limits.deepest or MOST_STEPS
        writes.occupy(seq.slot, params, seq.choice, speculative=deepest if drafted else 0)
        if self._drafts:
            writes.put("adapter", seq.slot, (seq.adapter_slot,))
        if seq.state >= 0:
            writes.put("state", seq.slot, (seq.state,))
            writes.put("bound", seq.slot, (seq.bound,))
        if self._state.trees:
            writes.put("most_topk", seq.slot, (limits.topk,))
            writes.put("most_nodes", seq.slot, (max(limits.draft_tokens - 1, 0),))
        if params.reads_history or params.min_tokens:
            occupy_special(writes, seq, self._grammars.eos_ids)
        if lookup is not None and drafted:
            lookup.occupy(writes, seq)
            if lookup.reads(seq) and not reads_text(params):  # else it is there already
                writes.put("text", seq.slot, seq.all_tokens())
        if self._elsewhere:
            writes.ring(seq.slot, seq.ring)  # whatever the sequence before it had
        return SlotOccupant(
            *(seq.occupancy, seq.choice, drafted, seq.continuation, seq.ring),
            mailed_steps=work.round and FIRST_ROUNDS + 1,  # its drafter hears of it by the fronts
        )

    def _is_drafted_for(self, work: SequenceWork) -> bool:
        """Nothing is proposed for prompts that are decoded elsewhere, nor where a head's KV is missing."""
        seq, generation = work.seq, work.seq.generation
        if generation.kind is GenerationKind.PREFILL or not generation.request.speculative:
            return False
        return not self._drafts or seq.draft_len >= work.start

    def _joins(self, work: SequenceWork) -> bool:
        """True if this is its first round, after a prompt whose last feature alone came here, or nothing at
        all.
        """
        seq = work.seq
        if not work.round or not seq.generation.request.speculative:
            return False
        if self._drafts:
            return seq.window.end == work.start and seq.draft_len == work.start - 1
        return self._state.lookup is not None and bool(seq.output)

    def _drafts_of(self, work: SequenceWork) -> DraftTree | None:
        """The drafts from elsewhere that this step can verify.

        They hang below the newest token that is known. If a step is in flight, it is a plain one, and gives
        one more: if that is the first draft, as it may well be, the others follow it. The device fetches
        drafts from a mailbox by itself.
        """
        tree = None if work.seq.mailed else work.tree
        if tree and work.seq.in_flight:
            tree = tree.trim(tree.tokens[:1])
        if not tree or not (self._state.trees or tree.is_chain):
            return None
        return tree.narrow(self._state.tables.sizes.width - 1)

    def _forced(self, work: SequenceWork) -> DraftTree | None:
        """The tokens that a grammar forces, in place of the drafts of the step before; None: those drafts
        stay, as they do while that step's tokens are on their way.
        """
        if work.seq.in_flight or not self._may_force(work):
            return None
        return self._grammars.forced(work.seq, self._most_forced(work.seq))

    def forced_rows(self, works: SequenceOf[SequenceWork]) -> list[int]:
        """The drafts that grammars force behind the step in flight, by what that may give: rows of
        `kernels.drafts.forced`, one after the other.

        Of trees the device would not know which node gave the root: they keep what a head drafts.
        """
        if self._state.trees or self._elsewhere:
            return []
        ahead, words = [work.seq for work in works if work.seq.in_flight and self._may_force(work)], []
        drafts = self._state.tables.drafts.shape[1]
        for seq in ahead[:MOST_FORCED_AHEAD]:
            nodes = self.verified.get(seq.slot)
            tree = NO_TREE if nodes is None else nodes.tree
            for one in self._grammars.forced_after(seq, tree, self._most_forced(seq)):
                chain = [*one.drafts, *[-1] * (drafts - len(one.drafts))]
                words += [seq.slot, len(seq) + one.accepted, one.token, *chain]
        return words

    def _may_force(self, work: SequenceWork) -> bool:
        request = work.seq.generation.request
        return work.round and request.speculative and request.params.grammar is not None

    def _most_forced(self, seq: Sequence) -> int:
        deepest = self._state.path_rows(self._state.tables.sizes.width) - 1
        return min(deepest, seq.generation.request.draft_limits.deepest or deepest)

    def _own(self, pages: SequenceOf[int]) -> SequenceOf[int]:
        first = self.layout.first_page
        return [page - first for page in pages] if first else pages


def without_singles(placed: PlacedBatch) -> PlacedBatch:
    """A copy with singles as rounds, for a shape that has no other rows."""
    if not placed.singles:
        return placed
    return PlacedBatch(_longest([*placed.rounds, *placed.singles]), (), placed.chunks)


def _longest(works: Iterable[SequenceWork]) -> list[SequenceWork]:
    return sorted(works, key=lambda work: -work.seq.kv_len)
