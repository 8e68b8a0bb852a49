"""A landed step: each sequence gets its own tokens, padding gets nobody's."""

from __future__ import annotations

import numpy as np
import torch

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, TokenLogprob
from eyas.engine.batch.sequence import Generation, Kind, Sequence
from eyas.engine.device.flight import Flight, Landed, Sampling
from eyas.engine.device.step import StepShape

SHAPE = StepShape(batch=3, width=2, chunk=8, tiles=3, ends=2)
RESULT = [2, 1, 2, 10, 11] + [1, 1, 1, 20, -1] + [1, 0, 0, 99, -1] + [30, 98]  # 98 and 99 are of padding


def sequences(count: int) -> list[tuple[Sequence, int]]:
    request = GenerationRequest("a", (1,), SamplingParams())
    generation = Generation(request, 1, Kind.LOCAL, 0.0, 1.0)
    return [(Sequence(i, generation, 0, (1,), []), 70 + i) for i in range(count)]


def landed(sampling: Sampling | None = None) -> tuple[list[Landed], list[tuple[Sequence, int]]]:
    seated = sequences(3)
    result = torch.tensor(RESULT, dtype=torch.int32)
    return Flight(SHAPE, (), seated[:2], seated[2:], result, None, sampling).land(), seated


def test_first_tokens_then_rounds_each_with_its_seat() -> None:
    found, (*rounds, end) = landed()
    assert [(one.seq, one.occupancy) for one in found] == [end, *rounds]
    assert [one.tokens for one in found] == [(30,), (10, 11), (20,)]
    assert [one.drafts for one in found] == [(0, 0, 0), (1, 1, 2), (0, 1, 1)]
    assert all(one.logprobs == one.extra == () for one in found)


def test_what_the_host_sampled_is_found_by_its_row() -> None:
    told = [TokenLogprob(-float(i)) for i in range(4)]
    logprobs = {0: told[:2], 2: [None], 6: told[3:]}
    found, _ = landed(Sampling(np.zeros(8, np.int32), logprobs, {6: [(31, None)]}))
    assert [one.logprobs for one in found] == [told[3:], told[:2], [None]]
    assert [list(one.extra) for one in found] == [[(31, None)], [], []]
