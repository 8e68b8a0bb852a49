"""Drafts that a grammar forces behind a verdict which only the device knows: taken if it was the one meant.

The host writes down what would follow a few likely ends of the step in flight. Drafts are advice, so chains
alone are told apart: by the sequence's length and its root.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from eyas.engine.batch.tables import SlotTables
from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import power_of_2

HEAD = 3
"""Words of a row before its drafts: slot, length and root."""
_HEAD = tl.constexpr(HEAD)


def draft_forced(tables: SlotTables, rows: Tensor) -> None:
    """rows int32 [n, HEAD + drafts of a slot]: where a slot has this length and root its drafts become the
    row's, a chain (-1: none). Of the rows of one slot no two have the same length and root.
    """
    drafts = tables.drafts.shape[1]
    _draft_forced[(rows.shape[0],)](
        *(rows, tables.length, tables.root, tables.drafts, drafts),
        BLOCK=power_of_2(drafts),
        num_warps=1,
    )


@kernel(do_not_specialize=["rows", "length", "root", "drafts", "stride"])
def _draft_forced(rows, length, root, drafts, stride, BLOCK: tl.constexpr):
    row = rows + tl.program_id(0) * (_HEAD + stride)
    slot = tl.load(row).to(tl.int64)
    at = tl.arange(0, BLOCK)
    meant = (tl.load(length + slot) == tl.load(row + 1)) & (tl.load(root + slot) == tl.load(row + 2))
    inside = meant & (at < stride)
    tl.store(drafts + slot * stride + at, tl.load(row + _HEAD + at, mask=inside, other=-1), mask=inside)
