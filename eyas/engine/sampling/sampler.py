"""Chooses one token per row: the argmax over the surviving ids of log p + G, or of p at temperature 0.

p is the model's distribution after bias, penalties, bans, masks, temperature, top-k, top-p and min-p, in that
order. log p is used up to a constant per row, which does not change the argmax. Ties go to the lowest id. A
row's token and logprobs are the same to the bit whatever other rows share the call, and a node of a draft
tree is a row like any other.

A filtered id gets -inf. Each filter sees the distribution that the filter before it left, renormalised. All
filters keep ids from the most probable downwards and, among equals, the lowest ids first. Reductions run
along one row, in an order that the other rows cannot change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.common.params import SamplingParams
from eyas.common.types import TokenLogprob
from eyas.engine.batch.step_result import NOT_FINITE
from eyas.engine.sampling.noise import gumbel_at, gumbel_rows, streams
from eyas.engine.sampling.processors import SampledRow, adjusted
from eyas.engine.sampling.scores import score

__all__ = ["SampledRow", "SampledTokens", "draft_probabilities", "perturbed", "sample"]
# Noise at chosen ids costs this many times as much per id as noise for a whole row.
SPARSE_COST = 4
# Most nuclei are small: the search tries these numbers of best ids before it sorts a whole row.
NUCLEUS_WINDOWS = (64, 1024)


@dataclass(frozen=True)
class SampledTokens:
    """One entry per row; a logprob is None where the row's parameters ask for none."""

    tokens: list[int]
    logprobs: list[TokenLogprob | None]


def sample(logits: Tensor, rows: Sequence[SampledRow]) -> SampledTokens:
    """The token of each row. `logits` float32 [R, V] come from the model and are not modified.

    Logprobs are the log-softmax of `logits`, before any processor; `top` is sorted, best first. Of a row
    that holds NaN or +infinity, or nothing else than -infinity, the token is NOT_FINITE.
    """
    scores = adjusted(logits, rows)
    tokens = scores.argmax(-1)
    warm = [i for i, row in enumerate(rows) if not row.params.greedy]
    if warm:
        asking = [rows[i] for i in warm]
        params = [row.params for row in asking]
        filtered = survivors(tempered(scores[warm], params), params)
        tokens[warm] = _with_noise(filtered, asking).argmax(-1)
    chosen = tokens.tolist()
    logprobs = _logprobs(logits, rows, chosen)
    finite = logits.amax(-1).isfinite().tolist()  # a maximum with NaN is NaN
    checked = [token if sound else NOT_FINITE for token, sound in zip(chosen, finite, strict=True)]
    return SampledTokens(checked, logprobs)


def perturbed(draft_logits: Tensor, rows: Sequence[SampledRow], token_map: Tensor | None) -> Tensor:
    """The scores of which a drafter with the seed should take the argmax: log q + G, [R, Vd].

    G is taken at the target's ids: `token_map` int64 [Vd] gives the target id of each draft id (None: the
    same). A row of temperature 0 keeps its logits. Only parameters, choice and position of `rows` are read:
    drafts are advice, so their logits need no processors or filters.
    """
    warm = [i for i, row in enumerate(rows) if not row.params.greedy]
    if not warm:
        return draft_logits
    asking = [rows[i] for i in warm]
    scores = tempered(draft_logits[warm], [row.params for row in asking])
    scores += _draft_noise(scores, asking, token_map)
    return draft_logits.index_copy(0, torch.tensor(warm, device=scores.device), scores)


def draft_probabilities(draft_logits: Tensor, rows: Sequence[SampledRow], token_map: Tensor | None) -> Tensor:
    """The chances by which a draft tree grows: softmax(draft logits + temperature * G), [R, Vd].

    The target takes the id with the best logit + temperature * G. A draft head's logits stand for the
    target's with an error of one unit, whatever the temperature. If that error is a Gumbel number, an id's
    chance to be taken is this softmax; at temperature 0 it is EAGLE-2's score. Arguments as of `perturbed`.
    """
    warm = [i for i, row in enumerate(rows) if not row.params.greedy]
    if not warm:
        return draft_logits.softmax(-1)
    asking = [rows[i] for i in warm]
    temperature = draft_logits.new_tensor([[row.params.temperature] for row in asking])
    scores = draft_logits[warm]
    scores += temperature * _draft_noise(scores, asking, token_map)
    return draft_logits.index_copy(0, torch.tensor(warm, device=scores.device), scores).softmax(-1)


def _draft_noise(scores: Tensor, rows: Sequence[SampledRow], token_map: Tensor | None) -> Tensor:
    """G for each of the draft's ids, [R, Vd]."""
    stream = _streams(rows, scores)
    if token_map is None:
        return gumbel_rows(stream, scores.shape[1])
    return gumbel_at(stream, token_map.unsqueeze(0))


def _with_noise(scores: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """scores + G. G is computed for the survivors only where that is less work."""
    stream = _streams(rows, scores)
    alive = scores > -torch.inf
    if SPARSE_COST * int(alive.count_nonzero()) > alive.numel():
        return scores + gumbel_rows(stream, scores.shape[1])
    row, token = alive.nonzero(as_tuple=True)
    noisy = torch.full_like(scores, -torch.inf)
    noisy[row, token] = scores[row, token] + gumbel_at(stream[row], token.unsqueeze(1)).squeeze(1)
    return noisy


def _streams(rows: Sequence[SampledRow], like: Tensor) -> Tensor:
    return streams([(row.params.seed, row.position, row.choice) for row in rows], like.device)


def _logprobs(logits: Tensor, rows: Sequence[SampledRow], tokens: list[int]) -> list[TokenLogprob | None]:
    results: list[TokenLogprob | None] = [None] * len(rows)
    counts = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
    if not counts:
        return results
    asking = list(counts)
    chosen = torch.tensor([tokens[i] for i in asking], device=logits.device)
    scored = score(logits[asking], chosen, max(counts.values())).rows()
    for i, one in zip(asking, scored, strict=True):
        results[i] = TokenLogprob(one.logprob, one.top[: counts[i]])
    return results


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
