"""The verdict on a draft: which nodes the target agrees with, and which tokens a round emits.

The target's own token at every node is chosen before, so accepting is only a walk down the tree. So a draft
can shorten the work and never change the output. No torch, no probabilities. On a GPU
`eyas.engine.kernels.drafts.rounds` walks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.engine.batch.tree import ROOT, DraftTree


@dataclass(frozen=True)
class TreeVerdict:
    """`path`: the accepted nodes, top down. `tokens`: their tokens, and the target's choice after them."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]


def walk(tree: DraftTree | None, chosen: Sequence[int]) -> TreeVerdict:
    """Follows the target's choices down `tree` (None: a plain row).

    chosen[0] is the target's token at the root, chosen[1 + i] at node i. A child is accepted if it equals
    the token chosen at its parent; of equal siblings, the first is. Children come after their parents, so one
    pass over the nodes meets the whole path in order.
    """
    node = ROOT
    path, tokens = [], [chosen[0]]
    if tree is not None:
        for child, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            if parent == node and token == tokens[-1]:
                node = child
                path.append(child)
                tokens.append(chosen[1 + child])
    return TreeVerdict(tuple(path), tuple(tokens))
