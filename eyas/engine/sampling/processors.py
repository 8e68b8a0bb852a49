"""A row to sample, and what changes its logits before the temperature: bias, penalties, bans, then masks.

A row has everything about its distribution besides the logits. Each change is made for the rows that ask for
it. Every operation is elementwise within a row, so a row's result does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eyas.common.params import SamplingParams


def adjusted(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """Logits [R, V] after bias, penalties, bans and masks: a copy, or `logits` if no row asks for any."""
    biased = [i for i, row in enumerate(rows) if row.params.logit_bias]
    penalised = [i for i, row in enumerate(rows) if _penalises(row.params)]
    banned = [(i, token) for i, row in enumerate(rows) for token in _banned(row)]
    masked = [i for i, row in enumerate(rows) if row.allowed is not None]
    if not (biased or penalised or banned or masked):
        return logits
    logits = logits.clone()
    if biased:
        _bias(logits, rows, biased)
    if penalised:
        logits[penalised] = _penalised(logits[penalised], [rows[i] for i in penalised])
    if banned:
        logits[_cells(logits, banned)] = -torch.inf
    if masked:
        logits[masked] = logits[masked].masked_fill_(~_allowed(logits, [rows[i] for i in masked]), -torch.inf)
    return logits


def _bias(logits: Tensor, rows: Sequence[SampledRow], biased: Sequence[int]) -> None:
    """Adds the biases, which are read once for all rows of a request: a tree has many."""
    places: dict[int, list[int]] = {}
    for i in biased:
        places.setdefault(id(rows[i].params), []).append(i)
    for some in places.values():
        bias = rows[some[0]].params.logit_bias
        at = torch.tensor(some, device=logits.device).unsqueeze(1)
        tokens = torch.tensor(list(bias), device=logits.device)
        logits[at, tokens] += logits.new_tensor(list(bias.values()))


def _allowed(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """The ids that the rows' masks allow: bool [R, V]."""
    masks = np.stack([row.allowed for row in rows if row.allowed is not None])
    bits = np.unpackbits(masks.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    return torch.from_numpy(bits).to(logits.device, torch.bool)


def _banned(row: SampledRow) -> list[int]:
    """The row's banned ids, and the last id of every bad word whose other ids are the end of the output.

    The ancestors of a tree node count as output.
    """
    words = row.params.bad_words
    if not words:
        return list(row.banned)
    longest = max(map(len, words)) - 1
    tail = (*row.output[max(0, len(row.output) - longest) :], *row.ancestors)
    return [*row.banned, *(word[-1] for word in words if _ends_with(tail, word[:-1]))]


def _ends_with(ids: Sequence[int], run: Sequence[int]) -> bool:
    if not run or not ids or ids[-1] != run[-1]:  # this nearly always decides
        return not run
    return len(run) <= len(ids) and ids[len(ids) - len(run) :] == run


def _penalises(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )


def _penalised(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """Logits [R, V] after the penalties.

    Repetition divides positive logits, and multiplies negative ones, of ids in the prompt or the output.
    For ids in the output, presence is subtracted once and frequency once per occurrence. The ancestors of a
    tree node count as output.
    """
    params = [row.params for row in rows]
    repetition = _column(logits, [p.repetition_penalty for p in params])
    presence = _column(logits, [p.presence_penalty for p in params])
    frequency = _column(logits, [p.frequency_penalty for p in params])
    in_prompt, in_output = _history(logits, rows)
    weakened = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where((in_prompt > 0) | (in_output > 0), weakened, logits)
    return logits - presence * (in_output > 0) - frequency * in_output


def _history(logits: Tensor, rows: Sequence[SampledRow]) -> tuple[Tensor, Tensor]:
    """Counts of each id in the prompt, and in the output with the ancestors: two counts [R, V]."""
    counts: dict[int, Tensor] = {}

    def count(ids: Sequence[int]) -> Tensor:
        # Keyed by identity: nodes of one tree share these lists, and `rows` keeps them alive.
        if id(ids) not in counts:
            tokens = torch.tensor(ids, dtype=torch.int64, device=logits.device)
            counts[id(ids)] = torch.bincount(tokens, minlength=logits.shape[1])
        return counts[id(ids)]

    in_prompt = torch.stack([count(row.prompt) for row in rows])
    in_output = torch.stack([count(row.output) for row in rows])
    drafted = [(i, token) for i, row in enumerate(rows) for token in row.ancestors]
    if drafted:
        ones = torch.ones(len(drafted), dtype=in_output.dtype, device=logits.device)
        in_output.index_put_(_cells(logits, drafted), ones, accumulate=True)
    return in_prompt, in_output


def _cells(logits: Tensor, cells: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    row, token = torch.tensor(cells, device=logits.device).unbind(1)
    return row, token


def _column(logits: Tensor, values: Sequence[float]) -> Tensor:
    return logits.new_tensor(values).unsqueeze(1)


@dataclass(frozen=True)
class SampledRow:
    """One distribution to sample from: a plain row, a prompt's last row, or one node of a verify tree.

    `position` is the absolute index of the token being sampled. `ancestors` are the draft tokens between
    the output and this node, without the root. `banned` ids must not be chosen here, and neither must an id
    that completes one of the parameters' bad words, nor one that is not `allowed`. Rows of one tree should
    share their `prompt` and `output` objects, because history is counted once per pair of objects.
    """

    params: SamplingParams
    choice: int
    position: int
    prompt: Sequence[int]
    output: Sequence[int]
    ancestors: Sequence[int]
    banned: Sequence[int] = ()
    allowed: np.ndarray | None = None  # bits, as `eyas.engine.grammar` has them; None: all
