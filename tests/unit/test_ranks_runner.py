"""What each attention rank is told of a step: one shape, its own rows, pages of its own pool. No device."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.batch.prompt_scores import Asked, PromptScores
from eyas.engine.batch.sequence import Generation, Kind, Sequence, Work
from eyas.engine.batch.tables import Tables, TableSizes
from eyas.engine.device.buckets import Buckets
from eyas.engine.device.ranks_runner import RanksRunner
from eyas.engine.device.seats import Seats
from eyas.engine.device.step import Layout, StepInput
from eyas.engine.kernels.special import COLUMNS
from eyas.engine.sampling.scores import Scores
from tests.unit.paper_grammars import PaperGrammars

PAGES, SIZE, SLOTS, TILE = 8, 4, 5, 4
VOCAB = 24


class Told:
    """A `LedRanks` that keeps what it is told, and answers with nothing."""

    def __init__(self, tables: Tables, ranks: int) -> None:
        self.tables, self._ranks = tables, ranks
        config = SimpleNamespace(vocab_size=VOCAB)
        self.state = SimpleNamespace(prompts=object(), model=SimpleNamespace(config=config))
        self.steps: list[list[StepInput]] = []
        self.sampled: list[list[np.ndarray]] = []
        self.copied: list[tuple[int, int, int]] = []
        self.finished: list[StepInput] = []

    def begin_each(self, steps: list[StepInput]) -> None:
        self.steps.append(steps)

    def sample_each(self, rows: list[np.ndarray]) -> list[torch.Tensor]:
        self.sampled.append(rows)
        return [torch.zeros(self._ranks, len(rows[0]), 4, dtype=torch.int32)]

    def score(self, asked: Asked) -> Scores:
        count = self._ranks, len(asked.places)
        return Scores(torch.zeros(count), torch.zeros(*count, 1, dtype=torch.int32), torch.zeros(*count, 1))

    def finish(self, step: StepInput) -> tuple[torch.Tensor, None]:
        self.finished.append(step)
        rounds, singles, ends = step.shape.result_ends
        return torch.full((self._ranks, ends + step.shape.batch), 7, dtype=torch.int32), None

    def copy_page_of(self, rank: int, source: int, target: int) -> None:
        self.copied.append((rank, source, target))


def made(ranks: int = 2) -> tuple[RanksRunner, Told]:
    tables = Tables(TableSizes(SLOTS + 1, 4, 1, 64), "cpu")
    told, layout = Told(tables, ranks), Layout(SIZE, SLOTS, TILE)
    seats = [
        Seats(tables, Layout(SIZE, layout.padding_slot, TILE, PAGES * rank), (2,)) for rank in range(ranks)
    ]
    buckets = Buckets(1, TILE, (1, 2, 4), (), 16, 16)
    return RanksRunner(told, buckets, seats, PaperGrammars(drafts=False), ahead=True), told  # type: ignore[arg-type]


def work(rank: int, slot: int, pages: list[int], start: int, count: int, **params: Any) -> Work:
    """A round if `count` is 0. `pages`: of the rank's own pool."""
    request = GenerationRequest(f"{rank} {slot}", tuple(range(1, 14)), SamplingParams(**params))
    generation = Generation(request, 1, Kind.LOCAL, 0.0, 1.0)
    generation.rank = rank
    seq = Sequence(slot, generation, 0, request.prompt_ids, [], slot=slot, occupancy=9)
    seq.pages = [page + PAGES * rank for page in pages]
    tokens = list(request.prompt_ids[start : start + max(count, 1)])
    return Work(seq, start, tokens, None, sample=start + len(tokens) == 13, round=not count)


def part(step: StepInput, name: str) -> np.ndarray:
    first, count = step.shape.sections[name]
    return step.data[first : first + count]


def pages(told: Told, step: StepInput, slot: int, count: int) -> list[int]:
    """What the tables are told of a slot's pages."""
    words = dict(zip(*step.writes.tolist(), strict=True))
    return [words[place] for place in told.tables.places("pages", slot, 0, count)]


def test_all_ranks_have_the_largest_shape_and_pages_of_their_own() -> None:
    runner, told = made()
    works = [work(0, 0, [3, 1], 4, 3), work(1, 0, [5, 2, 6, 0], 12, 0), work(1, 3, [7], 0, 4)]
    runner.launch(works)
    zero, one = told.steps[0]
    assert zero.shape == one.shape
    assert (zero.shape.batch, zero.shape.chunk, zero.shape.ends) == (1, 4, 0)
    assert part(zero, "slots").tolist() == [SLOTS] and part(one, "slots").tolist() == [0]
    assert part(zero, "kv_rows").tolist() == [-1, 4, 5, 6, -1], "a round's rows the device fills in"
    assert part(one, "kv_rows").tolist() == [-1, 28, 29, 30, 31]
    assert [(span.pages, span.count) for span in zero.spans] == [([3, 1], 3)]
    assert [(span.pages, span.count) for span in one.spans] == [([7], 4)]
    assert pages(told, zero, 0, 2) == [3, 1] and pages(told, one, 0, 4) == [5, 2, 6, 0]
    runner.launch([work(1, 3, [7, 4], 4, 4)])
    idle, busy = told.steps[1]
    assert idle.shape == busy.shape and not idle.spans and (part(idle, "kv_rows") == -1).all()
    assert idle.writes.shape == (2, 0)


def test_an_idle_rank_lands_nothing_and_all_land_together() -> None:
    runner, _ = made(3)
    works = [work(1, 0, [5, 2, 6, 0], 12, 0), work(1, 1, [1, 3, 4, 7], 12, 0)]
    flight = runner.launch(works)
    assert flight.over and [landed.work.seq.slot for landed in flight.land()] == [0, 1]
    assert [len(each.works) for each in flight.parts] == [0, 2, 0]


def test_special_rows_are_as_many_on_every_rank_and_padding_settles_nothing() -> None:
    runner, told = made()
    runner.launch([work(0, 0, [0] * 4, 12, 0, logprobs=1), work(0, 1, [1] * 4, 12, 0, logprobs=1)])
    ((mine, theirs),) = told.sampled
    assert mine.shape == theirs.shape == (2, len(COLUMNS))
    slot, own = COLUMNS.index("slot"), COLUMNS.index("own")
    assert (theirs[:, slot] == SLOTS).all() and (theirs[:, own] == 0).all() and (mine[:, own] == 1).all()
    runner.launch([work(0, 2, [0] * 4, 12, 0), work(1, 2, [1] * 4, 12, 0)])
    assert len(told.sampled) == 1, "no row was special"


def test_a_scored_step_is_finished_as_it_was_begun() -> None:
    """Without a graph, of which another program than the one that was begun has the rest."""
    runner, told = made()
    scored = work(1, 0, [5, 2, 6, 0], 4, 3, prompt_logprobs=1)
    scored.seq.generation.scores = PromptScores.of(scored.seq.generation.request)
    runner.launch([work(0, 0, [3, 1, 2, 0], 12, 0), scored]).land()
    runner.launch([work(0, 0, [3, 1, 2, 0], 12, 0)])
    assert [[step.scored for step in steps] for steps in told.steps] == [[True, True], [False, False]]
    assert all(step is steps[0] for step, steps in zip(told.finished, told.steps, strict=True))


def test_pages_are_copied_where_they_are() -> None:
    runner, told = made(3)
    for source, target in ((1, 7), (9, 15), (16, 20)):
        runner.copy_page(source, target)
    assert told.copied == [(0, 1, 7), (1, 1, 7), (2, 0, 4)]


@pytest.mark.parametrize("seed", range(20))
def test_shapes_hold_any_share_of_works(seed: int) -> None:
    """Three ranks with any number of rounds and chunks each: no rank's rows are left out."""
    rng = random.Random(seed)
    runner, told = made(3)
    works = []
    for rank in range(3):
        for slot in range(rng.randrange(SLOTS)):
            count = rng.choice((0, 0, 1, 3, 5))
            works.append(work(rank, slot, [rng.randrange(PAGES) for _ in range(4)], 5, count))
    works += [work(0, SLOTS - 1, [0] * 4, 12, 0)]
    runner.launch(works)
    for rank, step in enumerate(told.steps[0]):
        mine = [each for each in works if each.seq.generation.rank == rank]
        rows = sum(len(each.tokens) for each in mine if not each.round)
        assert step.shape == told.steps[0][0].shape
        assert sorted(set(part(step, "slots").tolist()) - {SLOTS}) == [e.seq.slot for e in mine if e.round]
        assert (part(step, "kv_rows") >= 0).sum() == rows
        assert part(step, "tiles").reshape(-1, 4)[:, 3].sum() == rows
