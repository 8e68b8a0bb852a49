"""What adapters add to products of one to four rows, in fast arithmetic.

A kernel multiplies the rows by lower factors (`updates.shrink_few`), and the product's end multiplies that by
the upper ones, which wait in registers. For one row that kernel runs beside the product, which is launched
first and does not wait for it: what has not arrived at its end (`arrival`) the product makes itself, number
by number in the same order, so that the bits are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kernels.products.arrival import BLANK, UpdateLaunch, arrived_soon, as_bits
from eyas.engine.kernels.products.updates import (
    GRAIN,
    RowUpdates,
    SiteNumbers,
    piece_of_row,
    row_of_lower,
    shrink_few,
    shrunk,
    total_of,
)

MOST_BEHIND = 1
"""Rows beside whose product lower factors are multiplied: with more it was not measured."""
_LINE = 32  # int32 in a line of memory
_BLANKS = 8192  # numbers of a step's products for each row, and as many beside


class FewAdapters:
    """The rows of a step of at most four rows."""

    def __init__(self, slots: torch.Tensor) -> None:
        """`slots` int32 [m]: of the adapter of each row, 0: none."""
        self.slots = slots
        self._blanks, self._used = slots.new_empty(0), 0

    def updates(self, x: torch.Tensor, site: SiteNumbers) -> FewUpdates:
        """What adapters add to the product of the rows x [m, k], contiguous."""
        return FewUpdates(x, self, site)

    def blanks(self, *sizes: int) -> torch.Tensor:
        """So many numbers, int32, that are not there yet, and that no product of the step has had before."""
        count = cdiv(math.prod(sizes), _LINE) * _LINE
        if self._used + count > len(self._blanks):
            room = max(count, _BLANKS * (len(self.slots) + 1))
            self._blanks, self._used = self.slots.new_full((room,), BLANK.value), 0
        self._used += count
        return self._blanks[self._used - count :][: math.prod(sizes)].view(sizes)


@dataclass(frozen=True)
class FewUpdates:
    """What adapters add to the product of rows x [m, k], of at most four."""

    x: torch.Tensor
    rows: FewAdapters
    site: SiteNumbers

    def beside(self, pdl: bool, programs: int) -> UpdateLaunch:
        """A kernel that multiplies rows by lower factors, to be launched behind a product of that many
        programs, which multiplies that by the upper ones.
        """
        slots, site = self.rows.slots, self.site
        out, ended = self.rows.blanks(len(self.x), site.parts, site.ranks), self.rows.blanks(1)
        launch = partial(shrink_few, self.x, out, slots, site, pdl, (ended, programs))
        return UpdateLaunch((out, slots, site.numbers, site.places, site.part_of, self.x, ended), launch)

    def before(self, pdl: bool) -> RowUpdates:
        """Rows times lower factors, made before the product."""
        return shrunk(self.x, self.rows.slots, self.site, pdl)

    def add_to(self, made: torch.Tensor, pdl: bool) -> None:
        """Adds it to the product's rows made [m, n], contiguous; in place, rounded once."""
        self.before(pdl).add_to(made, pdl)


@triton.jit
def lowers_beside(
    updates, own, first, row, m, part,
    K: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, STRIDE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """At the product's end: its rows, those below m, times GRAIN ranks of a part's lower factors, [rows,
    GRAIN]; made here where they have not arrived.
    """
    rank = tl.arange(0, GRAIN)
    place = updates[0] + (row.to(tl.int64)[:, None] * PARTS + part) * RANKS + first + rank[None, :]
    there = (first < own[0])[:, None] & (rank >= 0)[None, :]
    bits, blank = arrived_soon(place, there)
    if blank > 0:
        out, slots, numbers, places, _, x, _ = updates
        _make_lowers(out, slots, numbers, places, x, first, m, part, K, PARTS, RANKS, STRIDE, PIECE)
        tl.debug_barrier()
        bits = tl.load(place, mask=there, other=0, volatile=True)
    return bits.to(tl.float32, bitcast=True)


@triton.jit(noinline=True)
def _make_lowers(
    out, slots, numbers, places, x, first, m, part,
    K: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, STRIDE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The numbers that `shrink_few` makes of all rows and GRAIN ranks of a part. A function of its own: at a
    product's end its instructions would stand in the way.
    """
    for row in range(m):
        for turn in range(GRAIN):
            updates = (out, slots, numbers, places)
            factor, there = row_of_lower(updates, row, part, first + turn, K, STRIDE)
            begin = x + tl.cast(row, tl.int64) * K
            sums = tl.full((PIECE,), 0.0, tl.float32)
            for piece in range((K + PIECE - 1) // PIECE):
                read = piece_of_row(begin, there, piece, K, PIECE).to(tl.float32)
                sums += read * piece_of_row(factor, there, piece, K, PIECE).to(tl.float32)
            place = out + (row * PARTS + part) * RANKS + first + turn
            tl.store(place, as_bits(total_of(sums)), mask=there)
