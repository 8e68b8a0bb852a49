"""Drafts for verdicts that have not come yet, on a device: one run for a batch of rounds.

All passes of a batch are launched at once, as a graph where there is one, and what comes of them is looked
for later. `eyas.engine.speculation.draft_worker.ahead_drafter` decides which rounds are worth a run.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from eyas.engine.batch.rows import DecodeRows
from eyas.engine.kernels.drafts import outcomes
from eyas.engine.kernels.drafts.rounds import RoundRows
from eyas.engine.kernels.sampling import couple
from eyas.engine.models.base import Drafted
from eyas.engine.speculation.device import round_rows
from eyas.engine.speculation.draft_worker.batch_inputs import (
    BatchBuffer,
    BatchInputs,
    BatchLayout,
    BatchMemory,
)
from eyas.engine.speculation.draft_worker.chain_features import ChainFeatures
from eyas.engine.speculation.draft_worker.draft_runner import DraftInput
from eyas.engine.speculation.draft_worker.short_runs import DraftState
from eyas.engine.speculation.sized_programs import SizedPrograms
from kv_transfer.layout import pages_for

OUTCOMES = 16
"""Outcomes of a round for which a chain is drafted: a GPU that idles has rows to spare."""

MOST_ROUNDS = 4
"""Rounds of one run, and sequences of a worker that drafts ahead at all: of many that commit in one round,
one nearly always misses. Measured on two H200s: rounds are 13 % shorter at one sequence, as long at 8, and
5 % longer at 32.
"""

UNKEPT = -1  # instead of a place among what is kept: the row's feature comes from elsewhere


@dataclass(frozen=True)
class OutcomeRound:
    """A round whose outcomes are to be drafted. `draft_input`: its certain rows, the newest of which may have
    no feature, which is kept then; behind them the `chain`, whose features are kept in its slot as those of
    `outcome`. `ends`: what `kernels.outcomes.RoundOutcomes` calls `accepted` and `ranks`, of each outcome.
    """

    draft_input: DraftInput
    chain: SequenceOf[int]
    slot: int
    outcome: int
    ends: SequenceOf[tuple[int, int]]


class OutcomeResult(NamedTuple):
    """What came of a round: were all features of its certain rows there, and the tokens of each outcome, the
    one that follows first (-1: the head knows no other).
    """

    whole: bool
    tokens: list[list[int]]


def outcome_layout(batch: int, kept: ChainFeatures, page_size: int) -> BatchLayout:
    """Of `batch` rounds: certain rows of one verdict, then the chain; and pages that are lent for a run."""
    certain, steps, count = kept.steps + 1, kept.steps, kept.outcomes
    more = {"kept": batch * (certain + steps), "drafts": batch * steps}
    more |= dict.fromkeys(("accepted", "ranks"), batch * count)
    pages = pages_for(certain + steps + steps * count, page_size) + 1
    return BatchLayout(batch, certain + steps, batch * pages, more)


class OutcomeProgram:
    """The launches for one layout. `results` int32 [batch or more, ..]: as `OutcomeRuns` reads them."""

    def __init__(
        self, state: DraftState, layout: BatchLayout, there: BatchMemory, results: torch.Tensor
    ) -> None:
        assert state.proposer.kept is not None
        self._state, self._kept, self._layout = state, state.proposer.kept, layout
        self._told = BatchInputs(layout, there, state.width, state.proposer.pool.shape.dtype)
        self._results = results[: layout.batch]
        steps, device = self._kept.steps, there.words.device
        part = self._told.part
        shapes = {"accepted": self._kept.outcomes, "ranks": self._kept.outcomes, "drafts": steps}
        self._outcomes = outcomes.RoundOutcomes.of(
            *(part[name].view(layout.batch, count) for name, count in shapes.items())
        )
        self._ends = torch.arange(steps + 1, dtype=torch.int32, device=device)  # accepted drafts, one by one

    def run(self) -> None:
        """Certain rows and chains, then the outcomes, then what is drafted below them; what came of it."""
        state, told, part = self._state, self._told, self._told.part
        whose = told.take(state.tables, state.firsts)
        ends, count = self._spine(), self._kept.outcomes
        sources, rows = self._found(ends)
        features = ends.features.index_select(0, sources)
        for level in range(self._kept.steps):
            extent = self._kept.steps + (level + 1) * count
            sees = DecodeRows(part["slots"], part["ends"], count, self._outcomes.visible, extent)
            last = state.proposer.run(features, rows, sees)
            features = last.features
            self._kept.keep_level(whose, level, features)
            self._extend(level, last, rows)
        tokens = self._outcomes.tokens.flatten(1)
        self._results.copy_(torch.cat((told.lost[:, None], tokens), 1))

    def _spine(self) -> Drafted:
        """Certain rows and chains; what the head made of the newest certain row, and of each draft."""
        part, proposer, layout = self._told.part, self._state.proposer, self._layout
        place = part["kept"]
        known = self._kept.flat.index_select(0, place.clamp(min=0))
        features = torch.where((place >= 0)[:, None], known, self._told.features)
        rows = RoundRows(part["tokens"], part["positions"], part["kv_rows"], part["starts"])
        drafted = proposer.run(features, rows, DecodeRows(part["slots"], part["starts"], layout.few))
        return proposer.picked(drafted, (part["last"][:, None] + self._ends).flatten())

    def _found(self, ends: Drafted) -> tuple[torch.Tensor, RoundRows]:
        """The outcomes: which of the `ends` each one's token is of, and their rows."""
        proposer, layout, part = self._state.proposer, self._layout, self._told.part
        batch, token_map = proposer.batch(part["slots"]), proposer.head.token_map
        logits = proposer.head.logits(ends.rows)
        couple.couple(batch, 0, logits, token_map, self._ends.repeat(layout.batch))
        ids = logits.topk(min(self._kept.outcomes + 1, logits.shape[1])).indices
        rows = round_rows(part["slots"], layout.batch * self._kept.outcomes)
        rows = RoundRows(rows.tokens, rows.positions, rows.kv_rows, part["ends"])
        sources = torch.empty_like(rows.tokens)
        outcomes.find(batch, self._outcomes, ids, token_map, rows, sources)
        return sources, rows

    def _extend(self, level: int, last: Drafted, rows: RoundRows) -> None:
        """One more draft below every outcome, and its row."""
        proposer = self._state.proposer
        batch, token_map = proposer.batch(self._told.part["slots"]), proposer.head.token_map
        logits = proposer.head.logits(last.rows)
        couple.couple(batch, level + 1, logits, token_map, self._outcomes.accepted.flatten())
        outcomes.extend(batch, self._outcomes, level, logits, token_map, rows)


class OutcomeRuns:
    """One run at a time. `sizes`: as of `SizedPrograms`, of up to `MOST_ROUNDS` rounds. `context`: positions
    that a row may have.
    """

    def __init__(self, state: DraftState, sizes: SequenceOf[int]) -> None:
        assert state.proposer.kept is not None
        self._state, self.kept = state, state.proposer.kept
        self.context = state.tables.sizes.context
        self.most = min(MOST_ROUNDS, state.tables.padding_slot)
        self._layout = cache(lambda batch: outcome_layout(batch, self.kept, state.page_size))
        self._telling = BatchBuffer(self._layout(self.most), state.width, state.page_size, state.device)
        words = 1 + self.kept.outcomes * (self.kept.steps + 1)
        self._results = torch.zeros(self.most, words, dtype=torch.int32, device=state.device)
        self._found = torch.zeros_like(self._results, device="cpu", pin_memory=state.device != "cpu")
        self._event = None if state.device == "cpu" else torch.cuda.Event()
        self._count = 0  # of the rounds of the run that is under way
        self.programs = SizedPrograms([size for size in sizes if size <= self.most], self._program)

    @property
    def done(self) -> bool:
        """Has the run come to its end?"""
        return self._event is None or self._event.query()

    @torch.inference_mode()
    def launch(self, rounds: SequenceOf[OutcomeRound], writes: np.ndarray) -> None:
        """Begins a run of up to `most` rounds. `writes`: as of `ShortRuns.draft`."""
        size = self.programs.size(len(rounds))
        self._tell(size, rounds, writes)
        self.programs.launch(size)
        self._count = len(rounds)
        self._found[: self._count].copy_(self._results[: self._count], non_blocking=True)
        if self._event is not None:
            self._event.record()

    def take(self) -> list[OutcomeResult]:
        """What came of the run. Waits for its end."""
        if self._event is not None:
            self._event.synchronize()
        found = self._found[: self._count].numpy()
        tokens = found[:, 1:].reshape(self._count, self.kept.outcomes, -1).tolist()
        return [OutcomeResult(not lost, own) for lost, own in zip(found[:, 0].tolist(), tokens, strict=True)]

    @torch.inference_mode()
    def capture(self) -> None:
        """Records a graph for each size."""
        self.programs.capture(lambda size: self._tell(size, (), np.zeros((2, 0), np.int32)))

    def _program(self, batch: int) -> OutcomeProgram:
        return OutcomeProgram(self._state, self._layout(batch), self._telling.there, self._results)

    def _tell(self, size: int, rounds: SequenceOf[OutcomeRound], writes: np.ndarray) -> None:
        layout, telling, tables = self._layout(size), self._telling, self._state.tables
        asked, slots = [one.draft_input for one in rounds], [one.slot for one in rounds]
        telling.sequences(layout, asked, slots, tables.padding_slot)
        runs = [one.draft_input.extension.followed_by(one.chain) for one in rounds]
        telling.rows(layout, runs)
        self._tell_outcomes(layout, rounds)
        telling.writes(layout, tables, writes)
        telling.send(layout, runs)

    def _tell_outcomes(self, layout: BatchLayout, rounds: SequenceOf[OutcomeRound]) -> None:
        part, kept = self._telling.parts(layout), self.kept
        places: list[int] = []
        drafts: list[int] = []
        accepted: list[int] = []
        ranks: list[int] = []
        for one in rounds:
            new, chain = one.draft_input.extension, len(one.chain)
            known = new.features.shape[0] + len(new.ringed)
            own = [*[kept.newest(one.slot)] * (len(new.tokens) - known)]
            own += kept.places(one.slot, one.outcome, chain)
            places += [*[UNKEPT] * known, *own, *[UNKEPT] * (layout.few - known - len(own))]
            drafts += [*one.chain, *[-1] * (kept.steps - chain)]
            none = kept.outcomes - len(one.ends)
            accepted += [*[end for end, _ in one.ends], *[0] * none]
            ranks += [*[rank for _, rank in one.ends], *[-1] * none]
        for name, values, other in (
            ("kept", places, UNKEPT),
            ("drafts", drafts, -1),
            ("accepted", accepted, 0),
            ("ranks", ranks, -1),
        ):
            part[name][: len(values)], part[name][len(values) :] = values, other
