"""A landed step: each sequence gets its own tokens, padding gets none."""

from __future__ import annotations

from dataclasses import replace

import torch

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, TokenLogprob
from eyas.engine.batch.sequence import Generation, GenerationKind, RingPlace, Sequence, SequenceWork
from eyas.engine.batch.step_result import StepResult
from eyas.engine.batch.window import FIRST_ROWS, DeviceRows
from eyas.engine.device.flight import (
    AcceptedFeatures,
    DeviceResident,
    LaunchedStep,
    PromptFeatures,
    RankPart,
    StepOutput,
    chunk_ends,
    feature_request,
    mailed_ends,
    staying,
)
from eyas.engine.device.special import SpecialReport, SpecialRows
from eyas.engine.device.step import MailedPrompts, PlacedBatch, StepShape
from eyas.engine.kernels.drafts.rounds import FACTS
from eyas.engine.kernels.sampling.special import REPORT_WORDS

SHAPE = StepShape(batch=3, width=2, chunk=8, tiles=3, ends=2)
RESULT = [2, 1, 2, 10, 11] + [1, 1, 1, 20, -1] + [1, 0, 0, 99, -1] + [30, 98]  # 98 and 99 are of padding
PATHS = [0, 1] + [0, -1] + [0, -1]


def works(count: int) -> list[SequenceWork]:
    """Rounds but for the last, which ends its prompt."""
    request = GenerationRequest("a", (1,), SamplingParams())
    generation = Generation(request, 1, GenerationKind.LOCAL, 0.0, 1.0)
    made = [Sequence(i, generation, 0, (1,), [], forks=(7,)) for i in range(count)]
    return [SequenceWork(seq, 0, [1], None, sample=True, round=seq.uid < count - 1) for seq in made]


def landed(
    special: SpecialReport | None = None,
    features: torch.Tensor | None = None,
    found: list[SequenceWork] | None = None,
) -> tuple[list[StepResult], list[SequenceWork]]:
    found = found or works(3)
    middle = SequenceWork(found[-1].seq, 0, [1], None, sample=False)
    result, last = torch.tensor([*RESULT, *PATHS], dtype=torch.int32), found[2:]
    kept, told = None if features is None else PromptFeatures(last, features), special or SpecialReport({})
    placed = PlacedBatch(found[:2], (), [middle, *last])
    part = RankPart(placed, features=kept)
    flight = LaunchedStep(SHAPE, (), [part], lambda: StepOutput(result[None], None, [told]))
    assert not flight.over
    flight.complete()
    return flight.land(), [middle, *last, *found[:2]]


def test_prompts_then_rounds_each_with_its_own() -> None:
    found, order = landed()
    assert [one.work for one in found] == order
    assert [one.tokens for one in found] == [(), (30,), (10, 11), (20,)]
    assert [one.rows for one in found] == [1, 1, 2, 1]
    assert [one.drafts for one in found] == [(0, 0, 0), (0, 0, 0), (1, 1, 2), (0, 1, 1)]
    assert all(not one.logprobs and not one.forks and one.features is None for one in found)


def test_what_special_rows_gave_is_found_by_their_place() -> None:
    """Of the first round two nodes are accepted; the end has another choice."""
    first, second, end = works(3)
    params = SamplingParams(logprobs=1)
    end.seq.generation.request = GenerationRequest("a", (1,), params)
    first.seq.forks = ()
    rows = SpecialRows(())
    rows.add_round(0, 2, first.seq)
    rows.add_end(6, end.seq)
    reports = torch.zeros(4, REPORT_WORDS, dtype=torch.int32)
    reports[:, 0] = torch.tensor([10, 11, 30, 31])
    reports[:, 1] = (-torch.arange(4.0)).view(torch.int32)
    reports[:, 2] = 7
    found, _ = landed(rows.report([reports[:3], reports[3:]]), found=[first, second, end])
    told = [TokenLogprob(-float(i), ((7, 0.0),)) for i in range(4)]
    assert [list(one.logprobs) for one in found] == [[], told[2:3], told[:2], []]
    assert [dict(one.forks) for one in found] == [{}, {7: (31, told[3])}, {}, {}]


def test_the_feature_of_a_last_row_goes_with_it() -> None:
    found, _ = landed(features=torch.tensor([[1.5, 2.5]]))
    assert [one.features is None for one in found] == [True, False, True, True]
    assert found[1].features.tolist() == [[1.5, 2.5]]


def prompt(uid: int, rows: int, *, mailed: bool = True, whole: bool = True) -> SequenceWork:
    """A chunk of a prompt from row 7 on."""
    generation = Generation(GenerationRequest("a", (1,), SamplingParams()), 1, GenerationKind.LOCAL, 0.0, 1.0)
    seq = Sequence(uid, generation, 0, (1,), [], slot=uid, ring=RingPlace(uid, 64, uid, 128 * mailed))
    return SequenceWork(seq, 7, list(range(rows)), None, sample=whole)


def test_the_device_sends_the_last_rows_of_prompts_that_end() -> None:
    """Of those with a mailbox; each row's token is the next one's, the last is still to be chosen."""
    shared = prompt(5, 3)
    shared.seq.forks = (1,)
    chunks = [prompt(1, 5), prompt(2, 4, mailed=False), prompt(3, 200), prompt(4, 6, whole=False), shared]
    sent = MailedPrompts.of(chunks, 10)
    assert sent is not None and sent.slots.tolist() == [1, 3]
    assert sent.words[:, 0].tolist() == [5, FIRST_ROWS]
    assert sent.rows[0, :5].tolist() == list(range(10, 15))
    assert sent.rows[1].tolist() == list(range(219 - FIRST_ROWS, 219))
    assert sent.words[0, FACTS : FACTS + 5].tolist() == [1, 2, 3, 4, 0]
    assert sent.words[1, FACTS:].tolist() == [*range(201 - FIRST_ROWS, 200), 0]
    assert MailedPrompts.of(chunks[1:2], 10) is None
    memory = Memory()
    mailed = mailed_ends(chunks, memory)
    assert mailed[1] is mailed[3] is mailed[4] is None and chunk_ends(chunks)[::2] == [0, 0, 3]
    ended = DeviceResident(memory, 3, 3, FIRST_ROWS)
    assert mailed[2] == ended and ended.of(StepResult(chunks[2], (9,))).ringed == 3
    kept = ended.of(StepResult(chunks[2], (9,))).features
    assert kept.rows == range(207 - FIRST_ROWS, 207)


class Memory:
    """Of a device: slot and position of each row."""

    def read(self, slot: int, rows: range) -> torch.Tensor:
        return torch.tensor([[slot, row] for row in rows])


def test_features_for_a_drafter_elsewhere_are_those_of_certain_rows() -> None:
    """Two rounds of a batch of three, two singles of three, and chunks of which 0 and 2 rows count. The first
    round's and the second single's stay on the device.
    """
    shape = StepShape(batch=3, width=2, chunk=8, tiles=3, ends=2, singles=3)
    found, more = works(3), works(3)
    alone = [replace(work, round=True) for work in more[:2]]
    singles = [1, 0, 0, 40] + [1, 0, 0, 41] + [1, 0, 0, 97]
    result = torch.tensor([*RESULT[:15], *singles, *RESULT[15:], *PATHS], dtype=torch.int32)
    middle = SequenceWork(found[-1].seq, 0, [1], None, sample=False)
    placed = PlacedBatch(found[:2], alone, [middle, *found[2:]])
    found[0].seq.slot, found[0].seq.drafting, found[0].seq.ring = 5, True, RingPlace(1, 64, 7)
    alone[1].seq.slot = 6
    for work in (found[1], alone[0]):
        work.seq.drafting = True  # by the host
    memory = Memory()
    stay = staying(placed, memory)
    assert stay == [DeviceResident(memory, 5, 7), None, None, DeviceResident(memory, 6, 0)]
    assert staying(placed, None) == [None] * 4
    asked = feature_request(placed, shape, 2, (0, 1), stay)
    assert asked is not None and (asked.decoded, asked.rows) == ([2, 3, 6], [10])
    assert feature_request(placed, shape, 2, (0, 0), stay[:1] + stay[3:]) is None
    rows = torch.tensor([*asked.decoded, *asked.rows])[:, None].float()
    certain = AcceptedFeatures(rows, 2, (0, 1), stay, (None, None))
    results = StepOutput(result[None], None, [SpecialReport({})], certain)
    flight = LaunchedStep(shape, (), [RankPart(placed)], lambda: results)
    flight.complete()
    landed = flight.land()
    come = [one.features for one in landed if not isinstance(one.features, DeviceRows)]
    assert [None if one is None else one[:, 0].tolist() for one in come] == [None, [10.0], [2.0], [6.0]]
    kept = [one.features for one in landed if isinstance(one.features, DeviceRows)]
    assert [one.read().tolist() for one in kept] == [[[5, 0], [5, 1]], [[6, 0]]]
    assert [one.ringed for one in landed] == [0, 0, 7, 0, 0, 0]
