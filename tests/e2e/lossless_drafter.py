"""A drafter without a model: trees of every shape, whose tokens are nonsense, or lie around the true answer.

It stands in the place of a real one, so that the engine's promise is tried on advice that no draft head
would give: equal siblings, deep chains, fans, special ids, late proposals, none, two at once.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from eyas.common.types import KvHandle
from eyas.engine.batch.sequence import Sequence
from eyas.engine.batch.tree import ROOT, DraftTree
from eyas.engine.speculation.drafters.base import AcceptedRows, Drafter, SequenceProposal

MOST_NODES = 16  # more than any round verifies, so that the engine has to narrow
FOLLOW = 0.9  # how often it agrees to follow a sequence when asked
HIT = 0.5  # how often a node carries the answer's token, where the answer is known
ODD = 0.3  # how often another node carries one of a few ids: ends of the vocabulary, special ones, repeats


class RandomDrafter(Drafter):
    """`answers`: output ids by request id; a request that is not in it gets nonsense only."""

    def __init__(self, vocab_size: int, answers: Mapping[str, SequenceOf[int]]) -> None:
        self._vocab_size = vocab_size
        self._answers = answers
        self._random = random.Random(2)
        self._drafts: list[SequenceProposal] = []

    @property
    def local_kv(self) -> bool:
        return False

    def open(self, seq: Sequence, base: int, handle: KvHandle | None) -> bool:
        return self._random.random() < FOLLOW

    def post(self, commits: SequenceOf[AcceptedRows]) -> None:
        for commit in commits:
            newest = commit.base + len(commit.tokens)
            for _ in range(self._random.choice((0, 0, 1, 1, 2))):
                late = self._random.choice((0, 0, 0, 1, 2))
                base = max(newest - late, len(commit.seq.prompt) - 1)
                self._drafts.append(SequenceProposal(commit.seq, base, self._tree(commit.seq, base)))

    def take(self) -> list[SequenceProposal]:
        drafts, self._drafts = self._drafts, []
        return drafts

    def owed(self) -> bool:
        return False

    def close(self, seq: Sequence) -> None:
        self._drafts = [draft for draft in self._drafts if draft.seq is not seq]

    def _tree(self, seq: Sequence, base: int) -> DraftTree:
        count = self._random.randint(1, MOST_NODES)
        shape = self._random.choice(("chain", "fan", "any", "any"))
        parents: list[int] = []
        depths: list[int] = []
        for node in range(count):
            parent = {"chain": node - 1, "fan": ROOT}.get(shape, self._random.randrange(ROOT, node))
            parents.append(parent)
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return DraftTree([self._token(seq, base + depth) for depth in depths], parents)

    def _token(self, seq: Sequence, position: int) -> int:
        answer = self._answers.get(seq.generation.id, ())
        at = position - len(seq.prompt)
        if 0 <= at < len(answer) and self._random.random() < HIT:
            return answer[at]
        if self._random.random() < ODD:
            return self._random.choice((0, 1, 2, self._vocab_size - 1, seq.prompt[-1]))
        return self._random.randrange(self._vocab_size)
