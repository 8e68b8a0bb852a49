"""A landed step: each sequence gets its own tokens, padding gets nobody's."""

from __future__ import annotations

from dataclasses import replace

import torch

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, TokenLogprob
from eyas.engine.batch.sequence import Generation, Kind, Sequence
from eyas.engine.device.flight import Flight, Landed
from eyas.engine.device.special import SpecialRows, Told
from eyas.engine.device.step import StepShape
from eyas.engine.kernels.special import REPORT_WORDS

SHAPE = StepShape(batch=3, width=2, chunk=8, tiles=3, ends=2)
RESULT = [2, 1, 2, 10, 11] + [1, 1, 1, 20, -1] + [1, 0, 0, 99, -1] + [30, 98]  # 98 and 99 are of padding
PATHS = [0, 1] + [0, -1] + [0, -1]


def sequences(count: int) -> list[tuple[Sequence, int]]:
    request = GenerationRequest("a", (1,), SamplingParams())
    generation = Generation(request, 1, Kind.LOCAL, 0.0, 1.0)
    return [(Sequence(i, generation, 0, (1,), []), 70 + i) for i in range(count)]


def landed(special: Told | None = None) -> tuple[list[Landed], list[tuple[Sequence, int]]]:
    seated = sequences(3)
    result = torch.tensor([*RESULT, *PATHS], dtype=torch.int32)
    return Flight(SHAPE, (), seated[:2], seated[2:], result, None, special or Told({})).land(), seated


def test_first_tokens_then_rounds_each_with_its_seat() -> None:
    found, (*rounds, end) = landed()
    assert [(one.seq, one.occupancy) for one in found] == [end, *rounds]
    assert [one.tokens for one in found] == [(30,), (10, 11), (20,)]
    assert [one.drafts for one in found] == [(0, 0, 0), (1, 1, 2), (0, 1, 1)]
    assert all(one.logprobs == one.extra == [] for one in found)


def test_what_special_rows_gave_is_found_by_their_place() -> None:
    """Of the first round two nodes are accepted; the end has another choice."""
    (first, _), _, (end, _) = sequences(3)
    params = SamplingParams(logprobs=1)
    end.generation = first.generation = replace(
        first.generation, request=GenerationRequest("a", (1,), params)
    )
    end.forks = (5,)
    rows = SpecialRows(())
    rows.add_round(0, 2, first)
    rows.add_end(6, end)
    reports = torch.zeros(4, REPORT_WORDS, dtype=torch.int32)
    reports[:, 0] = torch.tensor([10, 11, 30, 31])
    reports[:, 1] = (-torch.arange(4.0)).view(torch.int32)
    reports[:, 2] = 7
    found, _ = landed(rows.told([reports[:3], reports[3:]]))
    told = [TokenLogprob(-float(i), ((7, 0.0),)) for i in range(4)]
    assert [one.logprobs for one in found] == [told[2:3], told[:2], []]
    assert [one.extra for one in found] == [[(5, 31, told[3])], [], []]
