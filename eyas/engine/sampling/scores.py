"""How probable given tokens are: log-softmax of the model's own logits, before any processor.

A row's numbers are the same to the bit whatever other rows share the call. Among equals the lowest id is
first. The logits of many rows are made and dropped slice by slice, so that memory does not grow with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.common.types import PromptLogprobs, TokenLogprob

SLICE = 64
"""Rows whose logits are there at once."""

SLICE_BYTES = 40
"""What a slice takes for each row and id, at most."""


@dataclass(frozen=True)
class Scores:
    """Of N rows: `own` float32 [N], and of the most probable ids `ids` int32 and `best` float32 [N, top]."""

    own: Tensor
    ids: Tensor
    best: Tensor

    def to_host(self) -> Scores:
        """Valid once the device has passed what it was given before."""
        return Scores(*(part.to("cpu", non_blocking=True) for part in (self.own, self.ids, self.best)))

    def packed(self) -> PromptLogprobs:
        own, ids, best = (part.cpu().numpy().tobytes() for part in (self.own, self.ids, self.best))
        return PromptLogprobs(self.ids.shape[1], own, ids, best)

    def rows(self) -> list[TokenLogprob]:
        rows = zip(self.own.tolist(), self.ids.tolist(), self.best.tolist(), strict=True)
        return [TokenLogprob(own, tuple(zip(ids, best, strict=True))) for own, ids, best in rows]


def score(logits: Tensor, tokens: Tensor, top: int) -> Scores:
    """Of each row of `logits` float32 [N, V]: its token's, int64 [N], and its `top` best ids'."""
    logprobs = logits.log_softmax(-1)
    ids = _best_ids(logprobs, min(top, logits.shape[1]))
    own = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return Scores(own, ids.int(), logprobs.gather(1, ids))


def score_slices(rows: Tensor, tokens: Tensor, top: int, logits: Callable[[Tensor], Tensor]) -> Scores:
    """`score` of `rows` [N], at least one, of which `logits` gives up to SLICE at a time."""
    slices = zip(rows.split(SLICE), tokens.split(SLICE), strict=True)
    parts = [score(logits(some), theirs, top) for some, theirs in slices]
    own, ids, best = zip(*((part.own, part.ids, part.best) for part in parts), strict=True)
    return Scores(torch.cat(own), torch.cat(ids), torch.cat(best))


def _best_ids(logprobs: Tensor, count: int) -> Tensor:
    """Of each row, best first: int64 [N, count]. No two keys are equal: all devices give the same order."""
    bits = logprobs.view(torch.int32)
    level = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = logprobs.shape[1] - 1
    keys = (level << 32) | torch.arange(last, -1, -1, device=logprobs.device)
    return last - (keys.topk(count).values & 0xFFFFFFFF)
