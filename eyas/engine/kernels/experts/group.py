"""The order in which a grouped product walks the rows of all experts: by expert, each expert's in blocks.

A choice is row * per_row + rank. The order is one: by expert, then by choice. Each expert has a program for
each part of the choices, which it reads whole: numbers of four bytes that stay in L2. How many choices lie
before its own, a sum over experts and parts tells; of few choices each program finds that out by itself, of
many a launch before it counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.experts.group_many import FEWEST, order_many, write_blocks
from eyas.engine.kernels.experts.grouped_tiles import most_blocks
from eyas.engine.kernels.experts.row_choice import RowChoice
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2

_FEW = 32  # choices: up to this number a program compares each with each
_PART = 2048  # choices of a program, at most; 5,760 take 10.4 us so, and 12.9 as one


@dataclass(frozen=True)
class GroupedChoices:
    """Choices in the order of their experts, int32 [choices], cut into blocks of at most `rows` choices.

    `blocks` int32 [3 * most + 1]: of each block its expert, then its first place in the order, then the place
    behind its last; and how many blocks there are. `most` follows from sizes alone.
    """

    order: torch.Tensor
    blocks: torch.Tensor
    rows: int

    @property
    def count(self) -> int:
        """Choices, of no expert too."""
        return self.order.shape[0]

    @property
    def most(self) -> int:
        """The largest possible number of blocks."""
        return (self.blocks.shape[0] - 1) // 3


@dataclass(frozen=True)
class OrderSizes:
    """The experts that choices may be of, and the most rows of a block of one expert's."""

    experts: int
    rows: int


@dataclass(frozen=True)
class OneRow:
    """The experts that one row chose, int32 [choices]: there is nothing to put in order. Each is a block of
    its own, in products of packed weights or in exact ones, whose tiles have `rows` rows.

    With `choice`, `chosen` are the row's logits, float32 [experts], and programs find out what they choose.
    """

    chosen: torch.Tensor
    rows: int
    choice: RowChoice | None = None

    @property
    def count(self) -> int:
        """Choices."""
        return self.chosen.shape[0] if self.choice is None else self.choice.per_row

    @property
    def most(self) -> int:
        """Blocks."""
        return self.count


ChoiceOrder = GroupedChoices | OneRow
"""How choices are walked."""


def group(chosen: torch.Tensor, experts: int, rows: int, pdl: bool = False) -> GroupedChoices:
    """chosen int32 [m, per_row], of `experts` experts, in blocks of `rows` choices.

    A choice of no expert (-1) is left out: no block has it, and the order ends before its end.
    """
    count, device = chosen.numel(), chosen.device
    order = torch.empty(count, dtype=torch.int32, device=device)
    most = most_blocks(count, experts, rows)
    blocks = torch.empty(3 * most + 1, dtype=torch.int32, device=device)
    if count >= FEWEST:
        order_many(chosen, experts, rows, order, blocks, pdl)
        return GroupedChoices(order, blocks, rows)
    options = {"PDL": pdl, "num_warps": 4, "launch_pdl": pdl}
    counts, parts = None, max(cdiv(count, _PART), 1)
    sizes = {"EXPERTS": experts, "PART": min(power_of_2(count), _PART)}
    if count > _FEW:
        counts = torch.empty(parts, experts, dtype=torch.int32, device=device)
        _count[(experts, parts)](chosen, counts, count, **sizes, **options)
    _place[(experts + 1, parts)](
        *(chosen, counts, order, blocks, count, most, parts, rows),
        SLOTS=power_of_2(experts),
        PARTS=power_of_2(parts),
        **sizes,
        **options,
    )
    return GroupedChoices(order, blocks, rows)


@kernel(do_not_specialize=["count"])
def _count(chosen, counts, count, EXPERTS: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr):
    """Counts how often one expert is chosen in one part."""
    after_previous(PDL)
    expert, part = tl.program_id(0), tl.program_id(1)
    choice = part * PART + tl.arange(0, PART)
    matches = tl.load(chosen + choice, mask=choice < count, other=-1) == expert
    tl.store(counts + part * EXPERTS + expert, tl.sum(matches.to(tl.int32)))


@kernel(do_not_specialize=["count", "most", "parts", "rows"])
def _place(
    chosen, counts, order, blocks, count, most, parts, rows,
    EXPERTS: tl.constexpr, PART: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Puts one expert's choices of one part in their places; the first part's programs cut the expert's into
    blocks, and the one behind the last expert's tells how many blocks there are.
    """
    after_previous(PDL)
    expert, part = tl.program_id(0), tl.program_id(1)
    done = 0
    if counts is None:
        place, block, own = _before_few(chosen, expert, count, rows, PART)
    else:
        place, block, own, done = _before(counts, expert, part, parts, rows, EXPERTS, SLOTS, PARTS)
    if expert == EXPERTS:
        tl.store(blocks + 3 * most, block, mask=part == 0)
        return
    if own == 0:
        return
    choice = part * PART + tl.arange(0, PART)
    mine = tl.load(chosen + choice, mask=choice < count, other=-1) == expert
    through = tl.cumsum(mine.to(tl.int32), 0)
    tl.store(order + place + done + through - 1, choice, mask=mine)
    if part > 0:
        return
    write_blocks(blocks, most, expert, block, place, own, rows)


@triton.jit
def _before(
    counts, expert, part, parts, rows,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Counts the choices, and the blocks, of the experts before this one; its own choices, and those of them
    in the parts before this one.
    """
    other, each = tl.arange(0, SLOTS)[None, :], tl.arange(0, PARTS)[:, None]
    there = (other < EXPERTS) & (each < parts)
    counted = tl.load(counts + each * EXPERTS + other, mask=there, other=0)
    done = tl.sum(tl.sum(tl.where((other == expert) & (each < part), counted, 0), 1), 0)
    total, other = tl.sum(counted, 0), tl.arange(0, SLOTS)
    earlier = tl.where(other < expert, total, 0)
    own = tl.sum(tl.where(other == expert, total, 0))
    return tl.sum(earlier), tl.sum((earlier + rows - 1) // rows), own, done


@triton.jit
def _before_few(chosen, expert, count, rows, PART: tl.constexpr):
    """Counts as `_before`, for choices that one look sees: a block begins at each `rows`-th one of
    an expert.
    """
    choice = tl.arange(0, PART)
    each = tl.load(chosen + choice, mask=choice < count, other=-1)
    other = tl.load(chosen + choice, mask=choice < count, other=-2)  # none is an absent one's fellow
    rank = tl.sum(((each[:, None] == other[None, :]) & (choice[None, :] < choice[:, None])).to(tl.int32), 1)
    earlier = (each >= 0) & (each < expert)
    begins = earlier & (rank % rows == 0)
    return tl.sum(earlier.to(tl.int32)), tl.sum(begins.to(tl.int32)), tl.sum((each == expert).to(tl.int32))
