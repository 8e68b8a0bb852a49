"""What adapters add to products of more than 128 rows, in fast arithmetic: two kernels behind the product.

Rows in the order of their adapters are cut into blocks, each of one adapter. The first kernel multiplies a
block's rows by chunks of k of a lower factor; the second adds the chunks up, multiplies them by the upper
factor and adds that to the product. A row is multiplied by its own adapter's factors alone, in one order,
wherever it stands in its block: its bits do not depend on other rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.experts.group import group
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.products.updates import GRAIN, RowUpdates, SiteNumbers, shrunk

BLOCK = 64
"""Rows of a block."""
_CHUNK, _DEPTH = 1024, 128  # columns of k: of a program, and of one of its products
_COLUMNS = 128  # of n, of a program that adds
_PROGRAMS = 500  # for all blocks that there may be at most: one costs 3 ns, without work too
_WARPS, _STAGES = 4, 3
_ADD_WARPS, _ADD_STAGES = 4, 1


class AdapterBlocks:
    """The rows of a step, more than products of few rows take, for all of its products.

    In the order of their adapters they are cut into blocks: `BlockCuts`.
    """

    def __init__(self, slots: torch.Tensor) -> None:
        """`slots` int32 [m]: of the adapter of each row, 0: none."""
        self._slots = slots
        self._cuts: dict[int, BlockCuts] = {}

    def updates(self, x: torch.Tensor, site: SiteNumbers) -> BlockUpdates | RowUpdates:
        """What adapters add to the product of the rows x [m, k], contiguous."""
        if site.part_of.shape[0] % GRAIN.value:  # no tile of its columns is wide enough for the matrix unit
            return shrunk(x, self._slots, site)
        slots = site.places.shape[0]
        if slots not in self._cuts:
            grouped = group(self._slots[:, None], slots, BLOCK)
            self._cuts[slots] = BlockCuts(grouped.order, grouped.blocks, grouped.most)
        return BlockUpdates(x, self._cuts[slots], site)


@dataclass(frozen=True)
class BlockCuts:
    """`order` int32 [m]: rows by their adapters. `cuts` int32 [3 * most + 1]: of each block its adapter's
    slot, then its first place in the order, then the place behind its last; and how many blocks there are.

    Kernels that are launched behind another one may read it before they wait.
    """

    order: torch.Tensor
    cuts: torch.Tensor
    most: int


@dataclass(frozen=True)
class BlockUpdates:
    """What adapters add to the product of rows x [m, k], contiguous."""

    x: torch.Tensor
    cuts: BlockCuts
    site: SiteNumbers

    def add_to(self, made: torch.Tensor, pdl: bool) -> None:
        """Adds it to the product's rows made [m, n], contiguous; in place, rounded once."""
        (m, n), (k, site) = made.shape, (self.x.shape[1], self.site)
        chunk, columns = min(_CHUNK, power_of_2(k)), math.gcd(n, _COLUMNS)
        chunks = cdiv(k, chunk)
        sums = made.new_empty(site.parts, m, chunks, site.ranks, dtype=torch.float32)
        tables = (self.cuts.order, self.cuts.cuts, site.numbers, site.places)
        sizes = {"ROWS": BLOCK, "K": k, "PDL": pdl, **site.sizes}
        _multiply[self._at_once(site.parts * chunks), site.parts * chunks](
            *(self.x, sums, *tables, m, self.cuts.most),
            **sizes | {"CHUNK": chunk, "DEPTH": min(_DEPTH, chunk)},
            num_warps=_WARPS,
            num_stages=_STAGES,
            launch_pdl=pdl,
        )
        _add[self._at_once(n // columns), n // columns](
            *(made, sums, *tables, site.part_of, m, self.cuts.most),
            **sizes | {"N": n, "COLUMNS": columns, "CHUNKS": chunks},
            num_warps=_ADD_WARPS,
            num_stages=_ADD_STAGES,
            launch_pdl=pdl,
        )

    def _at_once(self, each: int) -> int:
        """Blocks for which programs are launched, `each` for every one: they take others behind those."""
        return min(max(cdiv(self.x.shape[0], BLOCK), _PROGRAMS // each), self.cuts.most)


@kernel(do_not_specialize=["m", "most"])
def _multiply(
    x, sums, order, cuts, numbers, places, m, most,
    K: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Blocks' rows times a chunk of k of a part's lower factor: to `sums` [parts, m, chunks, ranks]."""
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    part, chunk = tl.program_id(1) % PARTS, tl.program_id(1) // PARTS
    first_block, at_once, count = tl.program_id(0), tl.num_programs(0), tl.load(cuts + 3 * most)
    row, there, rank, factors = _block(order, cuts, numbers, places, first_block, count, most, ROWS, STRIDE)
    after_previous(PDL)
    step, of_factor = tl.arange(0, DEPTH), tl.arange(0, GRAIN)
    for block in range(first_block, count, at_once):
        for first in range(0, rank, GRAIN):
            made = tl.zeros((ROWS, GRAIN), tl.float32)
            at = (part * rank + first + of_factor)[None, :] * K
            for begin in range(chunk * CHUNK, chunk * CHUNK + CHUNK, DEPTH):
                column = begin + step
                here = x + row[:, None] * K + column[None, :]
                read = tl.load(here, mask=there[:, None] & (column < K)[None, :], other=0.0)
                number = tl.load(factors + at + column[:, None], mask=(column < K)[:, None], other=0.0)
                made = tl.dot(read, number, made, input_precision="ieee")
            target = sums + ((part * m + row) * CHUNKS + chunk)[:, None] * RANKS
            tl.store(target + (first + of_factor)[None, :], made, mask=there[:, None])
        row, there, rank, factors = _block(
            order, cuts, numbers, places, block + at_once, count, most, ROWS, STRIDE
        )


@kernel(do_not_specialize=["m", "most"])
def _add(
    made, sums, order, cuts, numbers, places, part_of, m, most,
    K: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some columns of the product's rows, by blocks, plus what adapters add."""
    first_block, at_once, count = tl.program_id(0), tl.num_programs(0), tl.load(cuts + 3 * most)
    row, there, rank, factors = _block(order, cuts, numbers, places, first_block, count, most, ROWS, STRIDE)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part, ranks = tl.load(part_of + column), tl.arange(0, GRAIN)
    lowest, highest = tl.min(part), tl.max(part)
    after_previous(PDL)
    for block in range(first_block, count, at_once):
        if rank > 0:
            target = made + row[:, None] * N + column[None, :]
            y = tl.load(target, mask=there[:, None], other=0.0)
            added = tl.zeros((ROWS, COLUMNS), tl.float32)
            upper = factors + rank.to(tl.int64) * (PARTS * K) + column[None, :]
            for first in range(0, rank, GRAIN):
                number = tl.load(upper + (first + ranks)[:, None] * N)
                for turn in range(lowest, highest + 1):
                    lower = _added_up(sums + first, turn * m + row, there, CHUNKS, RANKS).to(number.dtype)
                    of_part = tl.where((part == turn)[None, :], number, 0.0).to(number.dtype)
                    added = tl.dot(lower, of_part, added, input_precision="ieee")
            tl.store(target, (y.to(tl.float32) + added).to(made.dtype.element_ty), mask=there[:, None])
        row, there, rank, factors = _block(
            order, cuts, numbers, places, block + at_once, count, most, ROWS, STRIDE
        )


@triton.jit
def _block(
    order, cuts, numbers, places, block, count, most, ROWS: tl.constexpr, STRIDE: tl.constexpr
):  # fmt: skip
    """A block's rows, and which of them there are; its adapter's rank, and where the factors begin."""
    real = block < count
    first = tl.load(cuts + most + block, mask=real, other=0)
    behind = tl.load(cuts + 2 * most + block, mask=real, other=0)
    entry = places + tl.load(cuts + block, mask=real, other=0).to(tl.int64) * STRIDE
    place = first + tl.arange(0, ROWS)
    row = tl.load(order + place, mask=place < behind, other=0).to(tl.int64)
    rank, begin = tl.load(entry + 1).to(tl.int32), tl.multiple_of(tl.load(entry), 16)
    return row, place < behind, rank, numbers + begin


@triton.jit
def _added_up(sums, row, there, CHUNKS: tl.constexpr, RANKS: tl.constexpr):
    """The sums over all chunks of GRAIN ranks, in their order: float32 [rows, GRAIN]."""
    total = tl.zeros((row.shape[0], GRAIN), tl.float32)
    place = sums + row[:, None] * (CHUNKS * RANKS) + tl.arange(0, GRAIN)[None, :]
    for chunk in tl.static_range(CHUNKS):
        total += tl.load(place + chunk * RANKS, mask=there[:, None], other=0.0)
    return total
