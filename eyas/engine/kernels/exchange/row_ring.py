"""Feature rows between GPUs: a step's device writes them into a draft worker's ring, whose device takes them.

`eyas.engine.ipc.row_ring` says what the words of 4 bytes mean. The writer does not ask whether a row has been
read. A reader that comes too late finds other tags, and says so; one that is a little early looks again. The
writer keeps the rows on its own device too (`eyas.engine.speculation.feature_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from eyas.engine.batch.tables import SlotTables
from eyas.engine.ipc.row_ring import GOLDEN, ROUND
from eyas.engine.kernels.drafts.rounds import PLAIN
from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import cdiv

BLOCK = 512
"""Words per program. A row of 4,096 values of 16 bits has 2,048."""
LOOKS = 512
"""How often a row is looked for, some 0.5 ms on a GPU: a mailbox tells of it while it is on its way, and a
step without a graph launches what writes it kernel by kernel.
"""
_GOLDEN, _ROUND = (tl.constexpr(each - (1 << 32)) for each in (GOLDEN, ROUND))  # as int32


@dataclass(frozen=True)
class WrittenRows:
    """Rows of a step, up to P per sequence, behind each other.

    `slots` int32 [B]; of padding nothing is written. `ring_rows`: of a ring. `windows` [slots, rows, width]:
    where they stay. `counts` int32 [B, ..]: in its first column, how many of the P rows are certain, and
    counted by the lengths already; None: all P are written, before it is known which are certain.
    """

    slots: Tensor
    ring_rows: int
    windows: Tensor
    counts: Tensor | None = None


def put(tables: SlotTables, written: WrittenRows, features: Tensor) -> None:
    """`features` [B * P, width], of 2 or 4 bytes per value as `windows`: each certain row goes to its places,
    those in rings as the tables say.
    """
    size = written.slots.shape[0]
    if not size:
        return
    words = features.contiguous().view(torch.int32)
    count, width = words.shape
    counts = written.counts
    _put[(count, cdiv(width, BLOCK))](
        written.slots,
        tables.ring,
        tables.ring_generation,
        tables.length,
        counts,
        words,
        written.windows.view(torch.int32),
        tables.padding_slot,
        0 if counts is None else counts.stride(0),
        count // size,
        RING=written.ring_rows,
        WINDOW=written.windows.shape[1],
        WIDTH=width,
        BLOCK=BLOCK,
        num_warps=4,
    )


@kernel(do_not_specialize=(*PLAIN, "slots", "rings", "generations", "counts", "stride", "path"))
def _put(
    slots,
    rings,
    generations,
    length,
    counts,
    words,
    windows,
    padding,
    stride,
    path,
    RING: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    sequence, index = row // path, row % path
    slot = tl.load(slots + sequence)
    count = path
    base = tl.load(length + slot)
    if counts is not None:
        count = tl.load(counts + sequence * stride)
        base -= count
    if (slot != padding) & (index < count):
        position = base + index
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        word = tl.load(words + row.to(tl.int64) * WIDTH + column, mask=inside, other=0)
        stays = windows + (slot.to(tl.int64) * WINDOW + position % WINDOW) * WIDTH
        tl.store(stays + column, word, mask=inside)
        address = tl.load(rings + slot)
        if address != 0:
            tag = tl.load(generations + slot) * _GOLDEN + position + base * _ROUND + 1
            tagged = (tag.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)
            target = address.to(tl.pointer_type(tl.int64)) + position % RING * WIDTH
            if WIDTH % 2 == 0:
                target = tl.multiple_of(target, 16)
            tl.store(target + column, tagged, mask=inside)


def take(rows: Tensor, owners: Tensor, features: Tensor, lost: Tensor, looks: int | None = None) -> None:
    """Rows of rings into `features` [R, width], as `put` has them.

    `rows` int64 [2, R]: each one's address (0: it is in no ring, and stays as it is) and tag. `lost` int32
    becomes 1 at `owners` int64 [R] of every row that is not there, any more or yet; its features are zeros.
    `looks`: how often a row is looked for; None: LOOKS.
    """
    words = features.view(torch.int32)
    count, width = words.shape
    _take[(count, cdiv(width, BLOCK))](
        rows, owners, words, lost, count, WIDTH=width, BLOCK=BLOCK, LOOKS=looks or LOOKS, num_warps=4
    )


@kernel(do_not_specialize=("rows", "owners", "lost", "count"))
def _take(rows, owners, words, lost, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LOOKS: tl.constexpr):
    row = tl.program_id(0)
    address = tl.load(rows + row)
    if address != 0:
        tag = tl.load(rows + count + row)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        source = address.to(tl.pointer_type(tl.int64))
        if WIDTH % 2 == 0:
            source = tl.multiple_of(source, 16)
        word = tl.load(source + column, mask=inside, other=0, volatile=True)
        there = (word >> 32) == tag
        missing = tl.max((inside & (there == 0)).to(tl.int32), axis=0)
        looks = 1
        while (missing != 0) & (looks < LOOKS):
            word = tl.load(source + column, mask=inside, other=0, volatile=True)
            there = (word >> 32) == tag
            missing = tl.max((inside & (there == 0)).to(tl.int32), axis=0)
            looks += 1
        tl.store(
            words + row.to(tl.int64) * WIDTH + column, tl.where(there, word, 0).to(tl.int32), mask=inside
        )
        if missing != 0:
            tl.store(lost + tl.load(owners + row), 1)
