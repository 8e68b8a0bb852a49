"""Temperature, and the filters that decide which ids survive: top-k, then top-p, then min-p.

A filtered id gets -inf. Each filter sees the distribution that the filter before it left, renormalised. All
filters keep ids from the most probable downwards and, among equals, the lowest ids first. Reductions run
along one row, in an order that the other rows cannot change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.common.params import SamplingParams

# Most nuclei are small: the search tries these numbers of best ids before it sorts a whole row.
NUCLEUS_WINDOWS = (64, 1024)


def tempered(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """log p up to a constant per row: logits [R, V] minus their maximum, divided by the row's temperature.

    Temperatures are above 0. The most probable id gets 0, so that no temperature overflows and the noise
    keeps its precision.
    """
    temperature = logits.new_tensor([p.temperature for p in params]).unsqueeze(1)
    temperature.clamp_(min=torch.finfo(logits.dtype).tiny)
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def survivors(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Sets the ids that a row's filters drop to -inf in the `tempered` scores [R, V], which it returns."""
    by_count = [i for i, p in enumerate(params) if p.top_k > 0]
    if by_count:
        sizes = [min(params[i].top_k, scores.shape[1]) for i in by_count]  # callers may send huge numbers
        count = torch.tensor(sizes, device=scores.device)
        scores[by_count] = keep_best(scores[by_count], count)
    by_mass = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if by_mass:
        mass = torch.tensor([params[i].top_p for i in by_mass], dtype=torch.float64, device=scores.device)
        asking = scores[by_mass]
        scores[by_mass] = keep_best(asking, _nucleus_size(asking, mass))
    by_ratio = [i for i, p in enumerate(params) if p.min_p > 0.0]
    if by_ratio:
        floor = scores.new_tensor([math.log(params[i].min_p) for i in by_ratio]).unsqueeze(1)
        asking = scores[by_ratio]
        scores[by_ratio] = asking.masked_fill_(asking < floor, -torch.inf)
    return scores


def keep_best(scores: Tensor, count: Tensor) -> Tensor:
    """A copy of scores [R, V] with -inf for all but the count[r] >= 1 best ids of each row r.

    Of equal scores the lowest ids are kept.
    """
    count = count.clamp(max=scores.shape[1])
    best = scores.topk(min(int(count.max()) + 1, scores.shape[1])).values
    threshold = best.gather(-1, count.unsqueeze(1) - 1)
    runner_up = best.gather(-1, count.clamp(max=best.shape[1] - 1).unsqueeze(1))
    selected = scores >= threshold
    if bool((runner_up == threshold).any()):  # a tie across the cut: the lowest ids are kept
        above, level = scores > threshold, scores == threshold
        room = count.unsqueeze(1) - above.sum(-1, keepdim=True)
        selected = above | (level & (level.cumsum(-1) <= room))
    return scores.masked_fill(~selected, -torch.inf)


def _nucleus_size(scores: Tensor, mass: Tensor) -> Tensor:
    """The number of each row's most probable ids that together reach `mass` (float64 [R], below 1): int64
    [R].

    The id that reaches it is counted. Sums run from the best id down, so a window that is large enough gives
    the same result as the whole row.
    """
    p = scores.softmax(-1)
    vocab_size = p.shape[1]
    for width in (*NUCLEUS_WINDOWS, vocab_size):
        sums = p.topk(min(width, vocab_size)).values.cumsum(-1, dtype=torch.float64)
        if bool((sums[:, -1] >= mass).all()):
            break
    return (sums < mass.unsqueeze(1)).sum(-1) + 1
