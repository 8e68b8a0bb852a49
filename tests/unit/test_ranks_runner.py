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
from eyas.engine.batch.prompt_scores import PromptScores, ScoreRequest
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence, SequenceWork
from eyas.engine.batch.tables import SlotTables, TableSizes
from eyas.engine.device.buckets import FEW_SINGLES, GraphBuckets
from eyas.engine.device.runner import DeviceRunner
from eyas.engine.device.step import JoinBatch, RowMasks, StepInput, StepLayout, StepShape
from eyas.engine.kernels.sampling.special import COLUMNS
from eyas.engine.sampling.scores import TokenScores
from tests.unit.paper_grammars import GRAMMAR, PaperGrammars

PAGES, SIZE, SLOTS, TILE = 8, 4, 5, 4
VOCAB = 24
WIDTH = 3


class Told:
    """A `Rank0Executor` that keeps what it is told, and answers with nothing."""

    def __init__(self, tables: SlotTables, ranks: int, drafts: bool) -> None:
        self.tables, self._ranks = tables, ranks
        config = SimpleNamespace(vocab_size=VOCAB)
        self.state = SimpleNamespace(
            prompts=object(),
            model=SimpleNamespace(config=config),
            tables=tables,
            drafter=object() if drafts else None,
            lookup=None,
            tap=None,
            adapters=None,
            trees=False,
            path_rows=lambda width: width,
        )
        self.joined: list[list[JoinBatch]] = []
        self.shared: list[list[list[int]]] = []
        self.steps: list[list[StepInput]] = []
        self.masked: list[list[list[int]]] = []
        self.sampled: list[list[np.ndarray]] = []
        self.copied: list[tuple[int, int, int]] = []
        self.finished: list[StepInput] = []

    def begin(self, *steps: StepInput) -> None:
        self.steps.append(list(steps))

    def join(self, *joined: JoinBatch) -> None:
        self.joined.append(list(joined))

    def features(self, *rows: list[int]) -> torch.Tensor:
        self.shared.append(list(rows))
        return torch.tensor(rows)[..., None].float()

    def drafts(self) -> np.ndarray:
        counts = [len(step.drafted_slots) for step in self.steps[-1]]
        assert len(set(counts)) == 1, "ranks wait for each other's drafts"
        found = np.full((self._ranks, counts[0], 2, WIDTH - 1), -1, np.int32)
        found[:, :, 0, 0] = np.arange(self._ranks)[:, None]  # one draft each, of the rank's number
        return found

    def mask_rows(self, count: int, rank: int) -> np.ndarray:
        return np.empty((count, 1), np.int32)

    def mask(self, *rows: RowMasks) -> None:
        self.masked.append([each.places.tolist() for each in rows])

    def sample(self, *rows: np.ndarray) -> list[torch.Tensor]:
        self.sampled.append(list(rows))
        return [torch.zeros(self._ranks, len(rows[0]), 4, dtype=torch.int32)]

    def score(self, asked: ScoreRequest) -> TokenScores:
        count = self._ranks, len(asked.places)
        return TokenScores(
            torch.zeros(count), torch.zeros(*count, 1, dtype=torch.int32), torch.zeros(*count, 1)
        )

    def finish(self, step: StepInput) -> tuple[torch.Tensor, None]:
        self.finished.append(step)
        words = step.shape.result_ends[-1] + step.shape.batch * step.shape.width
        return torch.ones((self._ranks, words), dtype=torch.int32), None

    def copy_page(self, source: int, target: int, rank: int) -> None:
        self.copied.append((rank, source, target))


def made(ranks: int = 2, width: int = 1) -> tuple[DeviceRunner, Told]:
    """`width`: rows of a round; with more than one steps have a head."""
    told = Told(SlotTables(TableSizes(SLOTS + 1, 4, width, 64), "cpu"), ranks, width > 1)
    grammars = PaperGrammars()
    layouts = [StepLayout(SIZE, SLOTS, TILE, PAGES * rank) for rank in range(ranks)]
    buckets = GraphBuckets(width, TILE, (1, 2, 4), (), 16, 16)
    return DeviceRunner(told, buckets, layouts, grammars, ahead=True), told  # type: ignore[arg-type]


def work(
    rank: int, slot: int, pages: list[int], start: int, count: int, *, drafted: bool = True, **params: Any
) -> SequenceWork:
    """A round if `count` is 0. `pages`: of the rank's own pool. `drafted`: unless its request says no."""
    prompt, told = tuple(range(1, 14)), SamplingParams(**params)
    request = GenerationRequest(f"{rank} {slot}", prompt, told, speculative=drafted)
    generation = Generation(request, 1, GenerationKind.LOCAL, 0.0, 1.0)
    generation.rank = rank
    seq = Sequence(slot, generation, 0, request.prompt_ids, [], slot=slot, occupancy=9)
    seq.pages, seq.draft_len = [page + PAGES * rank for page in pages], start
    tokens = list(request.prompt_ids[start : start + max(count, 1)])
    return SequenceWork(seq, start, tokens, None, sample=start + len(tokens) == 13, round=not count)


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
    assert [len(each.placed.rounds) for each in flight.parts] == [0, 2, 0]


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


# --- with a head in the step ------------------------------------------------------------------------------


def forked(rank: int, slot: int, feature: float) -> SequenceWork:
    """The first round of a choice that begins with the prompt of another."""
    one = work(rank, slot, [6, 1, 4, 2], 12, 0)
    one.seq.draft_len = 11
    one.seq.window.add(11, torch.full((1, 2), feature))
    return one


def test_all_ranks_have_rounds_of_the_widest_shape() -> None:
    """One has a round, the other none: it has as many rows, all of padding."""
    runner, told = made(width=WIDTH)
    assert runner.drafts
    runner.launch([work(1, 2, [5, 2, 6, 0], 12, 0)])
    zero, one = told.steps[0]
    assert zero.shape == one.shape and (zero.shape.batch, zero.shape.width, zero.shape.singles) == (1, 3, 0)
    assert part(zero, "slots").tolist() == [SLOTS] and part(one, "slots").tolist() == [2]


@pytest.mark.parametrize(
    ("mine", "theirs", "shape"),
    [
        ((3, 1), (1, 0), (4, 0)),  # the graph of four rounds has room for all
        ((1, 4), (0, 1), (2, 8)),  # fourteen rows, where five rounds would be fifteen
        ((4, 0), (0, 4), (4, 0)),  # beside the other's rounds they would make the step larger
        ((0, 2), (0, 1), (0, 2)),
    ],
)
def test_sequences_without_drafts_have_one_row_where_that_is_less(
    mine: tuple[int, int], theirs: tuple[int, int], shape: tuple[int, int]
) -> None:
    """Rounds, and sequences without drafts, of each rank."""
    runner, told = made(width=WIDTH)
    works = [
        work(rank, slot, [slot] * 4, 12, 0, drafted=slot < rounds)
        for rank, (rounds, singles) in enumerate((mine, theirs))
        for slot in range(rounds + singles)
    ]
    runner.launch(works)
    for rank, step in enumerate(told.steps[0]):
        assert (step.shape.batch, step.shape.singles) == shape
        placed = [*part(step, "slots").tolist(), *part(step, "single_slots").tolist()]
        own = [each.seq.slot for each in works if each.seq.generation.rank == rank]
        assert sorted(slot for slot in placed if slot != SLOTS) == own
        assert shape[1] == 0 or all(
            slot < (mine, theirs)[rank][0] or slot == SLOTS for slot in placed[: shape[0]]
        )


def test_a_sequence_joins_on_all_ranks_at_once() -> None:
    """The head runs a row of it, which other ranks' experts serve: they run as many, of padding."""
    runner, told = made(3, width=WIDTH)
    works = [forked(1, 0, 0.5), forked(1, 3, 0.25), forked(2, 1, 2.0), work(0, 2, [3, 1, 0, 2], 12, 0)]
    runner.launch(works)
    (each,) = told.joined
    rows = [joined.words.T.tolist() for joined in each]
    padding = [SLOTS, 0, 0, -1]
    assert rows == [[padding] * 2, [[0, 13, 11, 4 * 4 + 3], [3, 13, 11, 19]], [[1, 13, 11, 19], padding]]
    features = [joined.features.tolist() for joined in each]
    assert features == [[[0, 0]] * 2, [[0.5, 0.5], [0.25, 0.25]], [[2, 2], [0, 0]]]
    assert {joined.width for joined in each} == {WIDTH}
    assert [joined.writes.shape[1] > 0 for joined in each] == [True] * 3, "tables are told before they join"
    assert all(step.writes.shape == (2, 0) for step in told.steps[0])
    assert [one.seq.draft_len for one in works] == [12] * 4, "that row is counted as there"
    runner.launch([forked(1, 0, 0.5)])
    assert len(told.joined) == 1, "it joins once"


def test_without_a_head_a_sequence_joins_where_drafts_are_looked_up() -> None:
    """Its text is there, and the drafts below it are not; there are no features."""
    runner, told = made(width=WIDTH)
    told.state.drafter = None
    told.state.lookup = SimpleNamespace(occupy=lambda writes, seq: None, reads=lambda seq: True)
    works = [work(1, slot, [slot] * 4, 12, 0) for slot in (0, 2)]
    works[1].seq.output.append(7)
    runner.launch([*works, work(0, 0, [3] * 4, 12, 0)])
    ((mine, theirs),) = told.joined
    assert mine.words.T.tolist() == [[SLOTS, 0, 0, -1]] and theirs.words[0].tolist() == [2]
    assert mine.features.shape == theirs.features.shape == (1, 0)


def test_features_of_shared_prompts_are_as_many_on_every_rank() -> None:
    runner, told = made(width=WIDTH)
    first, second, other = (work(rank, slot, [slot] * 4, 9, 4) for rank, slot in ((0, 0), (0, 1), (1, 0)))
    for shared in (first, second):
        shared.seq.forks = (1,)
    flight = runner.launch([first, second, other, work(1, 1, [7] * 4, 12, 0)])
    assert told.shared == [[[WIDTH + 3, WIDTH + 7], [0, 0]]], "behind the one round"
    assert flight.parts[0].features.rows.flatten().tolist() == [WIDTH + 3, WIDTH + 7]
    assert flight.parts[1].features.works == []


def test_drafts_of_held_outputs_are_read_on_all_ranks() -> None:
    """Rank 0 makes masks for the outputs of all: it must know what each verifies."""
    runner, told = made(width=WIDTH)
    held = [work(1, slot, [slot] * 4, 12, 0, grammar=GRAMMAR) for slot in (0, 2)]
    for number, one in enumerate(held):
        one.seq.uid = number
        one.seq.generation.sequences.append(one.seq)
    runner.launch([*held, work(0, 0, [3] * 4, 12, 0)])
    assert [list(step.drafted_slots) for step in told.steps[0]] == [[SLOTS, SLOTS], [0, 2]]
    ((none, rows),) = told.masked
    assert none == [] and {row // WIDTH for row in rows if row >= 0} == {0, 1}


@pytest.mark.parametrize("seed", range(20))
def test_no_agreed_shape_is_larger_than_one_ranks_largest(seed: int) -> None:
    """Whatever the ranks have: what start-up has reserved is enough."""
    rng, (runner, told) = random.Random(seed), made(3, width=WIDTH)
    works, most = [], StepShape(SLOTS, WIDTH, singles=FEW_SINGLES)
    for rank in range(3):
        for slot in range(rng.randrange(1, SLOTS + 1)):
            works.append(work(rank, slot, [0] * 4, 12, 0, drafted=rng.random() < 0.6))
    runner.launch(works)
    for step in told.steps[0]:
        assert step.shape.round_rows <= most.round_rows
        assert step.shape.result_ends <= most.result_ends
