"""Recalls for each sequence how recent answers of its tenant went on, as soon as its own has come that far.

The host learns a step's tokens one step late, so what it looks up is long, says where it begins, and is read
where the tokens are: by a drafter on the host, or inside the step (`drafters.lookup`, which takes it as if a
caller had predicted it from there on). Of the rounds that follow each uses what it still can. A sequence
that goes on as was recalled is let be until little of that is left.
"""

from __future__ import annotations

from eyas.common.config import SpeculationConfig
from eyas.engine.batch.sequence import Continuation, Sequence
from eyas.engine.speculation.recent_answers import LONGEST, RecentAnswers

LOOKS = 16
"""Sequences for which answers are looked up between two steps; the others' turn comes after the next."""
ROUNDS = 3
"""Rounds of drafts that are to be left: those of the steps that run before what is recalled now is read."""


class AnswerRecall:
    """`spec`: of rounds. Sequences whose caller predicted the answer have that instead."""

    def __init__(self, spec: SpeculationConfig, answers: RecentAnswers | None = None) -> None:
        self.answers = answers or RecentAnswers()
        self._left = ROUNDS * (spec.deepest + 1)
        self._grown: dict[int, Sequence] = {}  # by number; those that wait for their turn first

    def grew(self, seq: Sequence) -> None:
        """It has new tokens."""
        if not seq.generation.request.predicted:
            self._grown.setdefault(seq.uid, seq)

    def gone(self, seq: Sequence) -> None:
        """It has ended, or lost its place."""
        self._grown.pop(seq.uid, None)
        seq.continuation = None

    def ended(self, seq: Sequence) -> None:
        """Its answer is whole: from now on others' texts may go on like it."""
        self.answers.add(_tenant(seq), seq.output)

    def renew(self) -> None:
        """Sets the continuations of sequences that have grown, before the next step is composed."""
        for seq in [self._grown.pop(uid) for uid in list(self._grown)[:LOOKS]]:
            left = _left(seq)
            if len(left) >= self._left:
                continue
            match = self.answers.look_up(_tenant(seq), seq.tokens(max(len(seq) - LONGEST, 0), len(seq)))
            if match is None:
                seq.continuation = None
            elif match.tokens != left:
                seq.continuation = Continuation(len(seq), match.match, match.tokens)


def _tenant(seq: Sequence) -> tuple[str, bytes]:
    """Whose answers a sequence may see: those of the same key and the same salt."""
    request = seq.generation.request
    return request.caller, request.salt


def _left(seq: Sequence) -> tuple[int, ...]:
    """The rest of its continuation; nothing if it went on otherwise."""
    if (continuation := seq.continuation) is None:
        return ()
    since = tuple(seq.tokens(continuation.base, len(seq)))
    if continuation.tokens[: len(since)] != since:
        return ()
    return continuation.tokens[len(since) :]
