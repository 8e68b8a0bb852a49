"""The rows of a block of drafts on the device, against `DraftBlock` and the pages of their sequences."""

from __future__ import annotations

import pytest
import torch

from eyas.engine.checkpoint.config import DraftBlock
from eyas.engine.kernels.drafts.block import lay
from tests.unit.rounds_rig import DEVICE, PAGE, new_rows, random_case

MASK = 99
BLOCKS = {
    "a root, then masks, each drafted": (DraftBlock(7, MASK), 4),
    "the root's row drafts too": (DraftBlock(7, MASK, first=0), 3),
    "masks alone, causal": (DraftBlock(7, MASK, rooted=False, first=-1, causal=True), 5),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_stands_behind_the_certain_rows(kind: str) -> None:
    block, width = BLOCKS[kind]
    case = random_case(3, 8, batch=6)
    rows, mask = new_rows(6, width), torch.zeros(1, 6, width, dtype=torch.int64, device=DEVICE)
    drafts = width - max(block.first, 0)
    scored = torch.full((6 * drafts,), -1, dtype=torch.int32, device=DEVICE) if block.rooted else None
    lay(case.batch, block, rows, mask, scored)
    if scored is not None:
        assert scored.tolist() == [b * width + j for b in range(6) for j in range(block.first, width)]
    tables, ends = case.tables, case.tables.pages.shape[1] * PAGE
    lengths = set()
    for b, slot in enumerate(case.slots):
        start, deepest = int(tables.length[slot]), int(tables.speculative[slot])
        live = slot != tables.padding_slot and deepest > 0
        count = max(min(deepest + block.first, width, ends - start), 0) if live else 0
        tokens = block.tokens(int(tables.root[slot]), width)
        lengths.add(count)
        assert int(rows.starts[b]) == start
        for j in range(width):
            physical = case.row(slot, start + j) if j < count else -1
            here = (tokens[j], start + j, physical) if physical >= 0 else (0, 0, -1)
            at = b * width + j
            assert (int(rows.tokens[at]), int(rows.positions[at]), int(rows.kv_rows[at])) == here
            seen = min(j + 1, count) if block.causal else count
            assert int(mask[0, b, j]) == (1 << seen) - 1
    assert len(lengths) > 1  # whole blocks, and shorter ones
