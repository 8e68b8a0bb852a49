"""Tables in one block: each entry has its own words, and the host's pokes reach exactly those it names."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from eyas.common.config import MOST_STEPS
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestDraftLimits
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence, SequenceWork
from eyas.engine.batch.tables import SlotTables, TableSizes, TableWrites
from eyas.engine.batch.tree import DraftTree
from eyas.engine.device.slot_table import SlotTable
from eyas.engine.device.step import StepLayout

SIZES = TableSizes(slots=5, max_pages=7, width=4)
NAMES = tuple(SlotTables(SIZES, "cpu")._places)


def apply(tables: SlotTables, writes: TableWrites) -> None:
    tables.apply(torch.from_numpy(writes.array()))


def by_slot(tables: SlotTables, name: str) -> torch.Tensor:
    """A table, its slots first: those of a mask follow its words."""
    table: torch.Tensor = getattr(tables, name)
    return table.movedim(1, 0) if name == "mask" else table


def test_no_two_entries_share_a_word() -> None:
    for width in (*range(1, 6), 130):
        tables = SlotTables(TableSizes(5, 7, width), "cpu")
        base, owner = tables.memory.data_ptr(), np.zeros(tables.memory.shape[0], int)
        for name in NAMES:
            column = getattr(tables, name)
            assert by_slot(tables, name).shape[0] == 5 and column.is_contiguous()
            assert column.data_ptr() % column.element_size() == 0
            words = column.numel() * column.element_size() // 4
            first = (column.data_ptr() - base) // 4
            owner[first : first + words] += 1
        assert owner.max() == 1 and (owner == 0).sum() < len(NAMES)


def test_a_poke_reaches_its_entry_and_no_other() -> None:
    pick, tables = random.Random(1), SlotTables(SIZES, "cpu")
    tables.memory.copy_(torch.arange(tables.memory.shape[0]))
    expected = {name: getattr(tables, name).clone() for name in NAMES}
    for name in ("pages", "length", "root", "drafts", "choice", "top_k"):
        column = expected[name].view(5, -1)
        slot, start = pick.randrange(5), pick.randrange(column.shape[1])
        words = [pick.randrange(-(2**31), 2**31) for _ in range(column.shape[1] - start)]
        writes = TableWrites(tables)
        writes.put(name, slot, words, start)
        apply(tables, writes)
        column[slot, start:] = torch.tensor(words)
    for name in NAMES:
        assert torch.equal(getattr(tables, name).view(torch.int32), expected[name].view(torch.int32)), name


def test_a_seat_takes_every_bit_of_its_parameters() -> None:
    for seed in (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 0x0123_4567_89AB_CDEF, 0xFEDC_BA98_7654_3210):
        tables, writes = SlotTables(SIZES, "cpu"), None
        params = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.1, top_k=40, seed=seed)
        tables.drafts.fill_(3)
        before = {name: by_slot(tables, name).clone() for name in NAMES}
        writes = TableWrites(tables)
        writes.occupy(2, params, choice=6, speculative=5)
        writes.draft(2, DraftTree((), ()), branching=False)
        apply(tables, writes)
        assert int(tables.seed[2]) % 2**64 == seed
        floats = (tables.temperature[2], tables.top_p[2], tables.min_p[2])
        assert [float(x) for x in floats] == np.float32([0.7, 0.9, 0.1]).tolist()
        assert (int(tables.top_k[2]), int(tables.choice[2]), int(tables.speculative[2])) == (40, 6, 5)
        assert tables.drafts[2].tolist() == [-1] * 3
        for name in NAMES:
            others = [0, 1, 3, 4]
            assert torch.equal(by_slot(tables, name)[others], before[name][others]), name


def test_top_k_of_nothing_is_off_and_of_everything_fits() -> None:
    tables = SlotTables(SIZES, "cpu")
    writes = TableWrites(tables)
    for slot, top_k in enumerate((0, 2**40, 5)):
        writes.occupy(slot, SamplingParams(top_k=top_k), 0, speculative=0)
    apply(tables, writes)
    assert tables.top_k[:3].tolist() == [0, 2**31 - 1, 5] and not tables.speculative.any()


def test_tables_begin_with_a_chain_and_no_drafts() -> None:
    tables = SlotTables(SIZES, "cpu")
    assert tables.mask[0, 0].tolist() == [0b1, 0b11, 0b111, 0b1111]
    assert tables.depth[0].tolist() == [0, 1, 2, 3] and tables.parents[0].tolist() == [-1, 0, 1]
    assert (tables.drafts == -1).all() and tables.padding_slot == 4
    assert SlotTables(TableSizes(2, 3, 64), "cpu").mask[0, 0, 63] == -1, "all bits of one word"
    wide = SlotTables(TableSizes(2, 3, 130), "cpu").mask
    for node in range(130):
        words = [int(word) % 2**64 for word in wide[:, 1, node]]
        assert sum(word << (64 * i) for i, word in enumerate(words)) == (1 << (node + 1)) - 1


def test_no_pokes_are_an_empty_array() -> None:
    assert TableWrites(SlotTables(SIZES, "cpu")).array().shape == (2, 0)


def test_drafts_from_elsewhere_are_a_tree_whose_nodes_see_their_path() -> None:
    tables = SlotTables(TableSizes(slots=3, max_pages=2, width=6), "cpu")
    writes = TableWrites(tables)
    writes.draft(1, DraftTree((7, 8, 9, 6), (-1, -1, 0, 2)), branching=True)
    before = {name: by_slot(tables, name).clone() for name in NAMES}
    apply(tables, writes)
    assert tables.drafts[1].tolist() == [7, 8, 9, 6, -1]
    assert tables.parents[1, :4].tolist() == [-1, -1, 0, 2] and tables.depth[1, :5].tolist() == [
        0,
        1,
        1,
        2,
        3,
    ]
    assert tables.mask[0, 1, :5].tolist() == [0b1, 0b11, 0b101, 0b1011, 0b11011]
    for name in NAMES:
        for slot in (0, 2):
            assert torch.equal(by_slot(tables, name)[slot], before[name][slot]), name


def test_drafts_from_elsewhere_may_be_as_wide_as_the_tables() -> None:
    pick, tables = random.Random(2), SlotTables(TableSizes(slots=3, max_pages=2, width=140), "cpu")
    for _ in range(2):  # over another tree, too
        tree = DraftTree(range(139), [pick.randint(-1, node - 1) for node in range(139)])
        before = {name: by_slot(tables, name).clone() for name in NAMES}
        writes = TableWrites(tables)
        writes.draft(1, tree, branching=True)
        apply(tables, writes)
        for node in range(140):
            seen = {0, *(above + 1 for above in tree.path(node - 1))} if node else {0}
            words = [int(word) for word in tables.mask[:, 1, node]]
            assert {r for r in range(192) if words[r // 64] >> r % 64 & 1} == seen
        assert torch.equal(tables.mask[:, ::2], before["mask"].movedim(1, 0)[:, ::2])


def test_where_all_drafts_are_chains_only_their_ids_are_written() -> None:
    tables = SlotTables(SIZES, "cpu")
    tables.drafts.fill_(5)
    writes = TableWrites(tables)
    writes.draft(2, DraftTree((7, 8), (-1, 0)), branching=False)
    assert writes.array().shape[1] == 3
    apply(tables, writes)
    assert tables.drafts[2].tolist() == [7, 8, -1]


def test_who_takes_a_slot_is_told_once_with_or_without_drafts() -> None:
    """They may have come before its first round; a device writes a place that is named twice in any order."""
    tables = SlotTables(SIZES, "cpu")
    state: Any = SimpleNamespace(tables=tables, drafter=None, lookup=None, tap=object(), trees=False)
    seats = SlotTable(state, StepLayout(16, 4, 16), ())
    request = GenerationRequest("a", (1, 2), SamplingParams())
    for occupancy, tree in enumerate((DraftTree((7, 8), (-1, 0)), None)):
        seq = Sequence(1, Generation(request, 1, GenerationKind.ATTACH, 0.0, 1.0), 0, (1, 2), [9])
        seq.slot, seq.occupancy, seq.pages = 2, occupancy, [3]
        writes, *_ = seats.tell([SequenceWork(seq, 2, [9], tree, sample=True, round=True)])
        places = writes.array()[0].tolist()
        assert len(places) == len(set(places))
        apply(tables, writes)
        assert tables.drafts[2].tolist() == ([7, 8, -1] if tree else [-1] * 3)
        assert (int(tables.root[2]), int(tables.length[2])) == (9, 2)


def test_rows_behind_a_state_that_no_step_made_are_told_once() -> None:
    """Of a prompt that came from elsewhere, if it does not end where its state stands."""
    state: Any = SimpleNamespace(
        tables=SlotTables(SIZES, "cpu"), drafter=None, lookup=None, tap=None, trees=False
    )
    seats = SlotTable(state, StepLayout(16, 4, 16), ())
    request = GenerationRequest("a", (1,) * 70, SamplingParams(), speculative=False)
    for occupancy, rows in enumerate((70, 64)):
        seq = Sequence(1, Generation(request, 1, GenerationKind.ATTACH, 0.0, 1.0), 0, (1,) * rows, [9])
        seq.slot, seq.occupancy, seq.pages, seq.state, seq.bound = 2, occupancy, list(range(5)), 6, 64
        work = SequenceWork(seq, rows, [9], None, sample=True, round=True)
        told = [seats.tell([work])[2] for _ in range(2)]
        assert told == [[(6, 64, 70)] if rows == 70 else [], []]


def test_a_slot_knows_the_limits_of_its_request() -> None:
    tables = SlotTables(SIZES, "cpu")
    state: Any = SimpleNamespace(tables=tables, drafter=object(), lookup=None, tap=None, trees=True)
    seats = SlotTable(state, StepLayout(16, 4, 16), ())
    for occupancy, limits in enumerate((RequestDraftLimits(3, 2, 9), RequestDraftLimits())):
        request = GenerationRequest("a", (1, 2), SamplingParams(), draft_limits=limits)
        seq = Sequence(1, Generation(request, 1, GenerationKind.LOCAL, 0.0, 1.0), 0, (1, 2), [9])
        seq.slot, seq.occupancy, seq.pages, seq.draft_len = 2, occupancy, [3], 2
        writes, *_ = seats.tell([SequenceWork(seq, 2, [9], None, sample=True, round=True)])
        apply(tables, writes)
        found = [int(table[2]) for table in (tables.speculative, tables.most_topk, tables.most_nodes)]
        assert found == ([3, 2, 8] if limits.steps else [MOST_STEPS, 0, 0])
