"""Launches the scheduler's steps on the device and keeps its tables true.

It turns works into a `StepInput`, and says which of its rows are special. It does not decide what runs, nor
what tokens mean; and it never waits for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from eyas.common.config import MOST_STEPS
from eyas.engine.batch.prompt_scores import Asked
from eyas.engine.batch.sequence import Kind, RingPlace, Work
from eyas.engine.batch.spans import Span
from eyas.engine.batch.tables import TableWrites
from eyas.engine.batch.tree import DraftTree
from eyas.engine.device.buckets import Buckets
from eyas.engine.device.certain import Certain, chunk_ends, staying, wanted
from eyas.engine.device.depths import Depths
from eyas.engine.device.executor import Executor
from eyas.engine.device.flight import DeviceFlight, Features, Results, Scored
from eyas.engine.device.masks import Nodes, StepMasks
from eyas.engine.device.special import SpecialRows, occupy_special, reads_text
from eyas.engine.device.step import (
    Joined,
    Late,
    Layout,
    Placed,
    StepInput,
    StepShape,
    Wanted,
    pack,
    tiles_for,
)
from eyas.engine.grammar.grammars import Grammars
from eyas.engine.kernels.mailbox import polls_in
from eyas.engine.speculation.feature_ring import KEPT_ROWS

LATE_AT_ONCE = 64
"""Sequences whose waiting rows the head takes at once: no more rows than of a prompt's chunk."""


@dataclass
class _Known:
    """What the tables know of who sits in a slot: how many pages, and whether they follow its growth.

    `drafted`: something is proposed for it inside the step. `verified`: there may be drafts from elsewhere in
    the step that is being launched. `ring`: where its features go. `polls`: how often it looks for drafts in
    a mailbox. `waiting`: rows that plain rounds have left to the head.
    """

    occupancy: int
    choice: int
    drafted: bool
    ring: RingPlace | None = None
    verified: bool = False
    polls: int = 0
    waiting: int = 0
    pages: int = 0
    grows: bool = False


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
        self._lookup = executor.state.lookup
        self.ahead = ahead
        self.draft_wait_s = 0.0
        self._elsewhere = executor.state.tap is not None
        self._executor = executor
        self._buckets = buckets
        self._depths = depths
        self._layout = layout
        self._grammars = grammars
        self._occupants: dict[int, _Known] = {}  # by slot

    def launch(self, works: SequenceOf[Work]) -> DeviceFlight:
        """Starts a step; `land` of the result waits for it."""
        writes, joining = TableWrites(self._executor.tables), []
        for work in works:
            if self._tell(work, writes):
                joining.append(work)
        depth, buckets = self._depth(works)
        if joining:  # they are told, and drafted for, before the step
            self._executor.join(self._joined(joining, buckets.width), writes.array())
            writes = TableWrites(self._executor.tables)
        self._catch_up(works, buckets.width)
        shape, placed = self._place(works, buckets)
        data, spans = pack(placed, shape, self._layout), self._spans(placed.chunks)
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
        seqs = [work.seq for work in works if work.round]
        followed = [self._occupants[seq.slot].drafted for seq in seqs]
        return self._depths.choose(seqs, followed, prompts=len(seqs) < len(works))

    def _catch_up(self, works: SequenceOf[Work], width: int) -> None:
        """The head takes what plain rounds left to it: before a step that drafts, or once one's is too much.

        Then all join: a call costs about the same for one sequence as for many.
        """
        if self._depths is None or not self.drafts:
            return
        known = ((work, self._occupants[work.seq.slot]) for work in works if work.round)
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
        """Attention begins with those that take longest. Those that nothing is drafted for have a row each,
        if the step's shape has such rows.
        """
        longest = sorted((work for work in works if work.round), key=lambda work: -work.seq.kv_len)
        wide = [self._is_wide(work, buckets) for work in longest]
        placed = Placed(
            list(itertools.compress(longest, wide)),
            [work for work, drafts in zip(longest, wide, strict=True) if not drafts],
            [work for work in works if not work.round],
        )
        counts = [len(work.tokens) for work in placed.chunks]
        tiles, ends = tiles_for(counts, self._layout), len(placed.ends)
        shape = buckets.shape(len(placed.rounds), sum(counts), tiles, ends, singles=len(placed.singles))
        return shape, placed if shape.singles else Placed(longest, (), placed.chunks)

    def _is_wide(self, work: Work, buckets: Buckets) -> bool:
        if self._elsewhere:
            return self._occupants[work.seq.slot].verified
        return buckets.width == 1 or self._occupants[work.seq.slot].drafted

    def _drafts_of(self, work: Work) -> DraftTree | None:
        """What this step can verify of the drafts that came from elsewhere.

        They hang below the newest token that is known. If a step is in flight, it is a plain one, and gives
        one more: if that is the first draft, as it may well be, the others follow it. The device fetches
        drafts from a mailbox by itself.
        """
        tree = None if work.seq.mailed else work.tree
        if tree and work.seq.in_flight:
            tree = tree.trim(tree.tokens[:1])
        if not tree or not (self._executor.state.trees or tree.is_chain):
            return None
        return tree.narrow(self._buckets.width - 1)

    def _forced(self, work: Work) -> DraftTree | None:
        """What a grammar forces, in place of what the step before has drafted; None: that stays."""
        request = work.seq.generation.request
        if request.params.grammar is None or not (work.round and request.speculative):
            return None
        deepest = self._executor.state.path_rows(self._executor.tables.sizes.width) - 1
        most = min(deepest, request.draft_limits.deepest or deepest)
        return self._grammars.forced(work.seq, most) or None

    def _features(self, chunks: SequenceOf[Work], shape: StepShape) -> Features | None:
        """Of the last rows of prompts that others start from, here or elsewhere."""
        row, rows, works = shape.round_rows - 1, [], []
        for work in chunks:
            row += len(work.tokens)
            if work.sample and self.drafts and work.seq.is_shared:
                rows.append(row)
                works.append(work)
        return Features(works, self._executor.features(rows)) if rows else None

    def _spans(self, chunks: SequenceOf[Work]) -> SequenceOf[Span]:
        if self._executor.state.prompts is None:
            return ()
        return [Span(work.seq.pages, work.start, len(work.tokens)) for work in chunks]

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

    def _tell(self, work: Work, writes: TableWrites) -> bool:
        """What the tables do not yet know of the sequence: that it sits there, and its new pages.

        True: it joins. The head, if there is one, has to run its newest draft row, which is counted as there.
        """
        seq = work.seq
        told = self._occupants.get(seq.slot)
        joins, tree = False, self._drafts_of(work) if self._elsewhere else self._forced(work)
        if told is None or (told.occupancy, told.choice) != (seq.occupancy, seq.choice):
            joins = self._joins(work)
            seq.draft_len += joins and self.drafts
            told = self._occupants[seq.slot] = self._occupy(work, writes)
            tree = tree or DraftTree((), ())  # the sequence before it in this slot has left some
        if work.round and not told.grows:  # its prompt came from elsewhere, or all but its last row is done
            writes.put("length", seq.slot, (work.start,))
            writes.put("root", seq.slot, work.tokens[:1])
        told.grows = told.grows or work.sample
        told.verified = bool(tree) or seq.mailed
        if told.ring is not seq.ring:
            writes.ring(seq.slot, seq.ring)
            told.ring = seq.ring
        if seq.mailed and told.polls != (polls := polls_in(self.draft_wait_s)):
            writes.put("polls", seq.slot, (polls,))
            told.polls = polls
        if tree is not None:
            writes.draft(seq.slot, tree, branching=self._executor.state.trees)
        if told.pages < len(seq.pages):
            writes.put("pages", seq.slot, seq.pages[told.pages :], start=told.pages)
            told.pages = len(seq.pages)
        return joins

    def _occupy(self, work: Work, writes: TableWrites) -> _Known:
        """The sequence takes its slot."""
        seq, lookup = work.seq, self._lookup
        params, drafted = seq.generation.request.params, self._is_drafted_for(work)
        limits = seq.generation.request.draft_limits
        deepest = limits.deepest or MOST_STEPS
        writes.occupy(seq.slot, params, seq.choice, speculative=deepest if drafted else 0)
        if self._executor.state.trees:
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
        return _Known(seq.occupancy, seq.choice, drafted, seq.ring)

    def _joins(self, work: Work) -> bool:
        """Is this its first round, after a prompt whose last feature alone came here, or nothing at all?"""
        seq = work.seq
        if not work.round or not seq.generation.request.speculative:
            return False
        if self.drafts:
            return seq.window.end == work.start and seq.draft_len == work.start - 1
        return self._lookup is not None and bool(seq.output)

    def _is_drafted_for(self, work: Work) -> bool:
        """Nothing is proposed for prompts that are decoded elsewhere, nor where a head's KV is missing."""
        seq, generation = work.seq, work.seq.generation
        if generation.kind is Kind.PREFILL or not generation.request.speculative:
            return False
        return not self.drafts or seq.draft_len >= work.start

    def _joined(self, joining: SequenceOf[Work], width: int) -> Joined:
        size, words = self._layout.page_size, []
        for work in joining:
            row = work.start - 1
            kv_row = work.seq.pages[row // size] * size + row % size
            words.append((work.seq.slot, work.tokens[0], row, kv_row))
        features = np.zeros((len(joining), 0), np.float32)
        if self.drafts:
            rows = [work.seq.window.chunks[-1][-1:].float().cpu().numpy() for work in joining]
            features = np.concatenate(rows)
        return Joined(np.array(words, np.int32).T.copy(), features, width)


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
