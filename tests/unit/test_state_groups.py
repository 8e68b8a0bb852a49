"""What a step says of its sequences to layers with states: a kernel by the tables, the host by its chunks."""

from __future__ import annotations

import random

import numpy as np
import torch

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence, SequenceWork
from eyas.engine.batch.tables import SlotTables, TableSizes
from eyas.engine.device.step import STATES, PlacedBatch, StepLayout, StepShape, pack
from eyas.engine.kernels.drafts.rounds import FACTS, RoundBatch, RoundVerdicts
from eyas.engine.kernels.states.accepted import keep_path
from eyas.engine.kernels.states.groups import decoded
from eyas.engine.kernels.states.rings import SolvedStore
from eyas.engine.states.shape import SPAN, DeltaShape, ring_rows
from eyas.engine.states.store import StateFormat, StateStore
from tests.unit.states_rig import DEVICE

WIDTH = 5


def test_rounds_are_chains_as_far_as_there_are_drafts() -> None:
    tables = SlotTables(TableSizes(slots=9, max_pages=4, width=WIDTH), DEVICE)
    draw = random.Random(1)
    lengths = [draw.choice((0, 1, 63, 64, 65, 127, 128, 200)) for _ in range(8)]
    drafts = [draw.randrange(WIDTH) for _ in lengths]
    for slot, (length, count) in enumerate(zip(lengths, drafts, strict=True)):
        tables.length[slot] = length
        tables.state[slot], tables.bound[slot] = 40 + slot, max(length - 1, 0) // SPAN * SPAN
        tables.drafts[slot, :count] = 7
    slots = torch.tensor([3, 0, 7, 8, 5], dtype=torch.int32, device=DEVICE)  # 8: of padding
    positions = torch.arange(40, dtype=torch.int32, device=DEVICE)
    bounds = tables.bound.tolist()
    rows = decoded(tables, slots, WIDTH, 10, positions)
    real = [3, 0, 7, None, 5]
    for b, slot in enumerate(real):
        got = [
            each[b].item()
            for each in (rows.slots, rows.firsts, rows.counts, rows.starts, rows.bounds, rows.folds)
        ]
        if slot is None:
            assert got[2] == 0 and got[3] == got[4] == got[5] == 0
            continue
        fold = lengths[slot] // SPAN * SPAN
        assert got == [40 + slot, 10 + WIDTH * b, 1 + drafts[slot], lengths[slot], bounds[slot], fold]
        assert tables.bound[slot].item() == fold
    assert tables.bound[[1, 2, 4, 6]].tolist() == [bounds[slot] for slot in (1, 2, 4, 6)]
    assert rows.most == WIDTH and torch.equal(rows.before, positions - 1)


def test_rounds_are_trees_with_gaps() -> None:
    """What is left out of a tree has no children, and stands beside the root."""
    tables = SlotTables(TableSizes(slots=3, max_pages=4, width=6), DEVICE)
    tables.length[:2] = torch.tensor([70, 200])
    tables.state[:2] = torch.tensor([8, 9])
    tables.drafts[0] = torch.tensor([5, -1, 6, 7, -1])
    tables.parents[0] = torch.tensor([-1, -1, 0, 2, 2])
    tables.drafts[1] = torch.tensor([5, -1, -1, -1, -1])
    tables.parents[1] = torch.tensor([-1, 0, 0, 0, 0])
    slots = torch.tensor([1, 0, 2], dtype=torch.int32, device=DEVICE)
    positions = torch.arange(100, 120, dtype=torch.int32, device=DEVICE)
    rows = decoded(tables, slots, 6, 2, positions, trees=True)
    assert rows.counts.tolist() == [2, 5, 0]
    before, at = rows.before.tolist(), rows.positions.tolist()
    assert before[2:4] == [199, 200] and at[2:4] == [102, 103]
    assert before[8:13] == [69, 70, 69, 71, 73] and at[8:13] == [108, 109, 70, 111, 112]
    assert at[:2] == [100, 101] and positions.tolist() == list(range(100, 120))


def test_rows_of_an_accepted_path_move_in_every_layer() -> None:
    """By a chain, by branches whose targets are sources, in a ring that begins anew; of nobody else."""
    form = StateFormat((1, 4), DeltaShape(1, 2, 16, 16, 4), ring_rows(8), torch.float16)
    memory = torch.randint(0, 255, (4, form.slot_bytes), dtype=torch.uint8).to(DEVICE)
    states, twin = StateStore(form, memory), StateStore(form, memory.clone())
    kept = SolvedStore.on(states)
    for part in kept.parts.values():
        part.copy_(torch.randint(-99, 99, part.shape))
    expected = {name: part.clone() for name, part in kept.parts.items()}
    tables = SlotTables(TableSizes(slots=4, max_pages=4, width=8), DEVICE)
    starts, paths = [124, 64, 9, 0], [[0, 3, 4, 7], [0, 1, 2, -1], [0, 2, -1, -1], [0, -1, -1, -1]]
    tables.state[:3] = torch.tensor([2, 0, 3])
    result = torch.full((4, FACTS + 8), -1, dtype=torch.int32, device=DEVICE)
    for b, (start, path) in enumerate(zip(starts, paths, strict=True)):
        result[b, 0] = sum(node >= 0 for node in path)
        tables.length[b] = start + result[b, 0]
        moved = [(node, i) for i, node in enumerate(path) if node > i]
        if moved:
            slots = torch.full((len(moved),), int(tables.state[b]), device=DEVICE)
            sources, targets = (
                start + torch.tensor(each, device=DEVICE) for each in zip(*moved, strict=True)
            )
            twin.move(slots, sources, targets)
            for part in expected.values():
                part[:, slots, targets % form.ring] = part[:, slots, sources % form.ring]
    batch = RoundBatch(tables, torch.arange(4, dtype=torch.int32, device=DEVICE), 16)
    keep_path(
        batch, RoundVerdicts(result, torch.tensor(paths, dtype=torch.int32, device=DEVICE)), states, kept
    )
    for name, part in states.parts.items():
        assert torch.equal(part.nan_to_num(), twin.parts[name].nan_to_num())
    assert all(torch.equal(kept.parts[name], part) for name, part in expected.items())


def _chunk(number: int, start: int, count: int, bound: int) -> SequenceWork:
    request = GenerationRequest(str(number), (0,) * 1000, SamplingParams())
    generation = Generation(request, 0, GenerationKind.LOCAL, 0.0, 0.0)
    seq = Sequence(number, generation, 0, request.prompt_ids, [])
    seq.pages, seq.kv_len, seq.slot = list(range(70)), start, number
    seq.state, seq.bound = 30 + number, bound
    return SequenceWork(seq, start, [0] * count, None, sample=False)


def test_chunks_are_told_by_sequence_and_by_span() -> None:
    works = [_chunk(0, 0, 100, 0), _chunk(1, 70, 3, 64), _chunk(2, 128, 64, 128)]
    shape, layout = StepShape(2, WIDTH, 192, 6, 1), StepLayout(16, 9, 64, stated=True)
    data = pack(PlacedBatch((), (), works), shape, layout)
    part = {name: data[first : first + count] for name, (first, count) in shape.stated_sections.items()}
    columns = dict(zip(STATES, part["states"].reshape(len(STATES), -1), strict=True))
    first = shape.round_rows
    assert columns["slots"][:3].tolist() == [30, 31, 32]
    assert columns["tables"].tolist() == [0, 1, 2, *[9] * 5]
    assert columns["firsts"][:3].tolist() == [first, first + 100, first + 103]
    assert columns["counts"].tolist() == [100, 3, 64, 0, 0, 0, 0, 0]
    assert columns["starts"][:3].tolist() == [0, 70, 128]
    assert columns["bounds"][:3].tolist() == [0, 64, 128]
    assert columns["folds"][:3].tolist() == [64, 64, 192]
    spans = part["spans"].reshape(-1, 2)
    assert spans[:4].tolist() == [[0, 0], [0, 64], [1, 64], [2, 128]]
    assert np.all(spans[4:, 0] == 7) and part["span_ends"].tolist() == [2, 3, 4, 4, 4, 4, 4, 4]


def test_spans_have_room_wherever_chunks_begin() -> None:
    """As many as a step says that they are of, the worst ones included: one row behind a span, one before."""
    dice = random.Random(3)
    for turn in range(40):
        starts = [dice.randrange(900) | (63 if turn % 2 else 0) for _ in range(dice.randint(1, 5))]
        works = [
            _chunk(number, start, dice.choice((2, 66, dice.randint(1, 90))), start // 64 * 64)
            for number, start in enumerate(starts)
        ]
        rows = sum(len(work.tokens) for work in works)
        shape = StepShape(0, WIDTH, rows, -(-rows // 64) + len(works), 1, prompts=len(works))
        data = pack(PlacedBatch((), (), works), shape, StepLayout(16, 9, 64, stated=True))
        first, count = shape.stated_sections["span_ends"]
        spans = sum(-(-(work.start + len(work.tokens) - work.seq.bound) // 64) for work in works)
        assert data[first : first + count].tolist()[-1] == spans <= shape.state_spans


def test_a_step_without_chunks_of_its_own_leaves_the_tables_of_sequences() -> None:
    shape = StepShape(1, WIDTH, 64, 2, 1)
    data = pack(PlacedBatch((), (), ()), shape, StepLayout(16, 9, 64, stated=True))
    first, count = shape.stated_sections["states"]
    columns = data[first : first + count].reshape(len(STATES), -1)
    assert set(columns[STATES.index("tables")].tolist()) == {9}
