"""Drafts without a model: what followed where the text stood like this before, and the drafter of them.

A text that repeats itself (code that is edited, a document that is quoted) says its next tokens itself. The
last tokens of a sequence are looked up in its own prompt and output, and in a text that the caller predicted;
what followed there is the proposal. (Prompt lookup decoding: Saxena, 2023; texts given for reference: LLMA,
Yang et al., 2023; longer matches are trusted more: SuffixDecoding, Oliaro et al., 2024.) A look is made of a
few passes over arrays, whatever the text: a caller who repeats one word makes none dear.

The drafter looks drafts up alone or beside a draft head: of two proposals it gives one. A head is another
drafter, here or far away, which hears all that it would hear alone. Per sequence and round the better source
proposes, as the rates of both say: how often each one's first draft was the token that came. The lookup's
rate counts every round, a head's only the rounds in which it proposed.

The fast twin is `eyas.engine.kernels.drafts.lookup`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eyas.common.config import SpeculationConfig
from eyas.common.types import KvHandle
from eyas.engine.batch.sequence import Sequence
from eyas.engine.batch.tree import ROOT, DraftTree
from eyas.engine.ipc.messages import DraftDown, DraftUp
from eyas.engine.speculation.drafters.base import AcceptedRows, Drafter, SequenceProposal

LONGEST = 8
"""Tokens that are compared: longer matches count as this long."""
SHORTEST = 2
"""A shorter match proposes nothing."""
CERTAIN = 1024
"""The rate of a source whose first draft was always right."""
AT_FIRST = (1024, 896)
"""The rates of the lookup and of a head before anything was verified."""
LAG = 3
"""A rate follows each outcome by this power of 1/2 of its distance."""


class LookupMatch(NamedTuple):
    """A proposal: `tokens`, at least one, after a match of `match` tokens."""

    match: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class SequenceText:
    """A sequence so far: `ids`, of which the first `prompt` are the prompt's, and what its caller predicted.

    The predicted answer stands after the prompt too: until the answer has a token, it matches at its start,
    by as many ids as are the same `before` it. What recent answers say of a text stands in a prediction's
    place: as if the prompt ended where that begins.
    """

    ids: SequenceOf[int]
    prompt: int
    predicted: SequenceOf[int] = ()
    before: int = LONGEST

    @classmethod
    def of(cls, seq: Sequence) -> SequenceText:
        """A sequence as it is searched now."""
        ids, said = seq.all_tokens(), seq.continuation
        if said is not None:
            return cls(ids, said.base, said.tokens, said.match)
        return cls(ids, len(seq.prompt), seq.generation.request.predicted)

    @property
    def searched(self) -> list[int]:
        """The prediction as it is searched: LONGEST ids before it (-1: there are fewer), then its own."""
        before = list(self.ids[max(self.prompt - min(self.before, LONGEST), 0) : self.prompt])
        return [-1] * (LONGEST - len(before)) + before + list(self.predicted)


def look_up(text: SequenceText, depth: int, *, history: bool = True) -> LookupMatch | None:
    """At most `depth` tokens that followed the longest match; None if there is none.

    The longest match wins. Of equal ones that in the prediction does, nearest to where the answer stands if
    it had been right so far (of two, the later), then the last one in the text itself, which is left out
    unless `history`. A copy of the text may run into what it has just proposed: so a text that repeats
    itself with a period shorter than `depth` goes on.
    """
    answered = len(text.ids) - text.prompt
    matches: list[tuple[int, bool, int]] = []  # match, of the prediction, place of the token that follows
    if text.predicted:
        match, ends = _longest(text.ids, text.searched, LONGEST)
        if match:
            far = np.abs(ends - LONGEST - answered)
            matches.append((match, True, int(ends[far == far.min()][-1]) - LONGEST))
    if history:
        match, ends = _longest(text.ids, text.ids, 1)
        if match:
            matches.append((match, False, int(ends[-1])))
    if not matches:
        return None
    match, predicted, place = max(matches)
    if predicted:
        follows = text.predicted[place : place + depth]
    else:
        period = text.ids[place:]
        follows = [period[i % len(period)] for i in range(depth)]
    return LookupMatch(match, tuple(follows))


def prefers(match: int, lookup: int, head: int) -> bool:
    """Does a match of `match` tokens (0: none) propose, where a head could? By the rates of both sources.

    A match is trusted by match / (match + 1). While nothing is known, it takes one of seven tokens.
    """
    return match > 0 and lookup * match >= head * (match + 1)


def learned(rate: int, right: bool) -> int:
    """The rate, of CERTAIN, after one more first draft of its source."""
    return rate + ((CERTAIN * right - rate) >> LAG)


def _longest(ids: SequenceOf[int], searched: SequenceOf[int], first: int) -> tuple[int, np.ndarray]:
    """The longest match of the last ids in `searched`, and where such ones end, ascending: at `first` or
    later, before its end. 0: there is none, or it is too short.
    """
    text, ends, longest = np.asarray(searched, np.int64), np.arange(first, len(searched)), 0
    for back, id in enumerate(reversed(ids[-LONGEST:])):
        further = ends[(ends > back) & (text[ends - 1 - back] == id)]
        if not len(further):
            break
        ends, longest = further, 1 + back
    return (longest, ends) if longest >= SHORTEST else (0, ends)


@dataclass
class _SourceRates:
    """How both sources do for one sequence. `lookup`, `head`: their rates."""

    lookup: int = AT_FIRST[0]
    head: int = AT_FIRST[1]
    tokens: int = 0  # of the sequence when its newest draft was proposed; 0: none was
    looked_up: int | None = None  # the first token that was looked up then
    headed: bool = False  # the head proposed then

    def learn(self, seq: Sequence) -> None:
        """What came of the newest proposals."""
        if not 0 < self.tokens < len(seq):
            return
        if self.looked_up is not None:
            self.lookup = learned(self.lookup, seq.tokens(self.tokens, self.tokens + 1) == [self.looked_up])
        if self.headed:
            self.head = learned(self.head, len(seq) - self.tokens > 1)


class LookupDrafter(Drafter):
    """`head`: the drafter beside it, if there is one. Predictions are always searched, the sequences
    themselves only if `spec.ngram`.
    """

    def __init__(self, spec: SpeculationConfig, head: Drafter | None = None) -> None:
        self._head = head
        self._depth = spec.deepest
        self._history = spec.ngram
        self._records: dict[int, _SourceRates] = {}  # by the sequence's number
        self._grown: dict[int, Sequence] = {}  # that have new tokens, since proposals were last taken

    def grew(self, seq: Sequence) -> None:
        if self._history or seq.generation.request.predicted:
            self._grown[seq.uid] = seq

    def take(self) -> list[SequenceProposal]:
        headed = {draft.seq.uid: draft for draft in (() if self._head is None else self._head.take())}
        grown, self._grown = self._grown, {}
        chosen = [self._choose(seq, headed.pop(uid, None)) for uid, seq in grown.items()]
        return [*headed.values(), *(draft for draft in chosen if draft is not None)]

    def _choose(self, seq: Sequence, headed: SequenceProposal | None) -> SequenceProposal | None:
        """Of what is looked up and what the head proposed, if it did."""
        record = self._records.setdefault(seq.uid, _SourceRates())
        record.learn(seq)
        text = SequenceText.of(seq)
        match, ids = look_up(text, self._depth, history=self._history), text.ids
        there = headed is not None and bool(headed.tree.trim(ids[headed.base + 1 :]))
        record.tokens, record.looked_up = len(ids), match and match.tokens[0]
        record.headed = there and not prefers(match.match if match else 0, record.lookup, record.head)
        if match is None or record.headed:
            return headed
        return SequenceProposal(
            seq, len(ids) - 1, DraftTree(match.tokens, range(ROOT, len(match.tokens) - 1))
        )

    def close(self, seq: Sequence) -> None:
        self._records.pop(seq.uid, None)
        self._grown.pop(seq.uid, None)
        if self._head is not None:
            self._head.close(seq)

    # --- what is the head's alone ----------------------------------------------------------------------

    @property
    def local_kv(self) -> bool:
        return self._head is not None and self._head.local_kv

    @property
    def missed_rounds(self) -> int:
        return 0 if self._head is None else self._head.missed_rounds

    @property
    def sent(self) -> Mapping[str, int]:
        return {} if self._head is None else self._head.sent

    @property
    def bells(self) -> SequenceOf[int]:
        return () if self._head is None else self._head.bells

    def open(self, seq: Sequence, base: int, handle: KvHandle | None) -> bool:
        return self._head is not None and self._head.open(seq, base, handle)

    def begin(self, seq: Sequence, base: int, want: SpeculationConfig | None) -> bool:
        return self._head is not None and self._head.begin(seq, base, want)

    def post(self, commits: SequenceOf[AcceptedRows]) -> None:
        if self._head is not None:
            self._head.post(commits)

    def owed(self) -> bool:
        return self._head is not None and self._head.owed()

    def in_time(self) -> bool:
        return self._head is not None and self._head.in_time()

    def outgoing(self) -> list[DraftUp]:
        return [] if self._head is None else self._head.outgoing()

    def leave(self) -> None:
        if self._head is not None:
            self._head.leave()

    def arrived(self) -> list[DraftDown]:
        return [] if self._head is None else self._head.arrived()

    def deliver(self, down: DraftDown) -> list[tuple[KvHandle, int]]:
        return [] if self._head is None else self._head.deliver(down)
