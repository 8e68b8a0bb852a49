"""Which experts a row's logits choose, as kernels find it out: the order of what is wanted, and one row's.

`ranked` makes numbers of scores that no two experts share. A program that has to know a choice of one row
finds it from their maxima (`choice_at`): that takes less time than a launch, and few registers. Each compared
with each, of 128 experts, left room for half as many programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.kernels.launch.sizes import power_of_2

TINY = tl.constexpr(1e-20)
LAST = tl.constexpr(0xFFFF)  # no expert has a larger number
CLOSED = tl.constexpr(-(2**63))  # below whatever is wanted
MOST = tl.constexpr(1e30)  # of a logit, either way: differences stay numbers


@dataclass(frozen=True)
class RowChoice:
    """How one row's choice follows from its logits, whose bias is added: a kernel's compile-time parameters.
    `uniform`: as of `route.choose`.
    """

    experts: int
    per_row: int
    sigmoid: bool
    normalised: bool
    scale: float
    uniform: bool

    @classmethod
    def of(cls, spec: ExpertsSpec, uniform: bool) -> RowChoice | None:
        """None of a spec that has groups, or corrects merits."""
        if spec.corrected or spec.groups != spec.topk_groups:
            return None
        sigmoid = spec.scores == "sigmoid"
        return cls(spec.experts, spec.per_row, sigmoid, spec.normalised, spec.scale, uniform)

    @property
    def side(self) -> int:
        """Experts, filled up."""
        return power_of_2(self.experts)


@triton.jit
def bounded(logit):
    """Logits that are numbers and finite: a NaN is the least."""
    return tl.minimum(tl.maximum(tl.where(logit == logit, logit, -MOST), -MOST), MOST)


@triton.jit
def choice_at(logits, slot, choice: tl.constexpr):
    """The expert that a row takes as its `slot`-th, best first, and its weight. logits float32 [experts]."""
    expert = tl.arange(0, choice.side)
    there = expert < choice.experts
    logit = tl.load(logits + expert, mask=there, other=0.0)
    logit = bounded(logit)
    logit = tl.where(there, logit, float("-inf"))
    if choice.sigmoid:
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-logit))
    else:
        raised = tl.exp(logit - tl.max(logit, 0))
        scores = tl.div_rn(raised, tl.zeros_like(raised) + tl.sum(raised, 0))
    if choice.uniform:
        best, weight, total = _by_chance(scores, logit, expert, there, slot, choice)
    else:
        best, weight, total = _best(scores, expert, there, slot, choice)
    if choice.normalised:
        weight = weight / (total + TINY)
    return best, weight * choice.scale


@triton.jit
def _best(scores, expert, there, slot, choice: tl.constexpr):
    """The expert, its score, and the sum of all that are taken, one maximum after the other."""
    left = tl.where(there, ranked(scores, expert), CLOSED)
    best, weight, total = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    PER_ROW: tl.constexpr = choice.per_row
    for place in tl.static_range(PER_ROW):
        top = tl.max(left, 0)
        score = (top >> 32).to(tl.int32).to(tl.float32, bitcast=True)  # no score is negative
        best = tl.where(place == slot, -(top & LAST).to(tl.int32) + LAST, best)
        weight = tl.where(place == slot, score, weight)
        total += score
        left = tl.where(left == top, CLOSED, left)
    return best, weight, total


@triton.jit
def _by_chance(scores, logit, expert, there, slot, choice: tl.constexpr):
    """The same of experts at equal distances from one that the first logit decides."""
    zeroth, row = tl.sum(tl.where(expert == 0, logit, 0.0), 0), tl.full((), 0, tl.int32)
    first = by_chance(zeroth, row) % choice.experts
    behind = (expert - first + choice.experts) % choice.experts
    place = (behind * choice.per_row + choice.experts - 1) // choice.experts
    taken = (place < choice.per_row) & (place * choice.experts // choice.per_row == behind)
    place = tl.where(taken & there, place, choice.per_row)
    weight = tl.sum(tl.where(place == slot, scores, 0.0), 0)
    total = tl.sum(tl.where(place < choice.per_row, scores, 0.0), 0)
    return tl.sum(tl.where(place == slot, expert, 0), 0), weight, total


@triton.jit
def ranked(merit, expert):
    """Numbers int64 in the order of what is wanted, float32: one maximum finds the best, and who it is.

    Of equals the first expert's is larger; all are larger than CLOSED.
    """
    bits = (merit + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0, its equal
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) - expert.to(tl.int64) + LAST


@triton.jit
def by_chance(logit, row):
    """A number that nothing but a row's logit and its place decide, int32, not negative."""
    x = logit.to(tl.uint32, bitcast=True) ^ (row.to(tl.uint32) * 0x9E3779B1)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return ((x ^ (x >> 16)) >> 1).to(tl.int32)
