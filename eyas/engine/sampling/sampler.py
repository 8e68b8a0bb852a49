"""Chooses one token per row: the argmax over the surviving ids of log p + G, or of p at temperature 0.

p is the model's distribution after bias, penalties, bans, masks, temperature, top-k, top-p and min-p, in that
order; `filters` defines how filters treat ties. log p is used up to a constant per row, which does not change
the argmax. Ties go to the lowest id. A row's token and logprobs are the same to the bit whatever other rows
share the call, and a node of a draft tree is a row like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.common.types import TokenLogprob
from eyas.engine.batch.step_result import NOT_FINITE
from eyas.engine.sampling.filters import survivors, tempered
from eyas.engine.sampling.noise import gumbel_at, gumbel_rows, streams
from eyas.engine.sampling.processors import adjusted
from eyas.engine.sampling.row import SampledRow
from eyas.engine.sampling.scores import score

__all__ = ["SampledRow", "SampledTokens", "draft_probabilities", "perturbed", "sample"]

# Noise at chosen ids costs this many times as much per id as noise for a whole row.
SPARSE_COST = 4


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
