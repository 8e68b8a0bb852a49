"""Log-probabilities of given tokens: the log-softmax of the model's logits, before any processor.

A row's numbers are the same to the bit whatever other rows share the call. Of equal ids the lowest comes
first. The logits of many rows are computed and dropped slice by slice, so that memory does not grow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from eyas.common.types import PromptTokenLogprobs, TokenLogprob

SLICE = 64
"""Rows whose logits exist at the same time."""

SLICE_BYTES = 40
"""The most bytes that a slice takes per row and id."""


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities for N rows: `own` float32 [N] of the given tokens, and the `top` most probable
    ids (`ids` int32 [N, top]) with theirs (`best` float32 [N, top]), best first. `experts`: that the rows
    took, if that was asked for (`PromptTokenLogprobs`).
    """

    own: Tensor
    ids: Tensor
    best: Tensor
    experts: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> TokenScores:
        """The scores with every part changed."""
        experts = None if self.experts is None else change(self.experts)
        return TokenScores(change(self.own), change(self.ids), change(self.best), experts)

    def to_host(self) -> TokenScores:
        """A copy on the host, valid once the device has finished the work queued so far."""
        return self.each(lambda part: part.to("cpu", non_blocking=True))

    def of_rank(self, rank: int) -> TokenScores:
        """The scores of one attention rank, where each part is [ranks, ...]."""
        return self.each(lambda part: part[rank])

    def packed(self) -> PromptTokenLogprobs:
        """The scores as bytes, for messages. Waits for the device."""
        own, ids, best = (part.cpu().numpy().tobytes() for part in (self.own, self.ids, self.best))
        experts = b"" if self.experts is None else self.experts.cpu().numpy().tobytes()
        return PromptTokenLogprobs(self.ids.shape[1], own, ids, best, experts)

    def rows(self) -> list[TokenLogprob]:
        """One entry per row. Waits for the device."""
        rows = zip(self.own.tolist(), self.ids.tolist(), self.best.tolist(), strict=True)
        return [TokenLogprob(own, tuple(zip(ids, best, strict=True))) for own, ids, best in rows]


def score(logits: Tensor, tokens: Tensor, top: int) -> TokenScores:
    """The scores of `tokens` int64 [N] and of the `top` best ids, for each row of `logits` float32 [N, V]."""
    logprobs = logits.log_softmax(-1)
    ids = _best_ids(logprobs, min(top, logits.shape[1]))
    own = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return TokenScores(own, ids.int(), logprobs.gather(1, ids))


Scorer: TypeAlias = Callable[[Tensor, Tensor, int], TokenScores]


def score_slices(
    rows: Tensor, tokens: Tensor, top: int, logits: Callable[[Tensor], Tensor], score: Scorer = score
) -> TokenScores:
    """`score` for the rows numbered `rows` [N], N >= 1. `logits` maps up to SLICE row numbers to logits."""
    slices = zip(rows.split(SLICE), tokens.split(SLICE), strict=True)
    parts = [score(logits(some), theirs, top) for some, theirs in slices]
    own, ids, best = zip(*((part.own, part.ids, part.best) for part in parts), strict=True)
    return TokenScores(torch.cat(own), torch.cat(ids), torch.cat(best))


def _best_ids(logprobs: Tensor, count: int) -> Tensor:
    """The `count` best ids of each row, best first: int64 [N, count].

    The sort keys are distinct, so every device gives the same order.
    """
    bits = logprobs.view(torch.int32)
    level = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = logprobs.shape[1] - 1
    keys = (level << 32) | torch.arange(last, -1, -1, device=logprobs.device)
    return last - (keys.topk(count).values & 0xFFFFFFFF)
