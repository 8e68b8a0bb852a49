"""Drafting ahead of verdicts in a draft engine: its beginning, its continuation, its use and its end.

Chains only, on a device only, and for few sequences: a tree has more outcomes than there is time for, a CPU
has no cores to spare, and of many sequences that commit in one round one nearly always misses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from eyas.engine.ipc.messages import DraftsAhead
from eyas.engine.ipc.row_memory import RowMemory
from eyas.engine.speculation.draft_worker.draft_commits import DraftRefused
from eyas.engine.speculation.draft_worker.draft_runner import DeviceChain
from eyas.engine.speculation.draft_worker.draft_sequences import DraftedSequence, DraftSequences, Key
from eyas.engine.speculation.draft_worker.outcome_runs import MOST_ROUNDS
from eyas.engine.speculation.drafters.ahead import AheadRound, AheadRunner, VerifiedRound

FADING = 0.99  # what a round counts beside the next one, for the acceptance


class _RunningRounds(NamedTuple):
    """A round that may not be drafted to its end. `rows`: where features of its peer were when it began."""

    peer: int
    followed: DraftedSequence
    ahead: AheadRound
    rows: RowMemory | None

    @property
    def dropped(self) -> bool:
        return self.followed.ahead is not self.ahead


class AheadDrafter:
    """Drafts ahead for the sequences of one engine, in runs between its messages.

    `runner`: None where chains cannot be drafted ahead of. `rows_of`: where a peer's device writes features.
    """

    def __init__(
        self,
        runner: AheadRunner | None,
        sequences: DraftSequences,
        rows_of: Callable[[int], RowMemory | None],
    ) -> None:
        self._runner = runner
        self._sequences = sequences
        self._rows_of = rows_of
        self._under_way: list[_RunningRounds] = []
        self._accepted, self._refused = 1.0, 1.0  # drafts, fading
        self._hits = self._misses = self._drafted = 0

    @property
    def counts(self) -> DraftsAhead:
        """Running totals."""
        return DraftsAhead(self._hits, self._misses, self._drafted)

    @property
    def busy(self) -> bool:
        """Is there something left to draft, or to look for?"""
        return any(not one.dropped for one in self._under_way)

    def answer(self, followed: DraftedSequence) -> DeviceChain | None:
        """The proposal for what it has committed, if it is here. Whatever else was drafted is dropped."""
        since, ahead = followed.since, followed.ahead
        if ahead is None:
            return None
        self._learn(ahead.accepted(since), ahead.steps)
        last = followed.commits[-1]
        chain = ahead.answer(since, last.steps) if last.topk == 1 else None
        self._note()
        self._sequences.end_ahead(followed)
        self._hits += chain is not None
        self._misses += chain is None
        return chain

    def begin(self, key: Key, followed: DraftedSequence, chain: DeviceChain) -> None:
        """`chain` was proposed below the newest answered commit: its verdict may be drafted ahead of."""
        if self._runner is None or len(self._sequences.followed) > MOST_ROUNDS:
            return
        behind = self._runner.rows(chain, followed.first + followed.end)
        if not behind or not self._sequences.spare(followed, behind):
            return
        rows = self._rows_of(key[0])
        try:
            certain = followed.certain(rows)
        except DraftRefused:  # its next commit says so
            self._sequences.end_ahead(followed)
            return
        again, lent = not followed.repairs, len(followed.spare)
        verified = VerifiedRound(followed.asks(key, certain), chain, again, lent)
        acceptance = self._accepted / (self._accepted + self._refused)
        followed.ahead = self._runner.begin(verified, acceptance)
        self._under_way.append(_RunningRounds(key[0], followed, followed.ahead, rows))

    @torch.inference_mode()
    def advance(self) -> None:
        """The next work for everything that is not drafted yet. True features are written first."""
        if not self._under_way or self._runner is None:
            return
        for one in self._under_way:
            if not one.dropped and one.rows is not self._rows_of(one.peer):  # its features are nowhere now
                self._sequences.end_ahead(one.followed)
        if unfinished := [one.ahead for one in self._under_way if not (one.dropped or one.ahead.drafted)]:
            self._runner.advance(unfinished)
        self._note()

    def end(self) -> None:
        """Drops everything: after this nothing writes rows that were to be drafted ahead."""
        for followed in self._sequences.followed.values():
            self._sequences.end_ahead(followed)

    def _note(self) -> None:
        """Takes down how far everything is."""
        left = []
        for one in self._under_way:
            if not one.dropped and one.ahead.written and one.followed.repairs:
                one.followed.written()
            if not one.dropped and one.ahead.drafted:
                self._drafted += one.ahead.outcomes
            elif not one.dropped:
                left.append(one)
        self._under_way = left

    def _learn(self, accepted: int, offered: int) -> None:
        self._accepted = self._accepted * FADING + accepted
        self._refused = self._refused * FADING + (accepted < offered)
