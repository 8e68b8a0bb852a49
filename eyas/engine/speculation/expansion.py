"""Grows an EAGLE-2 draft tree from a draft head's probabilities (EAGLE-2, section 3).

Plain numbers, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eyas.engine.batch.tree import ROOT, DraftTree


@dataclass(frozen=True)
class FrontierNode:
    """A candidate that the draft head runs next.

    `candidate` is its flat index among all candidates, and `parent_slot` the place of its parent in the
    previous frontier. With k nodes per level, slot g of level l is draft row l * k + g; `rows` lists the rows
    of the node's path, its own last.
    """

    candidate: int
    token: int
    score: float
    parent_slot: int
    rows: tuple[int, ...]


class TreeExpansion:
    """Grows one EAGLE-2 tree: the k best candidates of each level are expanded, the best of all are kept.

    A candidate's score is the product of the draft probabilities on its path. Of equal scores the lower flat
    index wins. A child never scores above its parent and always has a higher index, so the parent of a kept
    node is always kept too.
    """

    def __init__(self, topk: int, draft_tokens: int) -> None:
        """`draft_tokens` counts the root: the final tree has at most draft_tokens - 1 nodes."""
        self._topk = topk
        self._draft_tokens = draft_tokens
        self._tokens: list[int] = []
        self._scores: list[float] = []
        self._parents: list[int] = []
        self._frontier = [FrontierNode(ROOT, token=-1, score=1.0, parent_slot=0, rows=())]
        self._level = 0

    def grow(self, tokens: Sequence[Sequence[int]], probabilities: Sequence[Sequence[float]]) -> None:
        """Adds the children of each frontier node, best first. Both are [1, k] at first, then [k, k]."""
        first = len(self._tokens)
        slots = []
        for slot, parent in enumerate(self._frontier):
            for token, probability in zip(tokens[slot], probabilities[slot], strict=True):
                self._tokens.append(token)
                self._scores.append(parent.score * _sane(probability))
                self._parents.append(parent.candidate)
                slots.append(slot)
        best = self._best(range(first, len(self._tokens)), self._topk)
        self._frontier = [self._node(q, slots[q - first], g) for g, q in enumerate(best)]
        self._level += 1

    def frontier(self) -> list[FrontierNode]:
        """The k best candidates of the last level, best first."""
        return self._frontier

    def select(self) -> DraftTree:
        """The tree of the best candidates of all levels, in the order of their flat indices."""
        chosen = sorted(self._best(range(len(self._tokens)), self._draft_tokens - 1))
        place = {ROOT: ROOT} | {q: i for i, q in enumerate(chosen)}
        return DraftTree([self._tokens[q] for q in chosen], [place[self._parents[q]] for q in chosen])

    def _best(self, candidates: Iterable[int], count: int) -> list[int]:
        return sorted(candidates, key=lambda q: (-self._scores[q], q))[:count]

    def _node(self, q: int, parent_slot: int, slot: int) -> FrontierNode:
        rows = (*self._frontier[parent_slot].rows, self._level * self._topk + slot)
        return FrontierNode(q, self._tokens[q], self._scores[q], parent_slot, rows)


def _sane(probability: float) -> float:
    """Clamped to 0 .. 1, NaN to 0: rounding (or a broken head) must not lift a child above its parent."""
    return min(probability, 1.0) if probability > 0.0 else 0.0
