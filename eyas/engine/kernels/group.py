"""In which order a grouped product walks the rows of all experts: by expert, each expert's in blocks.

A choice is row * per_row + rank. The order is one: by expert, then by choice. Each expert has a program,
which reads all choices: numbers of four bytes that stay in L2. How many choices lie before its own, a sum
over the experts tells; of few choices each program finds that out by itself, of many a launch before it
counts. It knows numbers of experts and choices; it refuses to know who chose, and what an expert computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.grouped_tiles import most_blocks
from eyas.engine.kernels.launching import after_previous

_FEW = 32  # choices: up to this number a program compares each with each
_AT_ONCE = 1024  # choices that a program looks at at a time
_CUT = 32  # blocks that it writes at a time


@dataclass(frozen=True)
class Grouped:
    """Choices in the order of their experts, int32 [choices], cut into blocks of at most `rows` choices.

    `blocks` int32 [3 * most + 1]: of each block its expert, then its first place in the order, then the place
    behind its last; and how many blocks there are. `most` follows from sizes alone.
    """

    order: torch.Tensor
    blocks: torch.Tensor
    rows: int

    @property
    def most(self) -> int:
        """As many blocks as there may be."""
        return (self.blocks.shape[0] - 1) // 3


def group(chosen: torch.Tensor, experts: int, rows: int, pdl: bool = False) -> Grouped:
    """chosen int32 [m, per_row], of `experts` experts, in blocks of `rows` choices.

    A choice of no expert (-1) is left out: no block has it, and the order ends before its end.
    """
    count, device = chosen.numel(), chosen.device
    order = torch.empty(count, dtype=torch.int32, device=device)
    most = most_blocks(count, experts, rows)
    blocks = torch.empty(3 * most + 1, dtype=torch.int32, device=device)
    options = {"PDL": pdl, "num_warps": 4, "launch_pdl": pdl}
    counts, few = None, count <= _FEW
    if not few:
        counts = torch.empty(experts, dtype=torch.int32, device=device)
        _count[(experts,)](chosen, counts, count, AT_ONCE=_AT_ONCE, **options)
    _place[(experts + 1,)](
        *(chosen, counts, order, blocks, count, most),
        EXPERTS=experts,
        SLOTS=triton.next_power_of_2(experts),
        ROWS=rows,
        AT_ONCE=triton.next_power_of_2(count) if few else _AT_ONCE,
        CUT=_CUT,
        **options,
    )
    return Grouped(order, blocks, rows)


@triton.jit(do_not_specialize=["count"])
def _count(chosen, counts, count, AT_ONCE: tl.constexpr, PDL: tl.constexpr):
    """How often one expert is chosen."""
    after_previous(PDL)
    expert = tl.program_id(0)
    found = tl.zeros((AT_ONCE,), tl.int32)
    for first in range(0, count, AT_ONCE):
        choice = first + tl.arange(0, AT_ONCE)
        found += (tl.load(chosen + choice, mask=choice < count, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found))


@triton.jit(do_not_specialize=["count", "most"])
def _place(
    chosen, counts, order, blocks, count, most,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, CUT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Puts one expert's choices in their places, and cuts them into blocks; the program behind the last
    expert's tells how many blocks there are.
    """
    after_previous(PDL)
    expert = tl.program_id(0)
    if counts is None:
        place, block, own = _before_few(chosen, expert, count, ROWS, AT_ONCE)
    else:
        place, block, own = _before(counts, expert, EXPERTS, SLOTS, ROWS)
    if expert == EXPERTS:
        tl.store(blocks + 3 * most, block)
        return
    if own == 0:
        return
    done = 0
    for first in range(0, count, AT_ONCE):
        choice = first + tl.arange(0, AT_ONCE)
        mine = tl.load(chosen + choice, mask=choice < count, other=-1) == expert
        through = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order + place + done + through - 1, choice, mask=mine)
        done += tl.max(through)
    for nth in range(0, tl.cdiv(own, ROWS), CUT):
        each = nth + tl.arange(0, CUT)
        here, at, begins = each < tl.cdiv(own, ROWS), blocks + block + each, place + each * ROWS
        tl.store(at, tl.zeros_like(each) + expert, mask=here)
        tl.store(at + most, begins, mask=here)
        tl.store(at + 2 * most, tl.minimum(begins + ROWS, place + own), mask=here)


@triton.jit
def _before(counts, expert, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr):
    """How many choices, and how many blocks, the experts before this one have; and its own choices."""
    other = tl.arange(0, SLOTS)
    each = tl.load(counts + other, mask=other < EXPERTS, other=0)
    earlier = tl.where(other < expert, each, 0)
    return tl.sum(earlier), tl.sum((earlier + ROWS - 1) // ROWS), tl.sum(tl.where(other == expert, each, 0))


@triton.jit
def _before_few(chosen, expert, count, ROWS: tl.constexpr, AT_ONCE: tl.constexpr):
    """As `_before`, of choices that one look sees: a block begins at every ROWS-th of an expert's choices."""
    choice = tl.arange(0, AT_ONCE)
    each = tl.load(chosen + choice, mask=choice < count, other=-1)
    other = tl.load(chosen + choice, mask=choice < count, other=-2)  # none is an absent one's fellow
    rank = tl.sum(((each[:, None] == other[None, :]) & (choice[None, :] < choice[:, None])).to(tl.int32), 1)
    earlier = (each >= 0) & (each < expert)
    begins = earlier & (rank % ROWS == 0)
    return tl.sum(earlier.to(tl.int32)), tl.sum(begins.to(tl.int32)), tl.sum((each == expert).to(tl.int32))
