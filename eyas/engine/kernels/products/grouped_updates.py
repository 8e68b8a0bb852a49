"""What adapters add to products of few rows, in fast arithmetic: rows of one adapter are a group.

The first programs of a product's grid multiply its rows by the groups' lower factors, while the others read
the weight (`multiply_lowers`); these add the upper factors times that when their own sums are there
(`with_uppers`). So adapters need no kernel beside a step's own, and nothing waits for their factors but the
end of a product. Programs of a grid begin in the order of their numbers: those that are waited for run.

A row is multiplied by its own group's factors alone, in one order: its bits do not depend on other rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import (
    after_previous,
    call_ahead_where,
    fence_written,
    kernel,
)
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.products.updates import FACTOR_LINE, GRAIN, SiteNumbers

MOST = tl.constexpr(128)
"""Rows of a step whose adapters are groups."""
BLANK = tl.constexpr(-1)
"""The bits, as an int32, of a number that is not there yet; of none that is."""
_NARROWEST = 16  # rows that the matrix unit multiplies
_CHUNKS = (128, 256, 512)  # of k, of a program that multiplies by lower factors
_PROGRAMS = 40  # of those beside a product, where that is possible: so many SMs have nothing else to do
_TALL = 64  # rows, of which registers have a short chunk
_FACTORS = 16384  # numbers of lower factors that are multiplied at a time; beside tall rows half as many
_WIDEST = 32768  # those of one group
_UPPERS, _TALL_UPPERS = 128, 32  # ranks of groups that are multiplied at a time
_CALLED = 512  # ranks of groups that are called into L2 at a time
_EARLY = 64  # ranks at most of the first group, if it is read before the wait: beside the weight's steps
_NO_NUMBER = tl.constexpr(0x7FC00000)
_STAGES = tl.constexpr(2)
_ADD_COLUMNS = 64
_BLANKS, _FILLED = 16384, 4096  # numbers of a step's products for each row, as a rule; and of a program


class AdapterGroups:
    """The rows of a step that have one adapter, for all of its products.

    `table` int32 [1 + 128 + 128]: how many groups there are, the slot of each (0 behind the last, as far as
    the padded rows), and the group of each row, -1 where it has no adapter. Products that are launched after
    it may read it before they wait.
    """

    def __init__(self, slots: torch.Tensor) -> None:
        """`slots` int32 [m], m <= 128: of the adapter of each row, 0: none."""
        m, rows = slots.shape[0], _padded(slots.shape[0])
        self.table = slots.new_empty(1 + 2 * MOST.value)
        self._blanks, self._used = slots.new_empty(_BLANKS * rows), 0
        _group[_BLANKS * rows // _FILLED,](slots, self.table, self._blanks, m, ROWS=rows, FILLED=_FILLED)

    def blanks(self, *sizes: int) -> torch.Tensor:
        """So many numbers, int32, that are not there yet, and that no product of the step has had before."""
        count = cdiv(math.prod(sizes), _NARROWEST) * _NARROWEST
        if self._used + count > len(self._blanks):
            room = max(count, len(self._blanks))
            self._blanks, self._used = self._blanks.new_full((room,), BLANK.value), 0
        self._used += count
        return self._blanks[self._used - count :][: math.prod(sizes)].view(sizes)


def _padded(m: int) -> int:
    return max(_NARROWEST, power_of_2(m))


@dataclass(frozen=True)
class GroupCut:
    """How a product's updates are cut: compile-time parameters of kernels.

    `parts`, `stride`: as of `SiteNumbers.sizes`. `ranks`: of each group, padded. `k`, `n`: of the product.
    `rows`: padded ones. `chunk`: columns of k of each program that multiplies by a part's lower factors.
    `lowers`, `uppers`: groups whose factors are multiplied at a time.
    """

    parts: int
    ranks: int
    stride: int
    k: int
    n: int
    rows: int
    chunk: int
    lowers: int
    uppers: int

    @classmethod
    def of(cls, m: int, k: int, n: int, site: SiteNumbers) -> GroupCut:
        """The cut of m rows, where a product has some programs less than a GPU has SMs."""
        rows, ranks = _padded(m), _padded(site.ranks)
        tall, stride = rows >= _TALL, site.places.stride(0)
        chunks = [each for each in _CHUNKS[: 2 if tall else None] if each * ranks <= _WIDEST]
        fit = [each for each in chunks if site.parts * cdiv(k, each) <= _PROGRAMS]
        chunk = min(fit[0] if fit else chunks[-1], power_of_2(k))
        lowers = max(_FACTORS // (2 if tall else 1) // (chunk * ranks), 1)
        uppers = max((_TALL_UPPERS if tall else _UPPERS) // ranks, 1)
        return cls(site.parts, ranks, stride, k, n, rows, chunk, min(lowers, uppers), uppers)

    @property
    def early(self) -> int:
        """Groups whose upper factors are read before the wait, and multiplied alone: the first, or none."""
        return int(self.ranks <= _EARLY)

    @property
    def called(self) -> int:
        """Groups whose factors are called into L2 at a time: all, as a rule, since each time is a wait."""
        return max(min(self.rows, _CALLED // self.ranks), 1)

    @property
    def chunks(self) -> int:
        """Programs of each part."""
        return cdiv(self.k, self.chunk)

    @property
    def programs(self) -> int:
        """Those that multiply by lower factors."""
        return self.parts * self.chunks


@dataclass(frozen=True)
class GroupUpdates:
    """What adapters add to the product of rows x [m, k], m <= 128, which multiplies them itself."""

    x: torch.Tensor
    groups: AdapterGroups
    site: SiteNumbers

    def cut(self, n: int) -> GroupCut:
        """That of a product [n, k]."""
        m, k = self.x.shape
        return GroupCut.of(m, k, n, self.site)

    def tensors(self, cut: GroupCut) -> tuple[torch.Tensor, ...]:
        """For kernels: rows, groups, all factors, and room for rows times lower factors: float32 by chunks of
        k, and blank ones [parts, ranks, rows] for their sums; at last, how many chunks of each part are there
        beyond one.
        """
        site, groups = self.site, self.groups
        room = self.x.new_empty(cut.chunks, cut.parts, cut.ranks, cut.rows, dtype=torch.float32)
        lowers, counts = groups.blanks(cut.parts, cut.ranks, cut.rows), groups.blanks(cut.parts)
        return self.x, groups.table, site.numbers, site.places, site.part_of, room, lowers, counts


def add(made: torch.Tensor, updates: GroupUpdates, pdl: bool = False) -> None:
    """Adds the updates of a product [n, k] to its rows made [m, n], contiguous; in place, rounded once."""
    m, n = made.shape
    cut = updates.cut(n)
    tensors, options = updates.tensors(cut), {"num_warps": 4, "launch_pdl": pdl}
    _multiply[cut.programs,](tensors, m, cut, PDL=pdl, **options)
    columns = math.gcd(n, _ADD_COLUMNS)
    _add[n // columns,](made, tensors, m, cut, COLUMNS=columns, PDL=pdl, **options)


@kernel(do_not_specialize=["m"])
def _group(slots, table, blanks, m, ROWS: tl.constexpr, FILLED: tl.constexpr):
    """A group for each slot that rows have, in the order of their first rows; and numbers that are blank."""
    program = tl.program_id(0)
    tl.store(blanks + program * FILLED + tl.arange(0, FILLED), tl.full((FILLED,), BLANK, tl.int32))
    if program == 0:
        row = tl.arange(0, ROWS)
        own = tl.load(slots + row, mask=row < m, other=0)
        same = (own[:, None] == own[None, :]) & (own > 0)[:, None]
        first = tl.min(tl.where(same, row[None, :], ROWS), 1)  # of the rows that have this one's
        leads = first == row
        before = row[None, :] < tl.minimum(first, row)[:, None]
        group = tl.sum((leads[None, :] & before).to(tl.int32), 1)  # those that lead before its first row
        tl.store(table, tl.sum(leads.to(tl.int32), 0))
        led = leads[None, :] & (group[None, :] == row[:, None])
        tl.store(table + 1 + row, tl.sum(tl.where(led, own[None, :], 0), 1))
        tl.store(table + 1 + MOST + row, tl.where(own > 0, group, -1))


@kernel(do_not_specialize=["m"])
def _multiply(updates, m, cut: tl.constexpr, PDL: tl.constexpr):
    multiply_lowers(updates, tl.program_id(0), m, cut, PDL)


@kernel(do_not_specialize=["m"])
def _add(made, updates, m, cut: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    row, column = tl.arange(0, cut.rows), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.load(updates[4] + column)
    uppers = first_uppers(updates, column, cut, PDL)
    after_previous(PDL)
    place = made + row.to(tl.int64)[:, None] * cut.n + column[None, :]
    y = tl.load(place, mask=(row < m)[:, None], other=0.0)
    added = with_uppers(y.to(tl.float32), updates, uppers, m, column, part, cut, True)
    tl.store(place, added.to(y.dtype), mask=(row < m)[:, None])


@triton.jit
def multiply_lowers(updates, program, m, cut: tl.constexpr, PDL: tl.constexpr):
    """A chunk of k of all rows times a part's lower factors of each group. The last of a part's programs adds
    up its chunks, in their order, and signs for the part.
    """
    x, table, numbers, places, _, room, lowers, counts = updates
    part, chunk = program % cut.parts, program // cut.parts
    row, rank = tl.arange(0, cut.rows), tl.arange(0, cut.lowers * cut.ranks) % cut.ranks
    column = chunk * cut.chunk + tl.arange(0, cut.chunk)
    inside = column < cut.k
    count = tl.load(table)
    if PDL:
        LINES: tl.constexpr = max(cut.chunk // FACTOR_LINE, 1)
        line = tl.minimum(chunk * cut.chunk + tl.arange(0, LINES) * FACTOR_LINE, cut.k - 1)
        _call_lowers(updates, 0, cut.called, part, line, cut)
        for first in range(cut.called, count, cut.called):
            _call_lowers(updates, first, count, part, line, cut)
    after_previous(PDL)
    group_of = tl.load(table + 1 + MOST + row, mask=row < m, other=-1)
    rows = x + row.to(tl.int64)[None, :] * cut.k + column[:, None]
    read = tl.load(rows, mask=(row < m)[None, :] & inside[:, None], other=0.0)
    if PDL:
        fence_written()  # the product comes behind further barriers: see tests/unit/fenced.py
    place = room + (chunk * cut.parts + part) * (cut.ranks * cut.rows)
    place += rank[:, None] * cut.rows + row[None, :]
    for first in tl.range(0, count, cut.lowers, num_stages=_STAGES):
        ranks, begin = _factors(updates, first, count, cut.lowers, cut)
        here = numbers + (begin + (part * ranks + rank) * cut.k)[:, None] + column[None, :]
        number = tl.load(here, mask=(rank < ranks)[:, None] & inside[None, :], other=0.0)
        made = tl.dot(number, read, input_precision="ieee")
        tl.store(
            place,
            made,
            mask=group_of[None, :] == (first + tl.arange(0, cut.lowers * cut.ranks) // cut.ranks)[:, None],
        )
    _add_up(room, lowers, counts, part, (group_of >= 0)[None, :], cut)


@triton.jit
def _call_lowers(updates, first, count, part, line, cut: tl.constexpr):
    """Calls lines of k of a part's lower factors of `called` groups into L2."""
    rank = tl.arange(0, cut.called * cut.ranks) % cut.ranks
    ranks, begin = _factors(updates, first, count, cut.called, cut)
    at = updates[2] + (begin + (part * ranks + rank) * cut.k)[:, None] + line[None, :]
    call_ahead_where(at, tl.broadcast_to((rank < ranks)[:, None], at.shape))


@triton.jit
def _factors(updates, first, count, GROUPS: tl.constexpr, cut: tl.constexpr):
    """Of each of so many groups' padded ranks how many its adapter has (0 behind the last group), and where
    the adapter begins.
    """
    group = first + tl.arange(0, GROUPS * cut.ranks) // cut.ranks
    there = group < count
    slot = tl.load(updates[1] + 1 + group, mask=there, other=0)
    entry = updates[3] + slot.to(tl.int64) * cut.stride
    return tl.load(entry + 1, mask=slot > 0, other=0).to(tl.int32), tl.multiple_of(tl.load(entry), 16)


@triton.jit
def _add_up(room, lowers, counts, part, there, cut: tl.constexpr):
    """The sums over chunks, by the last program of a part."""
    tl.debug_barrier()  # one thread counts, for the stores of all
    if tl.atomic_add(counts + part, 1, sem="acq_rel") == cut.chunks - 1 + BLANK:
        row, turn = tl.arange(0, cut.rows)[None, :], tl.arange(0, GRAIN)[:, None]
        CHUNKS: tl.constexpr = cut.chunks
        for first in range(0, cut.ranks, GRAIN):
            place = (part * cut.ranks + first + turn) * cut.rows + row
            total = tl.full((GRAIN, cut.rows), 0.0, tl.float32)
            for chunk in tl.static_range(CHUNKS):
                apart = chunk * (cut.parts * cut.ranks * cut.rows)
                # Past L1, which knows nothing of other SMs' stores.
                total += tl.load(room + apart + place, mask=there, other=0.0, cache_modifier=".cg")
            bits = tl.where(total == total, total.to(tl.int32, bitcast=True), _NO_NUMBER)
            tl.store(lowers + place, bits)


@triton.jit
def call_uppers(updates, column, cut: tl.constexpr):
    """Calls the groups' upper factors in the lines of these columns [..] into L2, before the wait."""
    _call_uppers(updates, 0, cut.called, column, cut)
    for first in range(cut.called, tl.load(updates[1]), cut.called):
        _call_uppers(updates, first, tl.load(updates[1]), column, cut)


@triton.jit
def _call_uppers(updates, first, count, column, cut: tl.constexpr):
    rank = tl.arange(0, cut.called * cut.ranks)
    ranks, begin = _factors(updates, first, count, cut.called, cut)
    at = begin + ranks * (cut.parts * cut.k) + rank % cut.ranks * cut.n
    lines = updates[2] + at[:, None] + column[None, :]
    there = (rank % cut.ranks < ranks) & (first + rank // cut.ranks >= cut.early)  # others are read at once
    call_ahead_where(lines, tl.broadcast_to(there[:, None], lines.shape))


@triton.jit
def first_uppers(updates, column, cut: tl.constexpr, PDL: tl.constexpr):
    """The upper factors of the first group, before the wait, if they are read `early`; see `with_uppers`."""
    made = ()
    if cut.early > 0:
        made = _uppers(updates, 0, 1, column, 1, cut)
        if PDL:
            fence_written()
    return made


@triton.jit
def _uppers(updates, first, count, column, GROUPS: tl.constexpr, cut: tl.constexpr):
    """So many groups' upper factors in some columns: [groups * ranks, columns]."""
    rank = tl.arange(0, GROUPS * cut.ranks) % cut.ranks
    ranks, begin = _factors(updates, first, count, GROUPS, cut)
    here = updates[2] + (begin + ranks * (cut.parts * cut.k) + rank * cut.n)[:, None] + column[None, :]
    return tl.load(here, mask=(rank < ranks)[:, None], other=0.0)


@triton.jit
def with_uppers(y, updates, uppers, m, column, part, cut: tl.constexpr, MIXED: tl.constexpr):
    """y [rows, columns] plus what adapters add to columns of a product's rows.

    `part`: of the columns, one for all, or `MIXED`, of each. `uppers`: as of `first_uppers`. No rows, m: none
    is added to.
    """
    row, count = tl.arange(0, y.shape[0]), tl.load(updates[1])
    group_of = tl.load(updates[1] + 1 + MOST + row, mask=row < m, other=-1)
    if (count > 0) & (m > 0):
        if MIXED:
            PARTS: tl.constexpr = cut.parts
            for one in tl.static_range(PARTS):
                sums = _lower_sums(updates, one, group_of, cut)
                if cut.early > 0:
                    y = _plus(y, _of_part(uppers, part, one), sums, group_of, 0, 1)
                for first in range(cut.early, count, cut.uppers):
                    more = _uppers(updates, first, count, column, cut.uppers, cut)
                    y = _plus(y, _of_part(more, part, one), sums, group_of, first, cut.uppers)
        else:
            sums = _lower_sums(updates, part, group_of, cut)
            if cut.early > 0:
                y = _plus(y, uppers, sums, group_of, 0, 1)
            for first in tl.range(cut.early, count, cut.uppers, num_stages=_STAGES):
                more = _uppers(updates, first, count, column, cut.uppers, cut)
                y = _plus(y, more, sums, group_of, first, cut.uppers)
    return y


@triton.jit
def _of_part(uppers, part, one):
    """Upper factors of the columns of one part; of the others zeros."""
    return tl.where((part == one)[None, :], uppers, 0.0).to(uppers.dtype)


@triton.jit
def _plus(y, uppers, sums, group_of, first, GROUPS: tl.constexpr):
    """y plus the rows' sums [ranks, rows] times so many groups' upper factors [groups * ranks, columns]; the
    sums of rows of other groups count as zeros.
    """
    group = first + tl.arange(0, GROUPS)
    own = group_of[None, None, :] == group[:, None, None]
    of_groups = tl.where(own, sums[None, :, :], 0.0).to(sums.dtype)
    of_groups = tl.reshape(of_groups, (uppers.shape[0], y.shape[0]))
    return tl.trans(tl.dot(tl.trans(uppers), of_groups, tl.trans(y), input_precision="ieee"))


@triton.jit
def _lower_sums(updates, part, group_of, cut: tl.constexpr):
    """The rows times a part's lower factors of their own groups, once they are there: [ranks, rows]."""
    place = updates[6] + (part * cut.ranks + tl.arange(0, cut.ranks)[:, None]) * cut.rows
    place += tl.arange(0, group_of.shape[0])[None, :]
    own = (group_of >= 0)[None, :] & (tl.arange(0, cut.ranks) >= 0)[:, None]
    bits = tl.load(place, mask=own, other=0, volatile=True)
    while tl.min(tl.min((bits != BLANK).to(tl.int32), 1), 0) == 0:
        bits = tl.load(place, mask=own, other=0, volatile=True)
    return bits.to(tl.float32, bitcast=True).to(updates[2].dtype.element_ty)
