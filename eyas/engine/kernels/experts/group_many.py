"""The order of many choices: each part of them is sorted once, where `group` looks through it by expert.

Three launches: how often each expert is chosen in each part; what of an expert's lies before each part; then
a part's choices, sorted by expert and by number, go to their places, and the experts' blocks are cut.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2

FEWEST = 16384
"""Choices: of fewer, `group` is as fast."""

_PART = 1024  # choices that a program sorts
_COLUMNS = 16  # experts to a program that adds up
_CUT = tl.constexpr(32)  # blocks that are written at a time


def order_many(
    chosen: torch.Tensor, experts: int, rows: int, order: torch.Tensor, blocks: torch.Tensor, pdl: bool
) -> None:
    """Writes `group.GroupedChoices` of chosen int32 [m, per_row]."""
    count, device, most = chosen.numel(), chosen.device, (blocks.shape[0] - 1) // 3
    parts, slots = cdiv(count, _PART), max(power_of_2(experts + 1), _COLUMNS)
    counts = torch.empty(parts, slots, dtype=torch.int32, device=device)
    totals = torch.empty(slots, dtype=torch.int32, device=device)
    sizes = {"EXPERTS": experts, "SLOTS": slots, "PDL": pdl}
    options = {"num_warps": 4, "launch_pdl": pdl}
    _count_parts[(parts,)](chosen, counts, count, PART=_PART, **sizes, **options)
    _add_up[(slots // _COLUMNS,)](
        counts, totals, parts, PARTS=power_of_2(parts), COLUMNS=_COLUMNS, **sizes, **options
    )
    _place_parts[(parts + experts + 1,)](
        *(chosen, counts, totals, order, blocks, count, most, parts, rows),
        PART=_PART,
        **sizes,
        **options,
    )


@kernel(do_not_specialize=["count"])
def _count_parts(
    chosen, counts, count, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Grid (parts,). A choice of no expert counts as one of expert EXPERTS."""
    after_previous(PDL)
    part = tl.program_id(0)
    expert = _experts_of(chosen, part, count, EXPERTS, PART)
    tl.store(counts + part * SLOTS + tl.arange(0, SLOTS), tl.histogram(expert, SLOTS))


@kernel(do_not_specialize=["parts"])
def _add_up(
    counts, totals, parts,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (experts / COLUMNS,): counts become those of the parts before, and `totals` those of all."""
    after_previous(PDL)
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    part = tl.arange(0, PARTS)[:, None]
    at, there = counts + part * SLOTS + expert, part < parts
    own = tl.load(at, mask=there, other=0)
    tl.store(at, tl.cumsum(own, 0) - own, mask=there)
    tl.store(totals + tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.sum(own, 0))


@kernel(do_not_specialize=["count", "most", "parts", "rows"])
def _place_parts(
    chosen, counts, totals, order, blocks, count, most, parts, rows,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (parts + experts + 1,): each part's choices, then each expert's blocks, then their number."""
    after_previous(PDL)
    slot = tl.arange(0, SLOTS)
    total = tl.where(slot < EXPERTS, tl.load(totals + slot), 0)
    if tl.program_id(0) < parts:
        _place_part(chosen, counts, order, count, total, EXPERTS, SLOTS, PART)
    else:
        _cut_blocks(blocks, most, tl.program_id(0) - parts, total, rows, EXPERTS, SLOTS)


@triton.jit
def _place_part(
    chosen, counts, order, count, total, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """Choices of one expert and part follow each other, behind those of the parts before."""
    part, place = tl.program_id(0), tl.arange(0, PART)
    key = tl.sort(_experts_of(chosen, part, count, EXPERTS, PART) * PART + place)
    expert = key // PART
    own = tl.histogram(expert, SLOTS)
    first = tl.cumsum(total, 0) - total + tl.load(counts + part * SLOTS + tl.arange(0, SLOTS))
    target = tl.gather(first - (tl.cumsum(own, 0) - own), expert, 0) + place
    tl.store(order + target, part * PART + key % PART, mask=expert < EXPERTS)


@triton.jit
def _cut_blocks(blocks, most, expert, total, rows, EXPERTS: tl.constexpr, SLOTS: tl.constexpr):
    """Writes the blocks of one expert; behind the last expert, how many blocks there are."""
    slot = tl.arange(0, SLOTS)
    earlier = tl.where(slot < expert, total, 0)
    block, begin = tl.sum((earlier + rows - 1) // rows), tl.sum(earlier)
    if expert == EXPERTS:
        tl.store(blocks + 3 * most, block)
    own = tl.sum(tl.where(slot == expert, total, 0))  # 0 behind the last one
    write_blocks(blocks, most, expert, block, begin, own, rows)


@triton.jit
def write_blocks(blocks, most, expert, block, begin, own, rows):
    """The blocks of an expert with `own` choices from place `begin` of the order on: of `rows` choices each;
    the first one is block number `block`.
    """
    for nth in range(0, tl.cdiv(own, rows), _CUT):
        each = nth + tl.arange(0, _CUT)
        here, at, begins = each < tl.cdiv(own, rows), blocks + block + each, begin + each * rows
        tl.store(at, tl.zeros_like(each) + expert, mask=here)
        tl.store(at + most, begins, mask=here)
        tl.store(at + 2 * most, tl.minimum(begins + rows, begin + own), mask=here)


@triton.jit
def _experts_of(chosen, part, count, EXPERTS: tl.constexpr, PART: tl.constexpr):
    """The experts of a part's choices; of none, and behind the last choice, EXPERTS."""
    choice = part * PART + tl.arange(0, PART)
    expert = tl.load(chosen + choice, mask=choice < count, other=-1)
    return tl.where(expert < 0, EXPERTS, expert)
