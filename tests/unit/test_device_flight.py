"""A landed step: each sequence gets its own tokens, padding gets nobody's."""

from __future__ import annotations

import numpy as np
import torch

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, TokenLogprob
from eyas.engine.batch.landed import Landed
from eyas.engine.batch.sequence import Generation, Kind, Sequence, Work
from eyas.engine.device.flight import DeviceFlight, Features, Sampling
from eyas.engine.device.step import StepShape

SHAPE = StepShape(batch=3, width=2, chunk=8, tiles=3, ends=2)
RESULT = [2, 1, 2, 10, 11] + [1, 1, 1, 20, -1] + [1, 0, 0, 99, -1] + [30, 98]  # 98 and 99 are of padding


def works(count: int) -> list[Work]:
    """Rounds but for the last, which ends its prompt."""
    request = GenerationRequest("a", (1,), SamplingParams())
    generation = Generation(request, 1, Kind.LOCAL, 0.0, 1.0)
    made = [Sequence(i, generation, 0, (1,), [], forks=(7,)) for i in range(count)]
    return [Work(seq, 0, [1], None, sample=True, round=seq.uid < count - 1) for seq in made]


def landed(
    sampling: Sampling | None = None, features: torch.Tensor | None = None
) -> tuple[list[Landed], list[Work]]:
    found = works(3)
    middle = Work(found[-1].seq, 0, [1], None, sample=False)
    result, last = torch.tensor(RESULT, dtype=torch.int32), found[2:]
    kept = None if features is None else Features(last, features)
    flight = DeviceFlight(SHAPE, (), found[:2], [middle, *last], result, None, sampling, features=kept)
    return flight.land(), [middle, *last, *found[:2]]


def test_prompts_then_rounds_each_with_its_own() -> None:
    found, order = landed()
    assert [one.work for one in found] == order
    assert [one.tokens for one in found] == [(), (30,), (10, 11), (20,)]
    assert [one.rows for one in found] == [1, 1, 2, 1]
    assert [one.drafts for one in found] == [(0, 0, 0), (0, 0, 0), (1, 1, 2), (0, 1, 1)]
    assert all(one.logprobs == () and not one.forks and one.features is None for one in found)


def test_what_the_host_sampled_is_found_by_its_row() -> None:
    told = [TokenLogprob(-float(i)) for i in range(4)]
    logprobs = {0: told[:2], 2: [None], 6: told[3:]}
    found, _ = landed(Sampling(np.zeros(8, np.int32), logprobs, {6: [(31, None)]}))
    assert [one.logprobs for one in found] == [(), told[3:], told[:2], [None]]
    assert [dict(one.forks) for one in found] == [{}, {7: (31, None)}, {}, {}]


def test_the_feature_of_a_last_row_goes_with_it() -> None:
    found, _ = landed(features=torch.tensor([[1.5, 2.5]]))
    assert [one.features is None for one in found] == [True, False, True, True]
    assert found[1].features.tolist() == [[1.5, 2.5]]
