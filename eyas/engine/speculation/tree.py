"""Draft trees: the shape of a proposal, and how EAGLE-2 grows one from a draft head's probabilities.

Plain integers, no torch: the scheduler cuts trees, the runner turns them into masks, `verify` walks them.
What a token is worth is not known here, only what the drafter thought of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ROOT = -1


@dataclass(frozen=True)
class DraftTree:
    """Draft tokens below a root token that is certain and not part of the tree.

    `parents[i]` is the index of node i's parent, lower than i, or -1 for the root; so every prefix of the
    nodes is a tree too. An empty tree is false. Raises ValueError for anything that is not a tree.
    """

    tokens: Sequence[int]
    parents: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"a tree of {len(self.tokens)} tokens has {len(self.parents)} parents")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"parents[{node}] is {parent}: a parent stands before its child, or is -1")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """True if no node has two children and no path ends early: plain causal attention verifies it."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @property
    def height(self) -> int:
        """How many of its drafts can be accepted at most: the depth of the deepest node; 0 without nodes."""
        return max(self._depths(), default=0)

    def path(self, node: int) -> list[int]:
        """The nodes from the root (left out) down to `node` (included)."""
        upwards = []
        while node != ROOT:
            upwards.append(node)
            node = self.parents[node]
        return upwards[::-1]

    def depth(self, node: int) -> int:
        """How far `node` lies below the root: 1 for the root's children."""
        return len(self.path(node))

    def children(self, node: int) -> list[int]:
        """Children of `node` (-1: of the root), in order."""
        return [child for child in range(node + 1, len(self)) if self.parents[child] == node]

    def trim(self, committed: Sequence[int]) -> DraftTree | None:
        """What is left of the proposal after `committed` tokens: the subtree below the last of them.

        None if they are not a path from the root; an empty tree if the path ends at a leaf.
        """
        node = ROOT
        for token in committed:
            matching = [child for child in self.children(node) if self.tokens[child] == token]
            if not matching:
                return None
            node = matching[0]
        below = [i for i in range(node + 1, len(self)) if node in (ROOT, *self.path(i))]
        return self._renumbered(below, node)

    def narrow(self, nodes: int) -> DraftTree:
        """The tree of the first `nodes` nodes (all of them if there are fewer)."""
        return DraftTree(self.tokens[:nodes], self.parents[:nodes])

    def truncate_depth(self, depth: int) -> DraftTree:
        """The tree of the nodes at most `depth` below the root."""
        return self._renumbered([i for i, below in enumerate(self._depths()) if below <= depth], ROOT)

    def _depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else 1 + depths[parent])
        return depths

    def _renumbered(self, nodes: list[int], root: int) -> DraftTree:
        """The tree of `nodes` (ascending) whose parents all are among them, or `root`."""
        place = {root: ROOT} | {node: i for i, node in enumerate(nodes)}
        return DraftTree([self.tokens[n] for n in nodes], [place[self.parents[n]] for n in nodes])


@dataclass(frozen=True)
class FrontierNode:
    """A candidate that the draft head runs next.

    `candidate` is its flat index in the pool and `parent_slot` its parent's place in the frontier before.
    With k nodes a level, slot g of level l is draft row l * k + g: `rows` lists those of the node's path,
    its own last.
    """

    candidate: int
    token: int
    score: float
    parent_slot: int
    rows: tuple[int, ...]


class TreeExpansion:
    """Grows one EAGLE-2 tree: every level's k best candidates are expanded, the best of all are kept.

    A candidate's score is the product of the draft probabilities on its path. Equal scores go to the lower
    flat index; a child never scores above its parent and always has a higher index, so whenever a node is
    kept its parent is kept as well.
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
        """Add the children of each frontier node, best first: both [1, k] at first, [k, k] afterwards."""
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
        """The best candidates of all levels as a tree, in the order of their flat indices."""
        kept = sorted(self._best(range(len(self._tokens)), self._draft_tokens - 1))
        place = {ROOT: ROOT} | {q: i for i, q in enumerate(kept)}
        return DraftTree([self._tokens[q] for q in kept], [place[self._parents[q]] for q in kept])

    def _best(self, candidates: Iterable[int], count: int) -> list[int]:
        return sorted(candidates, key=lambda q: (-self._scores[q], q))[:count]

    def _node(self, q: int, parent_slot: int, slot: int) -> FrontierNode:
        rows = (*self._frontier[parent_slot].rows, self._level * self._topk + slot)
        return FrontierNode(q, self._tokens[q], self._scores[q], parent_slot, rows)


def _sane(probability: float) -> float:
    """Within 0 .. 1, NaN as 0: rounding (or a broken head) must not lift a child above its parent."""
    return min(probability, 1.0) if probability > 0.0 else 0.0
