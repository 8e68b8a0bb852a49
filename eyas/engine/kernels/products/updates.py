"""What adapters add to products: for each row x, B (A x) with the factors of the row's own adapter.

Here rows are multiplied by the lower factors in a kernel before a product (`shrunk`); the end of the product
adds the upper factors times that (`with_ranks`), or `RowUpdates.add_to` does where it is a library's. Each
row reads its own adapter's factors and adds up in an order of its own, so its bits do not depend on what
other rows have. In fast arithmetic the rows of a step are put together by their adapters: few
(`grouped_updates`) and many (`block_updates`). Many rows that are no step's, such as choices of experts, are
multiplied by tiles here (`_shrink_tiles`, `_with_tiles`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import after_previous, call_ahead, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.products.arrival import as_bits, end_behind_product
from eyas.engine.kernels.products.halving import halving_sum

MANY = 128
"""From more rows on tiles of them share the factors that they read."""
FEW = 4
"""Rows of which a program multiplies one by a row of the lower factor, and no groups are made."""
_FOUR_WARPS = 8192  # columns of that at most
_EACH = 4  # rows of the lower factor of a program in exact arithmetic, and where rows are not grouped
_COLUMNS, _TILE, _DEPTH = 1024, 64, 64
_PIECE = 2048  # columns of a row that is multiplied by a row of the lower factor, at a time
FACTOR_LINE = tl.constexpr(64)
"""Elements of two bytes in a line of memory."""
_ADD_ROWS, _ADD_COLUMNS = 16, 128
GRAIN = tl.constexpr(16)
"""Ranks are multiples of it."""
_NO_SLOT = tl.constexpr(1 << 30)


@dataclass(frozen=True)
class SiteNumbers:
    """The factors of one product's updates [n, k] in all slots.

    `numbers` [words of all slots]: of a slot the lower factors [parts, rank, k], behind them the upper ones
    transposed, [rank, n]. `places` int64 [slots + 1, 2], of any stride: where those of a slot begin, a
    multiple of 16, and their rank, likewise (0: it adds nothing; so does slot 0). `part_of` int32 [n]: the
    part that reads which lower factor. `ranks`: the largest rank.
    """

    numbers: torch.Tensor
    places: torch.Tensor
    part_of: torch.Tensor
    parts: int
    ranks: int

    @property
    def sizes(self) -> dict[str, int]:
        """Compile-time parameters of kernels that read them; `STRIDE`: of places."""
        return {"PARTS": self.parts, "RANKS": self.ranks, "STRIDE": self.places.stride(0)}


@dataclass(frozen=True)
class RowUpdates:
    """Rows [m, k] times their lower factors, float32 [m, parts, ranks], as far as the rank goes; and the slot
    of each row, int32 [m]. `exact`: in exact arithmetic.
    """

    shrunk: torch.Tensor
    slots: torch.Tensor
    site: SiteNumbers
    k: int
    exact: bool

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """For kernels that add them."""
        return self.shrunk, self.slots, self.site.numbers, self.site.places, self.site.part_of

    def add_to(self, made: torch.Tensor, pdl: bool) -> None:
        """Adds the updates to the product's rows made [m, n], contiguous; in place, rounded once."""
        m, n = made.shape
        columns = math.gcd(n, _ADD_COLUMNS)  # so that none is beyond the last, and loads are wide
        tiles = m > MANY and not self.exact and columns >= GRAIN.value
        rows = _TILE if tiles else _ADD_ROWS
        tile = {"ROWS": rows, "COLUMNS": columns, "TILES": tiles, "PDL": pdl}
        sizes = {"K": self.k, "N": n} | self.site.sizes
        options = {"num_warps": 4, "launch_pdl": pdl, "enable_fp_fusion": not self.exact}
        _add[cdiv(m, rows), n // columns](made, *self.tensors, m, **sizes, **tile, **options)


def shrunk(
    x: torch.Tensor, slots: torch.Tensor, site: SiteNumbers, pdl: bool = False, exact: bool = False
) -> RowUpdates:
    """Rows x [m, k], contiguous, times the lower factors of their slots int32 [m]."""
    m, k = x.shape
    out = x.new_empty(m, site.parts, site.ranks, dtype=torch.float32)
    args, sizes = (x, out, slots, site.numbers, site.places), {"K": k} | site.sizes
    options = {"num_warps": 4, "launch_pdl": pdl, "enable_fp_fusion": not exact}
    if m > MANY and not exact:
        tile = {"ROWS": _TILE, "DEPTH": min(_DEPTH, power_of_2(k)), "PDL": pdl}
        _shrink_tiles[cdiv(m, _TILE), site.parts](*args, m, **sizes, **tile, **options)
    elif m <= FEW and not exact:
        shrink_few(x, out, slots, site, pdl)
    else:
        lines = power_of_2(cdiv(k, FACTOR_LINE.value))
        tile = {"EACH": _EACH, "COLUMNS": min(_COLUMNS, power_of_2(k)), "LINES": lines, "PDL": pdl}
        _shrink_rows[site.parts * (site.ranks // _EACH), m](*args, **sizes, **tile, **options)
    return RowUpdates(out, slots, site, k, exact)


def shrink_few(
    x: torch.Tensor,
    out: torch.Tensor,
    slots: torch.Tensor,
    site: SiteNumbers,
    pdl: bool,
    behind: tuple[torch.Tensor, int] | None = None,
) -> None:
    """Multiplies few rows. `behind`: of a product that was launched before, and reads `out` as int32 bits, a
    count of its programs that have made their sums (`arrival`), and how many it has.
    """
    m, k = x.shape
    ended, programs = behind or (None, 0)
    sizes = {"K": k} | site.sizes | {"PIECE": piece_of(k), "PDL": pdl}
    options = {"num_warps": 4 if k <= _FOUR_WARPS else 8, "launch_pdl": pdl}
    args = (x, out, slots, site.numbers, site.places, ended, programs)
    _shrink_few[site.parts * site.ranks, m](*args, **sizes, **options)


def piece_of(k: int) -> int:
    """Columns of a row that are multiplied at a time."""
    return min(_PIECE, power_of_2(k))


@kernel(do_not_specialize=["programs"])
def _shrink_few(
    x, out, slots, numbers, places, ended, programs,
    K: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, STRIDE: tl.constexpr,
    PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row times a row of a part's lower factor, which waits in registers until the row is there."""
    row, turn = tl.program_id(1), tl.program_id(0)
    part, first = turn % PARTS, turn // PARTS
    factor, there = row_of_lower((out, slots, numbers, places), row, part, first, K, STRIDE)
    PIECES: tl.constexpr = (K + PIECE - 1) // PIECE
    number = ()
    for piece in tl.static_range(PIECES):
        number = number + (piece_of_row(factor, there, piece, K, PIECE),)  # type: ignore[assignment]
    if ended is None:
        after_previous(PDL)
    read = ()
    for piece in tl.static_range(PIECES):
        own = piece_of_row(x + row.to(tl.int64) * K, there, piece, K, PIECE)
        read = read + (own,)  # type: ignore[assignment]
    sums = tl.zeros((PIECE,), tl.float32)
    for piece in tl.static_range(PIECES):
        sums += read[piece].to(tl.float32) * number[piece].to(tl.float32)
    place = out + (row * PARTS + part) * RANKS + first
    if ended is None:
        tl.store(place, tl.sum(sums, 0), mask=there)
    else:
        tl.store(place, as_bits(total_of(sums)), mask=there)
        end_behind_product(ended, programs, PDL)


@triton.jit
def row_of_lower(updates, row, part, first, K: tl.constexpr, STRIDE: tl.constexpr):
    """Where a row of a part's lower factor begins, and whether the adapter of the row of x has that rank."""
    slot = tl.load(updates[1] + row).to(tl.int64)
    entry = updates[3] + slot * STRIDE
    rank = tl.load(entry + 1)
    factor = updates[2] + tl.multiple_of(tl.load(entry), 16)
    return factor + (part * rank + first) * K, (slot > 0) & (first < rank)


@triton.jit
def piece_of_row(begin, there, piece, K: tl.constexpr, PIECE: tl.constexpr):
    """Some columns of a row of x, or of a factor; past L1, which may have what stood there before x."""
    column = piece * PIECE + tl.arange(0, PIECE)
    return tl.load(begin + column, mask=(column < K) & there, other=0.0, cache_modifier=".cg")


@triton.jit
def total_of(sums):
    """In an order that no layout decides."""
    return tl.sum(halving_sum(tl.reshape(sums, (1, sums.shape[0]))), 0)


@triton.jit
def _lower(numbers, places, slot, part, K: tl.constexpr, STRIDE: tl.constexpr):
    """The rank of a slot's adapter, and a part's lower factor."""
    entry = places + slot.to(tl.int64) * STRIDE
    rank = tl.load(entry + 1)
    return rank, numbers + tl.multiple_of(tl.load(entry), 16) + part * rank * K


@kernel
def _shrink_rows(
    x, out, slots, numbers, places,
    K: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, STRIDE: tl.constexpr,
    EACH: tl.constexpr, COLUMNS: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row times some rows of a part's lower factor."""
    row, turn = tl.program_id(1).to(tl.int64), tl.program_id(0)
    part, first = turn % PARTS, turn // PARTS * EACH
    slot = tl.load(slots + row).to(tl.int64)
    rank = tl.load(places + slot * STRIDE + 1)
    there = (slot > 0) & (first < rank)
    factor = numbers + tl.multiple_of(tl.load(places + slot * STRIDE), 16)
    at = (part * rank + first + tl.arange(0, EACH))[:, None] * K
    if PDL:
        if there:
            line = tl.minimum(tl.arange(0, LINES) * FACTOR_LINE, K - 1)
            call_ahead(factor + at + line[None, :])
    after_previous(PDL)
    if there:
        total = tl.zeros((EACH, COLUMNS), tl.float32)
        for begin in range(0, K, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            inside = column < K
            read = tl.load(x + row * K + column, mask=inside, other=0.0).to(tl.float32)
            number = tl.load(factor + at + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            total += number * read[None, :]
        place = out + (row * PARTS + part) * RANKS + first + tl.arange(0, EACH)
        tl.store(place, tl.sum(total, 1))


@kernel(do_not_specialize=["m"])
def _shrink_tiles(
    x, out, slots, numbers, places, m,
    K: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some rows times a part's lower factor of each slot that any of them has."""
    after_previous(PDL)
    row, part = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    own = tl.load(slots + row, mask=row < m, other=0)
    slot = tl.min(tl.where(own > 0, own, _NO_SLOT))
    step, of_factor = tl.arange(0, DEPTH), tl.arange(0, GRAIN)
    while slot < _NO_SLOT:
        rank, factor = _lower(numbers, places, slot, part, K, STRIDE)
        for first in range(0, rank, GRAIN):
            made = tl.zeros((ROWS, GRAIN), tl.float32)
            at = (first + of_factor)[None, :] * K
            for begin in range(0, K, DEPTH):
                column = begin + step
                here = x + row.to(tl.int64)[:, None] * K + column[None, :]
                read = tl.load(here, mask=(row < m)[:, None] & (column < K)[None, :], other=0.0)
                number = tl.load(factor + at + column[:, None], mask=(column < K)[:, None], other=0.0)
                made = tl.dot(read, number, made, input_precision="ieee")
            place = out + (row.to(tl.int64)[:, None] * PARTS + part) * RANKS + (first + of_factor)[None, :]
            tl.store(place, made, mask=(own == slot)[:, None])
        slot = tl.min(tl.where(own > slot, own, _NO_SLOT))


@kernel(do_not_specialize=["m"])
def _add(
    made, shrunk, slots, numbers, places, part_of, m,
    K: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (row < m)[:, None]
    place = made + row.to(tl.int64)[:, None] * N + column[None, :]
    part, updates = tl.load(part_of + column), (shrunk, slots, numbers, places)
    y = tl.load(place, mask=here, other=0.0).to(tl.float32)
    if TILES:
        y = _with_tiles(y, updates, row, m, column, part, K, N, PARTS, RANKS, STRIDE)
    else:
        y += updates_of(updates, row, m, column, part, K, N, PARTS, RANKS, STRIDE)
    tl.store(place, y.to(made.dtype.element_ty), mask=here)


@triton.jit
def _with_tiles(
    y, updates, row, m, column, part,
    K: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """y plus what `updates_of` has, by a product for each slot that any of the rows has, and each part of
    the columns: `part`, of each column.
    """
    shrunk, slots, numbers, places = updates
    ranks, own = tl.arange(0, GRAIN), tl.load(slots + row, mask=row < m, other=0)
    slot = tl.min(tl.where(own > 0, own, _NO_SLOT))
    while slot < _NO_SLOT:
        entry = places + slot.to(tl.int64) * STRIDE
        rank = tl.load(entry + 1)
        upper = numbers + tl.multiple_of(tl.load(entry), 16) + rank * (PARTS * K)
        for first in range(0, rank, GRAIN):
            number = tl.load(upper + (first + ranks)[:, None] * N + column[None, :])
            for turn in range(tl.min(part), tl.max(part) + 1):
                lower = shrunk + (row.to(tl.int64) * PARTS + turn)[:, None] * RANKS + (first + ranks)[None, :]
                times = tl.load(lower, mask=(own == slot)[:, None], other=0.0).to(number.dtype)
                of_part = tl.where((part == turn)[None, :], number, 0.0).to(number.dtype)
                y = tl.dot(times, of_part, y, input_precision="ieee")
        slot = tl.min(tl.where(own > slot, own, _NO_SLOT))
    return y


@triton.jit
def updates_of(
    updates, row, m, column, part,
    K: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """What adapters add to columns `column` of the product's `row`s, those below m: float32 [rows, columns].

    `part`: of each column, of `PARTS`.
    """
    shrunk, numbers = updates[0], updates[2]
    rank, upper = own_factors(updates, row, m, K, PARTS, STRIDE)
    lower = shrunk + (row.to(tl.int64)[:, None] * PARTS + part[None, :]) * RANKS
    sums = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for first in range(0, tl.max(rank), GRAIN):
        there = (first < rank)[:, None]
        for turn in tl.static_range(GRAIN):
            times = tl.load(lower + first + turn, mask=there, other=0.0)
            at = tl.multiple_of(upper, 16)[:, None] + (first + turn) * N + column[None, :]
            number = tl.load(numbers + at, mask=there, other=0.0)
            sums += times * number.to(tl.float32)
    return sums


# --- the same of a tile whose columns are of one part, whose numbers come before they are needed ----------


@triton.jit
def own_factors(updates, row, m, K: tl.constexpr, PARTS: tl.constexpr, STRIDE: tl.constexpr):
    """Of each row's own adapter the rank, int32, and where its upper factor begins, int64. No rank: it has
    none, or is not below m.
    """
    slots, places = updates[1], updates[3]
    slot = tl.load(slots + row, mask=row < m, other=0)
    entry = places + slot.to(tl.int64) * STRIDE
    rank = tl.where(slot > 0, tl.load(entry + 1), 0).to(tl.int32)
    return rank, tl.multiple_of(tl.load(entry), 16) + rank.to(tl.int64) * (PARTS * K)


@triton.jit
def uppers_of(updates, own, first, COUNT: tl.constexpr, column, N: tl.constexpr):
    """The numbers of so many ranks of the rows' upper factors: of each rank, [rows, columns]."""
    there, upper = (first < own[0])[:, None], tl.multiple_of(own[1], 16)[:, None]
    made = ()
    for turn in tl.static_range(COUNT):
        at = upper + (first + turn) * N + column[None, :]
        made = made + (tl.load(updates[2] + at, mask=there, other=0.0),)  # type: ignore[assignment]
    return made


@triton.jit
def call_own(updates, own, lines, N: tl.constexpr):
    """Calls the first ranks of the rows' upper factors into L2. `lines`: a column of each."""
    rank, upper = own
    if tl.max(rank) > 0:
        at = (upper[:, None] + tl.arange(0, GRAIN)[None, :] * N)[:, :, None] + lines[None, None, :]
        call_ahead(updates[2] + at)


@triton.jit
def lowers_of(updates, own, first, row, part, PARTS: tl.constexpr, RANKS: tl.constexpr):
    """The rows times GRAIN ranks of a part's lower factors: [rows, GRAIN]."""
    lower = updates[0] + (row.to(tl.int64)[:, None] * PARTS + part) * RANKS
    return tl.load(lower + first + tl.arange(0, GRAIN)[None, :], mask=(first < own[0])[:, None], other=0.0)


@triton.jit
def with_ranks(
    sums, updates, own, first, lowers, uppers, column,
    EARLY: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The sums [rows, columns] plus what GRAIN ranks add, in their order; of the first EARLY `uppers` are
    there, others are loaded by COUNT.
    """
    times = _columns_of(lowers)
    for turn in tl.static_range(EARLY):
        sums += times[turn] * uppers[turn].to(tl.float32)
    for begin in tl.static_range(EARLY, GRAIN, COUNT):
        more = uppers_of(updates, own, first + begin, COUNT, column, N)
        for turn in tl.static_range(COUNT):
            sums += times[begin + turn] * more[turn].to(tl.float32)
    return sums


@triton.jit
def _columns_of(lowers):
    """Each of the GRAIN columns, [rows, 1]. By halves, which threads have to themselves: to load each column
    would be to load it for every number that it multiplies.
    """
    ROWS: tl.constexpr = lowers.shape[0]
    made = (lowers,)
    for level in tl.static_range(4):
        halves = ()
        for place in tl.static_range(1 << level):
            pairs = tl.permute(tl.reshape(made[place], (ROWS, 2, GRAIN >> (level + 1))), (0, 2, 1))
            low, high = tl.split(pairs)
            halves = halves + (low, high)  # type: ignore[assignment]
        made = halves  # type: ignore[assignment]
    return made
