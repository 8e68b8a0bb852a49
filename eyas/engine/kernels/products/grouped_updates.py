"""What adapters add to products of 5 to 128 rows, in fast arithmetic: a kernel beside each product.

Its first programs multiply rows by lower factors, the others multiply what these make by upper factors.
Before the rows are there they call their factors into L2. The product is launched behind it and does not
wait for its end: it begins by a sign of this kernel that the rows are there (`rows_are_there`), and waits for
what is added when its own sums are made (`added_is_there`). So factors are read while the product reads its
weight, each once. Programs of a grid begin in the order of their numbers: those that are waited for run.

Rows of one adapter, up to 16, are a group. A row is multiplied by its own group's factors alone, in one
order, wherever it stands in its group: its bits do not depend on other rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eyas.engine.kernels.launch.launching import (
    call_ahead_where,
    fence_acquired,
    in_turn,
    kernel,
)
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.products.arrival import BLANK, as_bits
from eyas.engine.kernels.products.updates import FACTOR_LINE, GRAIN, SiteNumbers

MOST = tl.constexpr(128)
"""Rows of a step whose adapters are groups."""
_TOGETHER = tl.constexpr(16)  # rows of a group, which the matrix unit multiplies
_LINE = tl.constexpr(32)  # int32 in a line of memory
_SIGNS = tl.constexpr(16)  # lines with the sign that the rows are there: programs would crowd a single line
_PROGRAMS = 5000  # at most, as a rule: fewer would take one group after the other
_CHUNK = 512  # columns of k of a program that multiplies by lower factors
_CHUNKS = tl.constexpr(8)  # of a row, that are added up at a time
_COLUMNS = 512  # of a program that multiplies by upper factors
_PIECE = 64  # columns of either that are multiplied at a time: little shared memory, beside a product's
_WARPS, _REGISTERS = 4, 96  # of each thread, so that several programs share an SM with a product's
_LOCATED = 1024  # places of a program that finds them
_BLANKS, _FILLED = 40960, 4096  # numbers of a step's products for each row, and two more; and of a program


class AdapterGroups:
    """The rows of a step that have one adapter, for all of its products.

    `table` int32 [1 + 128 + 128 * 16]: how many groups there are, the slot of each (0 behind the last, as far
    as rows), and its rows, -1 for none. Products that are launched after it may read it before they wait.
    """

    def __init__(self, slots: torch.Tensor) -> None:
        """`slots` int32 [m], m <= 128: of the adapter of each row, 0: none."""
        m, self.slots = slots.shape[0], slots
        self.table = slots.new_empty(1 + (1 + _TOGETHER.value) * MOST.value)
        self._located: dict[int, torch.Tensor] = {}
        self._blanks, self._used = slots.new_empty(_BLANKS * (m + 2)), 0
        rows, grid = max(_TOGETHER.value, power_of_2(m)), (_BLANKS * (m + 2) // _FILLED,)
        _group[grid](slots, self.table, self._blanks, m, ROWS=rows, FILLED=_FILLED, num_warps=8)

    def located(self, places: torch.Tensor) -> torch.Tensor:
        """Of each group the places, int64 [m, 2], of a site that has these, [slots + 1, 2]: found at once for
        all sites of which they are a part.
        """
        width, first = places.stride(0), places.storage_offset()
        key = places.untyped_storage().data_ptr()
        if key not in self._located:
            every = places.as_strided((places.shape[0], width), (width, 1), 0)
            made = places.new_empty(len(self.slots), width)
            grid = (len(self.slots), cdiv(width, _LOCATED))
            _locate[grid](self.table, every, made, width, BLOCK=_LOCATED)
            self._located[key] = made
        return self._located[key][:, first : first + 2]

    def updates(self, x: torch.Tensor, site: SiteNumbers) -> GroupUpdates:
        """What adapters add to the product of the rows x [m, k], contiguous."""
        return GroupUpdates(x, self, site)

    def blanks(self, *sizes: int) -> torch.Tensor:
        """So many numbers, int32, that are not there yet, and that no product of the step has had before."""
        count = cdiv(math.prod(sizes), _LINE.value) * _LINE.value
        if self._used + count > len(self._blanks):
            room = max(count, len(self._blanks))
            self._blanks, self._used = self._blanks.new_full((room,), BLANK.value), 0
        self._used += count
        return self._blanks[self._used - count :][: math.prod(sizes)].view(sizes)


@dataclass(frozen=True)
class UpdateCut:
    """How a product's updates are cut: compile-time parameters of kernels.

    `parts`, `ranks`, `stride`: as of `SiteNumbers.sizes`. `k`, `n`: of the product.
    `chunk`: columns of k of each program that multiplies by lower factors. `columns`: of n, of the others.
    `piece`: those of both that are multiplied at a time. `adds`: to what is there.
    """

    parts: int
    ranks: int
    stride: int
    k: int
    n: int
    chunk: int
    columns: int
    piece: int
    adds: bool

    @classmethod
    def of(cls, k: int, site: SiteNumbers, *, adds: bool) -> UpdateCut:
        """The cut of a product [n, k], for any number of rows."""
        n = site.part_of.shape[0]
        chunk = min(_CHUNK, power_of_2(k))
        columns = min(_COLUMNS, power_of_2(n))
        piece = max(min(_PIECE, chunk, columns), _TOGETHER.value)
        return cls(site.parts, site.ranks, site.places.stride(0), k, n, chunk, columns, piece, adds)

    @property
    def chunks(self) -> int:
        """Programs for each part of a group, and GRAIN of its ranks."""
        return cdiv(self.k, self.chunk)

    @property
    def lowers(self) -> int:
        """Programs for each group that multiply by lower factors."""
        return self.parts * cdiv(self.ranks, GRAIN.value) * self.chunks

    @property
    def uppers(self) -> int:
        """Programs for each group that multiply by upper factors."""
        return cdiv(self.n, self.columns)

    @property
    def at_once(self) -> int:
        """Groups for which programs are launched, at most: each takes one of so many, and then the next."""
        each = self.lowers + self.uppers
        return max(power_of_2(_PROGRAMS // each + 1) // 2, 1)


@dataclass(frozen=True)
class GroupUpdates:
    """What adapters add to the product of rows x [m, k], m <= 128."""

    x: torch.Tensor
    groups: AdapterGroups
    site: SiteNumbers

    def beside(self, pdl: bool) -> tuple[torch.Tensor, ...]:
        """Begins to make what is added to a product [n, k] that is launched next, and is given these: float32
        [m, n], of rows that have an adapter; the slots of rows; and the signs that rows are there.
        """
        out = self.x.new_empty(self.x.shape[0], self.site.part_of.shape[0], dtype=torch.float32)
        signs = self.groups.blanks(_SIGNS.value * _LINE.value)
        self._launch(out, signs, pdl, adds=False)
        return out, self.groups.slots, signs

    def add_to(self, made: torch.Tensor, pdl: bool) -> None:
        """Adds it to the product's rows made [m, n], contiguous; in place, rounded once."""
        self._launch(made, None, pdl, adds=True)

    def _launch(self, out: torch.Tensor, signs: torch.Tensor | None, pdl: bool, *, adds: bool) -> None:
        site, (m, k) = self.site, self.x.shape
        cut = UpdateCut.of(k, site, adds=adds)
        sums = self.groups.blanks(site.parts, m, cut.chunks, site.ranks)
        located = self.groups.located(site.places)
        tensors = (self.x, self.groups.table, site.numbers, located, site.part_of, sums)
        at_once = min(power_of_2(m), cut.at_once)
        grid = (at_once * (cut.lowers + cut.uppers),)
        options = {"num_warps": _WARPS, "num_stages": 1, "maxnreg": _REGISTERS, "launch_pdl": pdl}
        _update[grid](tensors, out, signs, m, at_once, cut, PDL=pdl, **options)


@kernel(do_not_specialize=["m"])
def _group(slots, table, blanks, m, ROWS: tl.constexpr, FILLED: tl.constexpr):
    """Groups for each slot that rows have, in the order of their first rows; and numbers that are blank."""
    program = tl.program_id(0)
    tl.store(blanks + program * FILLED + tl.arange(0, FILLED), tl.full((FILLED,), BLANK, tl.int32))
    if program == 0:
        row = tl.arange(0, ROWS)
        own = tl.load(slots + row, mask=row < m, other=0)
        same = ((own[:, None] == own[None, :]) & (own > 0)[:, None]).to(tl.int32)
        before = (row[None, :] < row[:, None]).to(tl.int32)
        turn = tl.sum(same * before, 1)  # of the rows of its slot, how many come before
        leads = ((own > 0) & (turn % _TOGETHER == 0)).to(tl.int32)
        number = tl.sum(leads[None, :] * before, 1)  # of its group, of a row that leads one
        of_leader = same * (turn[None, :] == (turn // _TOGETHER * _TOGETHER)[:, None]).to(tl.int32)
        group = tl.sum(of_leader * number[None, :], 1)
        tl.store(table + 1 + row, tl.full((ROWS,), 0, tl.int32))
        rows = table + 1 + MOST
        tl.store(rows + tl.arange(0, ROWS * _TOGETHER), tl.full((ROWS * _TOGETHER,), -1, tl.int32))
        tl.debug_barrier()  # what other threads write is to stay
        tl.store(table, tl.sum(leads, 0))
        tl.store(table + 1 + group, own, mask=leads > 0)
        tl.store(rows + group * _TOGETHER + turn % _TOGETHER, row, mask=own > 0)


@kernel
def _locate(table, every, located, width, BLOCK: tl.constexpr):
    """Some of the places of a group's slot; of no group zeros."""
    group, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(table + 1 + group).to(tl.int64)
    read = tl.load(every + slot * width + place, mask=(place < width) & (slot > 0), other=0)
    tl.store(located + group * width + place, read, mask=place < width)


@kernel(do_not_specialize=["m", "at_once"])
def _update(updates, out, signs, m, at_once, cut: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < at_once * cut.lowers:
        _multiply_lowers(updates, signs, program // at_once, program % at_once, m, at_once, cut, PDL)
    else:
        upper = program - at_once * cut.lowers
        _multiply_uppers(updates, out, upper // at_once, upper % at_once, m, at_once, cut, PDL)


@triton.jit
def _multiply_lowers(updates, signs, turn, first, m, at_once, cut: tl.constexpr, PDL: tl.constexpr):
    """A chunk of k of each group's rows times GRAIN ranks of a part's lower factor."""
    x, table, _, _, _, sums = updates
    chunk, block = turn % cut.chunks, turn // cut.chunks
    part, ranks = block % cut.parts, block // cut.parts * GRAIN
    column, count = chunk * cut.chunk + tl.arange(0, cut.piece), tl.load(table)
    row, there = _rows(table, first, count)
    lower = _lower(updates, first, count, part, ranks, column, cut)
    if PDL:
        LINES: tl.constexpr = max(cut.chunk // FACTOR_LINE, 1)
        line = chunk * cut.chunk + tl.arange(0, LINES) * FACTOR_LINE
        for group in range(first + at_once, count, at_once):
            rank, numbers = _place(updates, group, count, cut)
            own = ranks + tl.arange(0, GRAIN)
            at = (part * rank + own).to(tl.int64)[:, None] * cut.k + line[None, :]
            call_ahead_where(numbers + at, (own < rank)[:, None] & (line < cut.k)[None, :])
    _wait_if((first < count) | (turn + first == 0), PDL)
    if signs is not None:
        if turn + first == 0:
            sign = signs + tl.arange(0, _SIGNS) * _LINE
            tl.atomic_xchg(sign, tl.full((_SIGNS,), 0, tl.int32), sem="release")
    for group in range(first, count, at_once):
        read = _pieces_of_rows(x, row, there, column, cut)
        made = tl.full((_TOGETHER, GRAIN), 0.0, tl.float32)
        PIECES: tl.constexpr = cut.chunk // cut.piece
        for piece in tl.static_range(PIECES):
            of_factor = tl.trans(in_turn(lower[piece]))
            made = tl.dot(in_turn(read[piece]), of_factor, made, input_precision="ieee")
        place = sums + ((part * m + row) * cut.chunks + chunk) * cut.ranks + ranks
        tl.store(place[:, None] + tl.arange(0, GRAIN)[None, :], as_bits(made), mask=there[:, None])
        row, there = _rows(table, group + at_once, count)
        lower = _lower(updates, group + at_once, count, part, ranks, column, cut)


@triton.jit
def _multiply_uppers(updates, out, turn, first, m, at_once, cut: tl.constexpr, PDL: tl.constexpr):
    """What lower factors have made of each group's rows times some columns of its upper factor."""
    table = updates[1]
    column, count = turn * cut.columns + tl.arange(0, cut.piece), tl.load(table)
    row, there = _rows(table, first, count)
    upper = _upper(updates, first, count, column, cut)
    lowest, highest = _parts_of(updates, turn, cut)
    if PDL:
        LINES: tl.constexpr = max(cut.columns // FACTOR_LINE, 1)
        line = turn * cut.columns + tl.arange(0, LINES) * FACTOR_LINE
        for group in range(first + at_once, count, at_once):
            rank, numbers = _place(updates, group, count, cut)
            own = tl.arange(0, GRAIN)
            at = rank.to(tl.int64) * (cut.parts * cut.k) + own.to(tl.int64)[:, None] * cut.n + line[None, :]
            call_ahead_where(numbers + at, (own < rank)[:, None] & (line < cut.n)[None, :])
    _wait_if(first < count, PDL)
    for group in range(first, count, at_once):
        rank = _place(updates, group, count, cut)[0]
        for part in range(lowest, highest + 1):
            lowers = _lower_sums(updates, row, there & (rank > 0), part, 0, m, cut)
            PIECES: tl.constexpr = cut.columns // cut.piece
            for piece in tl.static_range(PIECES):
                own = column + piece * cut.piece
                added = tl.full((_TOGETHER, cut.piece), 0.0, tl.float32)
                added = tl.dot(lowers, in_turn(upper[piece]), added, input_precision="ieee")
                if cut.ranks > GRAIN:
                    for ranks in range(GRAIN, rank, GRAIN):
                        more = _lower_sums(updates, row, there, part, ranks, m, cut)
                        numbers = _piece_of_upper(updates, group, count, ranks, own, cut)
                        added = tl.dot(more, numbers, added, input_precision="ieee")
                place = out + row.to(tl.int64)[:, None] * cut.n + own[None, :]
                mask = there[:, None] & _of_part(updates, own, part, lowest < highest, cut)[None, :]
                if cut.adds:
                    added += tl.load(place, mask=mask, other=0.0).to(tl.float32)
                tl.store(place, added.to(out.dtype.element_ty), mask=mask)
        row, there = _rows(table, group + at_once, count)
        upper = _upper(updates, group + at_once, count, column, cut)


@triton.jit
def _wait_if(busy, PDL: tl.constexpr):
    """Waits for the kernel before, unless a program has nothing to do: others wait in its place."""
    if PDL:
        if busy:
            gdc_wait()


@triton.jit
def _rows(table, group, count):
    """A group's rows [16], and which of them there are; 0 for others, and where there is no such group."""
    turn = tl.arange(0, _TOGETHER)
    row = tl.load(table + 1 + MOST + group * _TOGETHER + turn, mask=(turn >= 0) & (group < count), other=-1)
    return tl.maximum(row, 0), row >= 0


@triton.jit
def _place(updates, group, count, cut: tl.constexpr):
    """The rank of a group's adapter, and where its factors begin; no ranks if there is no such group."""
    entry, there = updates[3] + group * cut.stride, group < count
    rank = tl.load(entry + 1, mask=there, other=0).to(tl.int32)
    return rank, updates[2] + tl.multiple_of(tl.load(entry, mask=there, other=0), 16)


@triton.jit
def _pieces_of_rows(x, row, there, column, cut: tl.constexpr):
    """Rows of x in a chunk of k, whose first piece has these columns: of each piece, [16, columns]."""
    PIECES: tl.constexpr = cut.chunk // cut.piece
    made = ()
    for piece in tl.static_range(PIECES):
        own = column + piece * cut.piece
        here = x + row.to(tl.int64)[:, None] * cut.k + own[None, :]
        read = tl.load(here, mask=there[:, None] & (own < cut.k)[None, :], other=0.0)
        made = made + (read,)  # type: ignore[assignment]
    return made


@triton.jit
def _lower(updates, group, count, part, ranks, column, cut: tl.constexpr):
    """GRAIN ranks of a part's lower factor of a group in a chunk: of each piece, [GRAIN, columns]."""
    PIECES: tl.constexpr = cut.chunk // cut.piece
    rank, numbers = _place(updates, group, count, cut)
    turn = ranks + tl.arange(0, GRAIN)
    here, made = numbers + (part * rank + turn).to(tl.int64)[:, None] * cut.k, ()
    for piece in tl.static_range(PIECES):
        own = column + piece * cut.piece
        mask = (turn < rank)[:, None] & (own < cut.k)[None, :]
        made = made + (tl.load(here + own[None, :], mask=mask, other=0.0),)  # type: ignore[assignment]
    return made


@triton.jit
def _upper(updates, group, count, column, cut: tl.constexpr):
    """The first ranks of a group's upper factor in a program's columns: of each piece, [GRAIN, columns]."""
    PIECES: tl.constexpr = cut.columns // cut.piece
    made = ()
    for piece in tl.static_range(PIECES):
        read = _piece_of_upper(updates, group, count, 0, column + piece * cut.piece, cut)
        made = made + (read,)  # type: ignore[assignment]
    return made


@triton.jit
def _piece_of_upper(updates, group, count, ranks, column, cut: tl.constexpr):
    rank, numbers = _place(updates, group, count, cut)
    turn = ranks + tl.arange(0, GRAIN)
    at = rank.to(tl.int64) * (cut.parts * cut.k) + turn.to(tl.int64)[:, None] * cut.n + column[None, :]
    return tl.load(numbers + at, mask=(turn < rank)[:, None] & (column < cut.n)[None, :], other=0.0)


@triton.jit
def _parts_of(updates, turn, cut: tl.constexpr):
    """The first and the last part that a program's columns have."""
    lowest, highest = 0, 0
    if cut.parts > 1:
        column = turn * cut.columns + tl.arange(0, cut.columns)
        part = tl.load(updates[4] + tl.minimum(column, cut.n - 1))
        lowest, highest = tl.min(part, 0), tl.max(part, 0)
    return lowest, highest


@triton.jit
def _of_part(updates, column, part, mixed, cut: tl.constexpr):
    """Which of some columns there are, and are of a part; `mixed`: a program's may be of several."""
    there = column < cut.n
    if cut.parts > 1:
        there &= tl.load(updates[4] + column, mask=there & mixed, other=part) == part
    return there


@triton.jit
def _lower_sums(updates, row, there, part, ranks, m, cut: tl.constexpr):
    """The rows times GRAIN ranks of a part's lower factors, once all chunks of k are there: [16, GRAIN]."""
    turn, rank = tl.arange(0, _CHUNKS), tl.arange(0, GRAIN)
    first = updates[5] + (part * m + row) * (cut.chunks * cut.ranks) + ranks
    total = tl.full((_TOGETHER, GRAIN), 0.0, tl.float32)
    for begin in range(0, cut.chunks, _CHUNKS):
        chunk = begin + turn
        place = (first[:, None] + chunk[None, :] * cut.ranks)[:, :, None] + rank[None, None, :]
        mask = (there[:, None] & (chunk < cut.chunks)[None, :])[:, :, None] & (rank >= 0)[None, None, :]
        bits = tl.load(place, mask=mask, other=0, volatile=True)
        while tl.min(tl.reshape(bits != BLANK, (_TOGETHER * _CHUNKS * GRAIN,)).to(tl.int32), 0) == 0:
            bits = tl.load(place, mask=mask, other=0, volatile=True)
        total += tl.sum(bits.to(tl.float32, bitcast=True), 1)
    return total.to(updates[2].dtype.element_ty)


@triton.jit
def adapted_rows(updates, row, m):
    """Which of the product's rows have an adapter; before the wait."""
    return tl.load(updates[1] + row, mask=row < m, other=0) > 0


@triton.jit
def rows_are_there(updates, PDL: tl.constexpr):
    """In the product behind: waits until its rows are there, since the kernel before it still runs."""
    if PDL:
        sign = updates[2] + tl.program_id(0) % _SIGNS * _LINE
        bits = tl.load(sign, volatile=True)
        while bits == BLANK:
            bits = tl.load(sign, volatile=True)
        fence_acquired()


@triton.jit
def added_is_there(PDL: tl.constexpr):
    """Waits for what adapters add, and for all kernels before the product."""
    if PDL:
        gdc_wait()


@triton.jit
def with_added(y, updates, adapted, row, m, column, N: tl.constexpr):
    """y [rows, columns] plus what adapters add to the rows that are `adapted`, below m."""
    place = updates[0] + row.to(tl.int64)[:, None] * N + column[None, :]
    there = (adapted & (row < m))[:, None] & (column >= 0)[None, :]
    return y + tl.load(place, mask=there, other=0.0)
