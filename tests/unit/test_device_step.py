"""A step as one array: every row stands where the device looks for it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence, SequenceWork
from eyas.engine.device.step import PlacedBatch, StepLayout, StepShape, pack, tiles_for

LAYOUT = StepLayout(page_size=4, padding_slot=9, tile_rows=3)
WIDTH = 3


def sequence(pick: random.Random, slot: int, length: int) -> Sequence:
    """`length` ids, the last two of them output, on scattered pages."""
    ids = pick.choices(range(1000), k=length)
    request = GenerationRequest("a", tuple(ids[:-2]), SamplingParams())
    seq = Sequence(0, Generation(request, 1, GenerationKind.LOCAL, 0.0, 1.0), 0, request.prompt_ids, ids[-2:])
    seq.pages, seq.slot = pick.sample(range(50), -(-length // LAYOUT.page_size) + 2), slot
    return seq


def chunk(pick: random.Random, slot: int) -> SequenceWork:
    seq = sequence(pick, slot, pick.randint(4, 30))
    start = pick.randrange(len(seq))
    stop = pick.choice((len(seq), pick.randint(start + 1, len(seq))))
    return SequenceWork(seq, start, seq.tokens(start, stop), None, sample=stop == len(seq))


class Packed:
    """Random rounds and chunks, and the parts of their array; `spare`: rows, tiles and ends of padding."""

    def __init__(self, seed: int, spare: int) -> None:
        pick = random.Random(seed)
        slots = pick.sample(range(9), 9)
        self.rounds = [sequence(pick, slots.pop(), 6) for _ in range(pick.randrange(4))]
        self.singles = [sequence(pick, slots.pop(), 6) for _ in range(pick.randrange(3))]
        self.chunks = [chunk(pick, slots.pop()) for _ in range(pick.randrange(0 if self.rounds else 1, 4))]
        counts = [len(work.tokens) for work in self.chunks]
        self.ends = [work for work in self.chunks if work.sample]
        self.shape = StepShape(
            len(self.rounds) + spare,
            WIDTH,
            sum(counts) + spare,
            tiles_for(counts, LAYOUT) + spare,
            len(self.ends) + spare,
            len(self.singles) + spare,
        )
        rounds = [
            SequenceWork(seq, 5, [0], None, sample=True, round=True) for seq in (*self.rounds, *self.singles)
        ]
        cut = len(self.rounds)
        data = pack(PlacedBatch(rounds[:cut], rounds[cut:], self.chunks), self.shape, LAYOUT)
        self.parts = {n: data[first : first + count] for n, (first, count) in self.shape.sections.items()}

    def part(self, name: str) -> list[int]:
        return self.parts[name].tolist()


@pytest.fixture(params=[(seed, spare) for seed in range(12) for spare in (0, 2)], ids=str)
def packed(request: pytest.FixtureRequest) -> Packed:
    return Packed(*request.param)


def test_parts_are_apart_and_aligned() -> None:
    sections = dict(StepShape(3, 5, 17, 6, 2).sections)
    _, words = sections.pop("all")
    taken = np.zeros(words, int)
    for first, count in sections.values():
        assert first % 4 == 0
        taken[first : first + count] += 1
    assert taken.max() == 1 and words - taken.sum() < 4 * len(sections)


def test_rounds_name_their_slots(packed: Packed) -> None:
    slots = [seq.slot for seq in packed.rounds]
    slots += [LAYOUT.padding_slot] * (packed.shape.batch - len(slots))
    count = packed.shape.round_rows
    assert packed.part("slots") == slots
    alone = [seq.slot for seq in packed.singles]
    alone += [LAYOUT.padding_slot] * (packed.shape.singles - len(alone))
    assert packed.part("single_slots") == alone
    assert packed.part("sampled_slots")[:count] == [slot for slot in slots for _ in range(WIDTH)] + alone
    assert packed.part("picked")[:count] == list(range(count))


def test_chunk_rows_have_their_token_position_and_place(packed: Packed) -> None:
    row = packed.shape.round_rows
    for work in packed.chunks:
        seq = work.seq
        for position in range(work.start, work.start + len(work.tokens)):
            page, place = divmod(position, LAYOUT.page_size)
            assert packed.part("tokens")[row] == seq.all_tokens()[position]
            assert packed.part("positions")[row] == position
            assert packed.part("kv_rows")[row] == seq.pages[page] * LAYOUT.page_size + place
            row += 1
    others = packed.part("kv_rows")[: packed.shape.round_rows] + packed.part("kv_rows")[row:]
    assert set(others) <= {-1}, "a row of padding, or of a round, is not for the host to place"


def test_the_token_after_each_row_follows(packed: Packed) -> None:
    """Except after a row that gives one: that is not known yet."""
    row = 0
    for work in packed.chunks:
        ids = work.seq.all_tokens()
        for position in range(work.start, work.start + len(work.tokens)):
            if position + 1 < len(ids):
                assert packed.part("following")[row] == ids[position + 1]
            row += 1


def test_tiles_cover_every_chunk_row_once(packed: Packed) -> None:
    tiles = packed.parts["tiles"].reshape(-1, 4).tolist()
    real = [tile for tile in tiles if tile[3]]
    assert tiles == real + [[0, 0, 0, 0]] * (len(tiles) - len(real))
    found = [(row + i, slot, start + i) for slot, row, start, count in real for i in range(count)]
    expected = [(work.seq.slot, work.start + i) for work in packed.chunks for i in range(len(work.tokens))]
    assert sorted(found) == [(row, *place) for row, place in enumerate(expected)]
    assert all(count <= LAYOUT.tile_rows for *_, count in real)
    reach = [start + count for _, _, start, count in real]
    assert reach == sorted(reach, reverse=True)


def test_ends_give_a_token(packed: Packed) -> None:
    shape, spare = packed.shape, packed.shape.ends - len(packed.ends)
    rows, row = [], 0
    for work in packed.chunks:
        row += len(work.tokens)
        rows += [row - 1] * work.sample
    slots = [work.seq.slot for work in packed.ends] + [LAYOUT.padding_slot] * spare
    assert packed.part("end_slots") == packed.part("sampled_slots")[shape.round_rows :] == slots
    assert packed.part("end_rows") == rows + [shape.chunk] * spare, "padding writes no sequence's word"
    assert packed.part("end_positions")[: len(rows)] == [len(work.seq) for work in packed.ends]
    picked = packed.part("picked")[shape.round_rows :]
    assert picked[: len(rows)] == [shape.round_rows + row for row in rows]
    assert all(0 <= row < shape.rows for row in picked)


def test_the_shape_counts_its_rows() -> None:
    shape = StepShape(batch=2, width=3, chunk=10, tiles=4, ends=1)
    assert (shape.round_rows, shape.rows, shape.sampled) == (6, 16, 7)
    shape = StepShape(batch=2, width=3, chunk=10, tiles=4, ends=1, singles=5)
    assert (shape.round_rows, shape.rows, shape.sampled) == (11, 21, 12)
    assert tiles_for([1, 3, 4], LAYOUT) == 4
