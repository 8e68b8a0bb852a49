"""Rows of a forward in a further group of layers: its own page table, and fused models over two of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.engine.attention.exact_rows import ExactAttention
from eyas.engine.attention.rows import PagedAttention, RowLimits
from eyas.engine.batch.rows import DecodeRows, ForwardRows
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.weights import FolderWeights
from eyas.engine.kernels.attention.group_rows import in_group
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.groups import KvGroup, page_layers
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.kv.scaled import FP8
from eyas.engine.models.decoder import Decoder
from tests.unit.families import write_family
from tests.unit.fused_models import SLOTS, Twin, close, int32, same_rows_written, with_tokens
from tests.unit.model_rig import Rig
from tests.unit.rounds_rig import DEVICE

PAGE, MOST, WIDTH = 4, 60, 3


def on_device(rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def test_every_row_is_placed_by_the_groups_own_table() -> None:
    """Rounds with an empty row and one past the table, sequences of one row, chunks in tiles, padding."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randperm(4 * MOST, generator=generator).view(4, MOST).int().to(DEVICE)
    starts, single, tiles = [5, PAGE * MOST - 1], 7, [(1, 0, 10, 150), (2, 150, 3, 5), (3, 0, 0, 0)]
    rounds = DecodeRows(on_device([2, 0]), on_device(starts), WIDTH)
    singles = DecodeRows(on_device([3]), on_device([single]))
    there = [1, 2, -1, 3, 4, 5, 6, *range(155), -1, -1]
    rows = ForwardRows(
        *[on_device(there)] * 3, rounds, on_device([list(each) for each in tiles]), singles=singles
    )  # type: ignore[arg-type]

    def placed(slot: int, row: int) -> int:
        return int(table[slot, row // PAGE]) * PAGE + row % PAGE if row < PAGE * MOST else -1

    expected = [placed(2, 5), placed(2, 6), -1, *(placed(0, starts[1] + i) for i in range(WIDTH))]
    expected += [
        placed(3, single),
        *(placed(1, 10 + i) for i in range(150)),
        *(placed(2, 3 + i) for i in range(5)),
    ]
    found = in_group(rows, table, PAGE, pdl=False)
    assert found.kv_rows.tolist() == [*expected, -1, -1] and found.table is table
    assert rows.kv_rows.tolist() == there


@pytest.mark.slow
def test_a_fused_model_reads_each_layer_by_its_groups_table(tmp_path: Path) -> None:
    """Two chunks of a prompt and a round, each group of layers on pages of its own."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    write_family(tmp_path, "gemma3", vocab_size=128, sliding_window=11, **layers)
    rig = Rig(tmp_path, grouped=True)
    groups = rig.config.kv_groups
    assert len(groups) == 2 and page_layers(groups) == 1 and rig.pool.shape.layers == 1
    tables = [torch.zeros(SLOTS, 8, dtype=torch.int32) for _ in groups]
    twin = Twin(rig.config, rig.pool, tables[0])
    with FolderWeights(tmp_path, rig.config.spelling, fused=rig.config.fused) as weights:
        fused = Decoder(rig.config, weights, twin.machine)
    first, second = rig.table(64), rig.table(64)
    tables[1][2, : len(second)] = int32(second)
    steps = [([], (0, 40)), ([], (40, 7)), ([2], (47, 2))]
    for rounds, (start, count) in steps:
        span = QuerySpan(first, start, count, others=(second,))
        ids = torch.randint(128, (count,), generator=torch.Generator().manual_seed(start)).tolist()
        placed = [(2, span)]
        rows = with_tokens(twin.rows(placed if rounds else [], [] if rounds else placed), ids)
        rows = replace(rows, others=(in_group(rows, tables[1], rig.pool.page_size, pdl=False),))
        expected, _ = rig.forward([span], ids)
        found, _ = fused.forward(rows, twin.pool)
        assert close(found[:count], expected[:count])
    assert same_rows_written(twin.pool, rig.pool)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(FP8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tree", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [PagedAttention, ExactAttention])
def test_no_kernel_reads_what_lies_behind_a_window(
    kind: type[PagedAttention] | type[ExactAttention], tree: bool, dtype: torch.dtype
) -> None:
    """A round and a chunk over pages of which those that the scheduler gives back are full of NaN."""
    generator, size, start = torch.Generator().manual_seed(3), 16, 300
    shape = PoolShape(KvFormat(1, 1, 32), 24, size, dtype, DEVICE)
    pool, table = KvPool(shape), torch.randperm(24, generator=generator).int().view(1, -1).to(DEVICE)
    k, v = torch.randn(2, 24 * size, 1, 32, generator=generator).to(DEVICE)
    pool.write(0, pool.slots(torch.arange(24 * size, device=DEVICE)), k, v)
    mask = torch.tensor([[[1, 3, 5]]], device=DEVICE) if tree else None
    rounds = DecodeRows(on_device([0]), on_device([start]), WIDTH, mask)
    tiles = on_device([[0, 0, start, 5]])  # type: ignore[list-item]
    rows = ForwardRows(*[on_device([0] * (WIDTH + 5))] * 3, rounds, tiles, table=table)  # type: ignore[arg-type]
    attention = kind(torch.zeros_like(table), 2, shape, RowLimits(1, WIDTH), pdl=False)
    q, rule = torch.randn(WIDTH + 5, 2, 32, generator=generator).to(DEVICE), ScoreScaling(0.2, window=40)
    expected = attention(q, pool.layer(0), rows, rule)
    behind = KvGroup((0,), window=40).first(start) // size
    pool.pages.view(torch.uint8)[table[0, :behind].long()] = 255
    assert behind == 16 and expected.isfinite().all()
    assert torch.equal(attention(q, pool.layer(0), rows, rule), expected)
    pool.pages.view(torch.uint8)[table[0, behind + 1 : behind + 2].long()] = 255
    assert attention(q, pool.layer(0), rows, rule).isnan().any(), "a page that is seen"
