"""The drafter that looks drafts up, alone or beside a draft head: of two proposals it gives one.

A head is another drafter, here or far away, which hears all that it would hear alone. Per sequence and round
the better source proposes, as the rates of both say: how often each one's first draft was the token that
came. The lookup's rate counts every round, a head's only the rounds in which it proposed. What the rule is,
`eyas.engine.speculation.drafters.lookup` states. The fast twin is `eyas.engine.kernels.drafts.lookup`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from eyas.common.config import SpeculationConfig
from eyas.common.types import KvHandle
from eyas.engine.batch.sequence import Sequence
from eyas.engine.batch.tree import ROOT, DraftTree
from eyas.engine.ipc.messages import DraftDown, DraftUp
from eyas.engine.speculation.drafters.base import AcceptedRows, Drafter, SequenceProposal
from eyas.engine.speculation.drafters.lookup import AT_FIRST, SequenceText, learned, look_up, prefers


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
        ids, request = seq.all_tokens(), seq.generation.request
        text = SequenceText(ids, len(seq.prompt), request.predicted)
        match = look_up(text, self._depth, history=self._history)
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
