"""Which experts a row takes, made of its router's logits in float32: plain torch, for any number of rows.

A CPU's routers are made of it, and a GPU's whose scores no kernel knows. All shapes follow from the number of
rows, and nothing is read of the device, so that it may stand in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from eyas.engine.checkpoint.config import ExpertsSpec

TINY = 1e-20
"""Keeps a sum of weights from being 0."""


class Routes(NamedTuple):
    """The experts of R rows, best first: `experts` int64 [R, per_row], `weights` float32 [R, per_row]."""

    experts: torch.Tensor
    weights: torch.Tensor


def sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-logit)). Not torch.sigmoid: its vector bodies and scalar tails round differently, as
    those of F.silu do.
    """
    return 1.0 / logits.neg().exp_().add_(1.0)


def softmax(logits: torch.Tensor) -> torch.Tensor:
    """Over all experts of a row."""
    raised = (logits - logits.amax(-1, keepdim=True)).exp_()
    return raised / raised.sum(-1, keepdim=True)


SPARSE_JITTER = 0.01


def sparse_mixer(logits: torch.Tensor) -> torch.Tensor:
    """Shares of a row's best expert and its second best (arXiv 2409.12136), 0 for all others: of each in a
    softmax over those that are no better, and worse by a fraction of 2 * 0.01 at most.
    """
    found, left = torch.zeros_like(logits), logits
    for _ in range(2):
        peak, best = left.max(-1, keepdim=True)
        worse = (peak - logits) / torch.maximum(logits.abs(), peak) > 2 * SPARSE_JITTER
        near = softmax(left.masked_fill(worse, -torch.inf))
        found = found.scatter(1, best, near.gather(1, best))
        left = left.scatter(1, best, -torch.inf)
    return found


SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": sigmoid,
    "softmax": softmax,
    "sparse_mixer": sparse_mixer,
}
"""What an `ExpertsSpec` may name: logits float32 [R, experts] -> scores [R, experts]. A line here is all that
a new one needs; kernels know the first two.
"""


def choose(scores: torch.Tensor, spec: ExpertsSpec, correction: torch.Tensor | None) -> Routes:
    """The best experts of each row by scores [R, experts], and their weights; of equals, the first.

    `correction` float32 [experts]: added to what chooses, not to the weights.
    """
    ranked = scores if correction is None else scores + correction
    chosen = _best(allowed(ranked, spec), spec.per_row)
    return Routes(chosen, weights_of(scores, chosen, spec))


def weights_of(scores: torch.Tensor, chosen: torch.Tensor, spec: ExpertsSpec) -> torch.Tensor:
    """The weights of the chosen experts int64 [R, per_row], float32."""
    weights = scores.gather(1, chosen)
    if spec.normalised:
        weights = weights / (in_order(weights.unbind(1)) + TINY)[:, None]
    return weights * spec.scale


def in_order(terms: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Their sum, added one after another: a library's own sum may take any order."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def allowed(ranked: torch.Tensor, spec: ExpertsSpec) -> torch.Tensor:
    """Scores [R, experts], -inf in all groups but the best."""
    if spec.groups == spec.topk_groups:
        return ranked
    grouped = ranked.view(ranked.shape[0], spec.groups, -1)
    best = grouped.topk(spec.group_best, -1).values
    groups = _best(in_order(best.unbind(-1)), spec.topk_groups)
    closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, groups, False)
    return grouped.masked_fill(closed[..., None], -torch.inf).view_as(ranked)


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the largest scores of each row, int64 [R, count], best first; of equals, the first."""
    return scores.sort(stable=True, dim=-1, descending=True).indices[:, :count]
