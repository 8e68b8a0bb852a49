"""Measures acceptance by depth of a head's chains on texts that the target wrote, without serving.

From every pair of a text a chain is drafted, and fed the text: while its drafts are the target's first
choices, and the text is the target's greedy answer, that is what it would feed itself. For other texts it is
close.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.train.heads.base import DraftHead
from eyas.train.unroll import UnrollBatch, unrolled


@dataclass
class ByDepth:
    """Counts, by depth, of chains with a draft there, and of chains whose drafts were right up to there."""

    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, depth: int, offered: int, accepted: int) -> None:
        """Counts chains at one depth, from 0 on."""
        while len(self.offered) <= depth:
            self.offered.append(0)
            self.accepted.append(0)
        self.offered[depth] += offered
        self.accepted[depth] += accepted

    @property
    def shares(self) -> list[float]:
        """The share of drafts accepted by depth, of chains as deep."""
        return [right / max(1, all) for right, all in zip(self.accepted, self.offered, strict=True)]

    @property
    def length(self) -> float:
        """Tokens per verify step, the target's own included."""
        return 1 + sum(self.shares)

    def figures(self) -> dict[str, object]:
        """Rounded, for a log."""
        return {
            "acceptance_length": round(self.length, 4),
            "acceptance_by_depth": [round(share, 4) for share in self.shares],
        }


@torch.no_grad()
def count_chains(head: DraftHead, course: UnrollBatch, best: Tensor, depth: int, counts: ByDepth) -> None:
    """Drafts chains of `depth` tokens from every pair whose answer goes on as long.

    `best` int64 [B, L]: the target's first choice after each token. The head's mode is the caller's business.
    """
    rows = course.rows(depth)
    counted = torch.ones_like(course.counted(0, rows))
    right = counted
    for step, (state, _) in enumerate(unrolled(head, course, depth)):
        drafts = head.logits(state).argmax(-1)
        if head.token_map is not None:
            drafts = head.token_map[drafts]
        counted = counted & course.counted(step, rows)
        right = right & counted & (drafts == best[:, 1 + step : 1 + step + rows])
        counts.add(step, int(counted.sum()), int(right.sum()))
