"""What moves along an accepted path, against `KvPool.move` and plain indexing."""

from __future__ import annotations

import pytest
import torch

from eyas.engine.kernels.drafts.accepted_path import MaskedRows, compact, gather_path
from eyas.engine.kernels.drafts.rounds import FACTS, RoundVerdicts
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool, PoolShape
from tests.unit.accepted_paths import DEEPEST, WIDTH, accepted
from tests.unit.rounds_rig import DEVICE, PAGE, new_extension, random_case


@pytest.mark.parametrize("heads, dim", [(2, 8), (3, 256)])  # a row of one block, and of two
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_compact_is_the_pools_move(heads: int, dim: int, dtype: torch.dtype) -> None:
    for seed in range(4):
        case = random_case(seed, WIDTH)
        pages = case.tables.pages.numel()
        pool = KvPool(PoolShape(KvFormat(2, heads, dim), pages, PAGE, dtype, DEVICE))
        pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(seed)))
        twin = KvPool(pool.shape)
        twin.tensor.copy_(pool.tensor)
        verdicts, paths, _ = accepted(case, seed)
        compact(case.batch, verdicts, pool.tensor)
        moves = 0
        for slot, path in zip(case.slots, paths, strict=True):
            start = int(case.tables.length[slot]) - len(path)
            pairs = [(case.row(slot, start + node), case.row(slot, start + i)) for i, node in enumerate(path)]
            pairs = [(source, target) for source, target in pairs if source >= 0]
            if slot != case.tables.padding_slot:
                sources, targets = torch.tensor(pairs, device=DEVICE).unbind(1)
                twin.move(sources, targets)
                moves += int((sources != targets).sum())
        assert moves > 0
        assert torch.equal(pool.tensor, twin.tensor)


def test_a_source_that_is_also_a_target() -> None:
    """Nodes 2, 3, 5 of a path move to 1, 2, 3: row 2 and 3 are read before they are written."""
    case = random_case(0, WIDTH, batch=2)
    slot = case.slots[0]
    case.tables.length[slot] = 4
    pool = KvPool(PoolShape(KvFormat(1, 1, 4), case.tables.pages.numel(), PAGE, device=DEVICE))
    rows = [case.row(slot, i) for i in range(6)]
    place = [(row // PAGE, 0, 0, row % PAGE) for row in rows]
    for i, at in enumerate(place):
        pool.tensor[at] = float(i)
    path = torch.tensor([[0, 2, 3, 5], [0, -1, -1, -1]], dtype=torch.int32, device=DEVICE)
    result = torch.zeros(2, FACTS + WIDTH, dtype=torch.int32, device=DEVICE)
    result[:, 0] = torch.tensor([4, 1])
    compact(case.batch, RoundVerdicts(result, path), pool.tensor)
    assert [float(pool.tensor[at][0, 0]) for at in place] == [0.0, 2.0, 3.0, 5.0, 4.0, 5.0]


@pytest.mark.parametrize("hidden", [48, 1500])  # of one block, and of two
def test_gather_path(hidden: int) -> None:
    for seed in range(3):
        case = random_case(seed, WIDTH)
        verdicts, paths, emitted = accepted(case, seed)
        batch, tables = case.batch, case.tables
        features = torch.randn(batch.size * WIDTH, hidden, generator=torch.Generator().manual_seed(seed))
        features = features.to(DEVICE, torch.float16)
        extension = new_extension(batch.size, DEEPEST, features)
        gather_path(batch, verdicts, features, extension)
        rows = extension.rows
        for b, (slot, path, tokens) in enumerate(zip(case.slots, paths, emitted, strict=True)):
            live = slot != tables.padding_slot
            start = int(tables.length[slot]) - (len(path) if live else 0)
            assert int(rows.starts[b]) == start
            assert int(extension.last_row[b]) == b * DEEPEST + len(path) - 1
            for j in range(DEEPEST):
                row, last = b * DEEPEST + j, min(j, len(path) - 1)
                assert torch.equal(extension.features[row], features[b * WIDTH + path[last]])
                physical = case.row(slot, start + j) if live and j < len(path) else -1
                held = (tokens[j], start + j) if physical >= 0 else (0, 0)
                assert int(rows.kv_rows[row]) == physical
                assert (int(rows.tokens[row]), int(rows.positions[row])) == held


def test_gather_path_with_a_block_behind() -> None:
    """Certain rows are those without it; masked rows follow the newest, as many as its drafts need."""
    masks, hidden, empty = 3, 48, 0
    for seed in range(6):
        case = random_case(seed, WIDTH)
        verdicts, paths, _ = accepted(case, seed)
        batch, tables, each = case.batch, case.tables, DEEPEST + masks
        nodes = batch.size * WIDTH
        features, mask = (torch.randn(rows, hidden, device=DEVICE) for rows in (nodes, 1))
        plain, found = (new_extension(batch.size, rows, features) for rows in (DEEPEST, each))
        gather_path(batch, verdicts, features, plain)
        gather_path(batch, verdicts, features, found, MaskedRows(masks, 77, mask))
        assert torch.equal(found.rows.starts, plain.rows.starts)
        for b, (slot, path) in enumerate(zip(case.slots, paths, strict=True)):
            live, count = slot != tables.padding_slot, len(path)
            assert int(found.last_row[b]) == b * each + count - 1
            wanted = max(min(int(tables.speculative[slot]) - 1, masks), 0) if live else 0
            for j in range(each):
                row, same = b * each + j, b * DEEPEST + j
                got = [
                    int(part[row]) for part in (found.rows.tokens, found.rows.positions, found.rows.kv_rows)
                ]
                if j < count:
                    parts = (plain.rows.tokens, plain.rows.positions, plain.rows.kv_rows)
                    assert got == [int(part[same]) for part in parts]
                    assert torch.equal(found.features[row], plain.features[same])
                    continue
                position = int(found.rows.starts[b]) + j
                physical = case.row(slot, position) if j < count + wanted else -1
                empty += physical < 0
                assert got == ([77, position, physical] if physical >= 0 else [0, 0, -1])
                assert torch.equal(found.features[row], mask[0])
    assert empty, "no sequence wanted fewer drafts, and no page table ended"
