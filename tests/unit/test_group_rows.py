"""Rows of a forward in a further group of layers: its own page table, and fused models over two of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.engine.batch.rows import DecodeRows, ForwardRows
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.weights import FolderWeights
from eyas.engine.kernels.attention.group_rows import in_group
from eyas.engine.kv.groups import page_layers
from eyas.engine.models.decoder import Decoder
from tests.unit.families import write_family
from tests.unit.model_rig import Rig
from tests.unit.rounds_rig import DEVICE
from tests.unit.test_models_fused import SLOTS, Twin, close, int32, same_rows_written, with_tokens

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
