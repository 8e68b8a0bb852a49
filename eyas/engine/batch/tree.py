"""Draft trees: the shape of a proposal, and what became of its drafts.

Plain integers, no torch: the engine cuts trees, a step turns them into masks, `speculation.verify` walks
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ROOT = -1


@dataclass(frozen=True)
class DraftTree:
    """Draft tokens below a root token, which is certain and not part of the tree.

    `parents[i]` is the index of node i's parent, which is lower than i, or -1 for the root. So every prefix
    of the nodes is a tree too. An empty tree is false. Raises ValueError if the parents form no tree.
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
        """True if every node is the child of the one before: then causal attention verifies the tree."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @property
    def height(self) -> int:
        """The depth of the deepest node, so the most drafts that can be accepted; 0 without nodes."""
        return max(self._depths(), default=0)

    def path(self, node: int) -> list[int]:
        """The nodes from the root (left out) down to `node` (included)."""
        upwards = []
        while node != ROOT:
            upwards.append(node)
            node = self.parents[node]
        return upwards[::-1]

    def depth(self, node: int) -> int:
        """The distance of `node` below the root: 1 for the root's children."""
        return len(self.path(node))

    def children(self, node: int) -> list[int]:
        """Children of `node` (-1: of the root), in order."""
        return [child for child in range(node + 1, len(self)) if self.parents[child] == node]

    def trim(self, committed: Sequence[int]) -> DraftTree | None:
        """The part of the proposal that remains after `committed` tokens: the subtree below the last of them.

        None if they are not a path from the root; an empty tree if the path ends at a leaf.
        """
        if not committed:
            return self
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
        return self if nodes >= len(self.tokens) else DraftTree(self.tokens[:nodes], self.parents[:nodes])

    def truncate_depth(self, depth: int) -> DraftTree:
        """The tree of the nodes at most `depth` below the root."""
        if depth >= len(self.tokens):
            return self
        return self._renumbered([i for i, below in enumerate(self._depths()) if below <= depth], ROOT)

    def keep(self, nodes: Sequence[int]) -> DraftTree:
        """The tree of `nodes` (ascending), whose parents are among them."""
        return self._renumbered(list(nodes), ROOT)

    def thin(self, topk: int) -> DraftTree:
        """The tree of the first `topk` children of each node that remains."""
        children: dict[int, int] = {ROOT: 0}  # node: its children so far
        for node, parent in enumerate(self.parents):
            if children.get(parent, topk) < topk:
                children[parent] += 1
                children[node] = 0
        return self._renumbered(list(children)[1:], ROOT)

    def _depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else 1 + depths[parent])
        return depths

    def _renumbered(self, nodes: list[int], root: int) -> DraftTree:
        """The tree of `nodes` (ascending) whose parents all are among them, or `root`."""
        place = {root: ROOT} | {node: i for i, node in enumerate(nodes)}
        return DraftTree([self.tokens[n] for n in nodes], [place[self.parents[n]] for n in nodes])


NO_TREE = DraftTree((), ())


class DraftCounts(NamedTuple):
    """Counts of the drafts of one sequence in one step.

    Only one branch of a tree can be accepted, so `offered` is the depth of the drafts: the most that could be
    `accepted`. `nodes` is how many drafts were verified, on all branches.
    """

    accepted: int
    offered: int
    nodes: int


NO_DRAFTS = DraftCounts(0, 0, 0)
