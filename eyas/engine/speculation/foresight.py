"""What a draft engine drafts ahead of its sequences' verdicts: when it begins, goes on, is used and dropped.

It knows the sequences and their pages; how outcomes are found and drafted is the business of
`eyas.engine.speculation.ahead`, whether to do it at all that of `eyas.engine.speculation.turns`. Chains only:
a tree has more outcomes than there is time for.
"""

from __future__ import annotations

import torch

from eyas.engine.ipc.messages import DraftsAhead
from eyas.engine.speculation.ahead import OUTCOMES, Ahead, Verified, advance, fan_out, rows_ahead
from eyas.engine.speculation.draft_runner import Chain, DraftRunner
from eyas.engine.speculation.draft_sequences import DraftedSequence, DraftSequences
from eyas.engine.speculation.turns import Turns

FADING = 0.99  # what a round counts beside the next one, for the acceptance


class Foresight:
    """Drafts ahead for the sequences of one engine, one forward at a time, for as long as it pays.

    `runner`: None where chains cannot be drafted ahead of.
    """

    def __init__(self, runner: DraftRunner | None, sequences: DraftSequences) -> None:
        self._runner = runner
        self._sequences = sequences
        self._turns = Turns()
        self._accepted, self._refused = 1.0, 1.0  # drafts, fading
        self._hits = self._misses = self._drafted = 0

    @property
    def counts(self) -> DraftsAhead:
        """Running totals."""
        return DraftsAhead(self._hits, self._misses, self._drafted)

    @property
    def busy(self) -> bool:
        """Is there something left to draft?"""
        return bool(self._unfinished())

    def answer(self, followed: DraftedSequence, now: float) -> Chain | None:
        """The proposal for what it has committed, if that was foreseen. Whatever else was drafted is dropped.

        `now`: monotonic seconds.
        """
        since, ahead = followed.since, followed.ahead
        self._turns.round(followed.rounds, len(since), now)
        if ahead is None:
            return None
        self._learn(ahead.accepted(since), ahead.steps)
        last = followed.commits[-1]
        chain = ahead.answer(since, last.steps) if last.topk == 1 else None
        self._sequences.end_ahead(followed)
        self._hits += chain is not None
        self._misses += chain is None
        return chain

    def begin(self, followed: DraftedSequence, chain: Chain) -> None:
        """`chain` was proposed below the newest answered commit: its verdict may be drafted ahead of."""
        rows = rows_ahead(len(chain.tokens), OUTCOMES)
        if self._runner is None or not self._turns.ahead or not self._sequences.spare(followed, rows):
            return
        opened = followed.open
        verified = Verified(followed.certain(), chain, opened.params, opened.choice)
        acceptance = self._accepted / (self._accepted + self._refused)
        followed.ahead = Ahead(verified, fan_out(len(chain.tokens), acceptance, OUTCOMES))

    @torch.inference_mode()
    def advance(self) -> None:
        """One forward for everything that is not drafted yet. True features are written by the first."""
        unfinished = self._unfinished()
        if not unfinished or self._runner is None:
            return
        advance(self._runner, [ahead for _, ahead in unfinished])
        for followed, ahead in unfinished:
            if followed.repairs:
                followed.written()
            if ahead.drafted:
                self._drafted += ahead.outcomes

    def _unfinished(self) -> list[tuple[DraftedSequence, Ahead]]:
        followed = self._sequences.followed.values()
        return [(one, one.ahead) for one in followed if one.ahead is not None and not one.ahead.drafted]

    def _learn(self, accepted: int, offered: int) -> None:
        self._accepted = self._accepted * FADING + accepted
        self._refused = self._refused * FADING + (accepted < offered)
