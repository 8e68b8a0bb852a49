"""The device side of `skinny`: three kernels, which differ in what they do with a finished tile.

All are one story: ask L2 for the first weights while the kernel before still runs, wait for it, read what is
small, stream the weights through shared memory by the tensor memory accelerator, multiply, and finish the
tile in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eyas.engine.kernels.launch.launching import call_ahead, kernel
from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kernels.products.activation import steepness
from eyas.engine.kernels.products.arrival import tell_end
from eyas.engine.kernels.products.grouped_updates import rows_are_there
from eyas.engine.kernels.products.halving import halving_sum, halving_total
from eyas.engine.kernels.products.packed_steps import (
    by_warps,
    finished,
    first_sums,
    scales_of,
    with_step,
)
from eyas.engine.kernels.products.rope_store import (
    pool_row,
    pool_scale,
    rotated,
    store_halves,
    store_scaled,
)
from eyas.engine.kernels.products.skinny_updates import (
    adapted_before,
    head_uppers_before,
    lines_of,
    lowers_behind,
    part_at,
    updated,
    updated_head,
    uppers_before,
    wait_for_added,
    with_added_beside,
)
from eyas.engine.kernels.products.updates import GRAIN, piece_of

SUMS_WIDTH = tl.constexpr(128)
"""Columns of every tensor of sums: the rows of the tallest product."""


_MOST_FACTORS = 128  # registers of a thread that adapters' upper factors have
_LEAST_SHARED = 16  # rows that the matrix unit has from shared memory
_SHARED, _SHARED_BESIDE = 228 << 10, 4 << 10  # of an SM; of a program, beside the steps in flight
_REGISTERS, _MOST_REGISTERS = 65536, 255  # of an SM; of a thread
_MOST_PARTS = 64  # of a row's sum that a thread's registers hold beside the product


@dataclass(frozen=True)
class ProductPlan:
    """A kernel's compile-time parameters: x [rows, k] (padded), weight [n, k], and how they are cut.

    A program owns `columns` weight rows and one of `split` parts of k, by steps of `depth`. `slots`: the most
    parts of sums (0: there are none). `ahead`: lines of 128 bytes, `line` elements each, that L2 is asked for
    in advance, of each of a program's weight rows. `gelu`: the gate's activation; else it is SiLU. `folds`:
    stretches of k that a program adds up side by side. `group`: columns of each sum of squares that is left.
    `exact`: no sum's order depends on how the product is cut. `form`: of a `PackedWeight`, whose `unit` words
    have `parts` numbers each, and are multiplied by `scaled` columns at a time; "" where there are none.
    `shares_k`: as of `ProductTile`. `added`: what adapters add is made beside the product. `updated`,
    `ranks`, `stride`: where the product makes it, as of `SiteNumbers.sizes`, the first of them `PARTS`.
    `mixed`: a tile's columns may be of several parts. `first`: the product is launched before the kernel that
    multiplies its rows by lower factors.
    """

    rows: int
    n: int
    k: int
    columns: int
    depth: int
    split: int
    warps: int
    stages: int
    slots: int
    eps: float
    pdl: bool
    ahead: int
    line: int
    gelu: bool = False
    folds: int = 1
    group: int = 0
    exact: bool = False
    form: str = ""
    unit: int = 0
    parts: int = 1
    scaled: int = 0
    shares_k: bool = False
    added: bool = False
    updated: int = 0
    ranks: int = 0
    stride: int = 0
    mixed: bool = False
    first: bool = False

    @property
    def half(self) -> int:
        """Weight rows of each of the two blocks that a tile may pair."""
        return self.columns // 2

    @property
    def steps(self) -> int:
        """Times that a row of packed numbers is read."""
        return cdiv(self.k, self.step)

    @property
    def step(self) -> int:
        """Columns of packed numbers that are read at a time, by each warp where they share k."""
        return self.parts * self.unit

    @property
    def together(self) -> int:
        """Steps that are done at a time."""
        return self.warps if self.shares_k else 1

    @property
    def chunk(self) -> int:
        """Elements of k per program; of packed numbers the last may have fewer."""
        if self.unit and not self.exact:
            return cdiv(self.steps, self.split * self.together) * self.together * self.step
        return self.k // self.split

    @property
    def stored(self) -> int:
        """Elements of a stored row of the weight."""
        return self.steps * self.unit if self.unit else self.k

    @property
    def stored_chunk(self) -> int:
        """Elements of it per program."""
        return self.chunk // self.parts

    @property
    def early_next(self) -> bool:
        """True if the next kernel may begin as soon as the rows are there."""
        return self.added or self.first

    @property
    def piece(self) -> int:
        """Columns of a row that are multiplied by lower factors at a time."""
        return piece_of(self.k)

    @property
    def programs(self) -> int:
        """All of them."""
        return self.n // self.columns * self.split

    @property
    def programs_of_sm(self) -> int:
        """Programs that an SM has room for at a time, at least 1 if it has it for one."""
        if self.unit:
            bytes_of_step = self.columns * self.unit * 4 + self.rows * self.step * 2
        else:
            bytes_of_step = (self.columns + self.rows) * self.depth * 2
        shared = self.stages * self.together * bytes_of_step + _SHARED_BESIDE
        return min(_SHARED // shared, _REGISTERS // (self.warps * 32 * _MOST_REGISTERS))

    @property
    def few(self) -> bool:
        """True if rows beside four bits are so few that the matrix unit has them from registers."""
        return self.form == "int4" and self.rows < _LEAST_SHARED and not self.exact

    @property
    def step_of_rows(self) -> int:
        """Columns of the rows that are read at a time beside packed numbers."""
        return self.step * self.together if self.few else self.scaled

    @property
    def row_a_thread(self) -> bool:
        """True if each thread has a row's parts of sums to itself: in their order they then cost little."""
        return self.exact and self.rows == SUMS_WIDTH.value and 0 < self.slots <= _MOST_PARTS

    @property
    def early(self) -> int:
        """Ranks of adapters' upper factors that wait in registers."""
        return 0 if self.split > 1 or self.mixed else self.late

    @property
    def late(self) -> int:
        """Ranks of theirs that are loaded at a time: as registers have room for."""
        registers = max(self.rows * self.columns // (64 * self.warps), 1)
        most = GRAIN.value if self.rows <= _LEAST_SHARED else GRAIN.value // 2
        return max(min(int(most), _MOST_FACTORS // registers), 1)

    @property
    def stretch(self) -> int:
        """Elements of k that one accumulator takes."""
        return self.chunk // self.folds

    @property
    def ahead_of_each(self) -> int:
        """Lines that are asked for in advance of each stretch."""
        return max(self.ahead // self.folds, 1)


@dataclass(frozen=True)
class FusedHeads:
    """Heads of `qkv_rope` and the pool's layout, in elements. `eps`: of the heads' norms."""

    q: int
    kv: int
    dim: int
    page_size: int
    page_stride: int
    eps: float = 0.0

    @property
    def half(self) -> int:
        """Elements of half a head, which rotate with those of its other half."""
        return self.dim // 2

    @property
    def token(self) -> int:
        """One slot's keys, or values."""
        return self.kv * self.dim


@kernel(do_not_specialize=["m", "parts"])
def linear_kernel(
    x, weight, weights, scales, beside, out, residual, bias, sums, sums_out, gain, gained, updates, partials,
    tickets, m, parts, plan: tl.constexpr,
):  # fmt: skip
    """out [m, n] = normalised x . weight^T, plus `bias` and `residual`; `sums_out`: the squares of its rows,
    by tile; `gained`: its rows times `gain`.
    """
    tile = tl.program_id(0)
    row = tl.arange(0, plan.rows)
    column = tile * plan.columns + tl.arange(0, plan.columns)
    scaled = tile * plan.columns + by_warps(plan)
    first_scales = _first_scales(scales, beside, scaled, plan)
    _call(weight, column, plan)
    part = part_at(updates, column, plan)
    uppers = uppers_before(updates, row, m, column, tile * plan.columns + lines_of(plan.columns), plan)
    adapted = adapted_before(updates, row, m, plan)
    _wait(updates, plan)
    lowers = lowers_behind(updates, uppers, row, part, plan)
    squares = _squares(sums, m, parts, plan)
    place = row[:, None] * plan.n + column[None, :]
    if residual is not None:
        added = tl.load(residual + place, mask=row[:, None] < m, other=0.0)
    if plan.unit > 0:
        offset = tile * plan.columns
        y = _packed_product(x, weights, scales, beside, scaled, 0, offset, first_scales, plan)
    else:
        y = _product(x, weights, plan)
    wait_for_added(plan)
    _tell_end(updates, plan)
    if plan.split > 1:
        shares = _shares(partials, tl.arange(0, plan.columns), plan)
        _leave(shares, y, m, plan)
        m = _finisher(tickets, m, plan)
        y = _total(shares, m, plan, plan.split)
    if out.dtype.element_ty != tl.float32:
        y = _rounded(y, x.dtype, plan)
    if plan.updated > 0:
        y = updated(y, updates, uppers, lowers, row, m, column, part, plan)
        y = _rounded(y, x.dtype, plan)
    y = with_added_beside(y, updates, adapted, row, m, column, plan)
    y *= _scale(squares, plan)[:, None]
    if bias is not None:
        y += tl.load(bias + column).to(tl.float32)[None, :]
    if residual is not None:
        y += added.to(tl.float32)
    y = y.to(out.dtype.element_ty)
    tl.store(out + place, y, mask=row[:, None] < m)
    if sums_out is not None:
        wide = y.to(tl.float32)
        if plan.exact:
            _leave_groups(sums_out, wide * wide, m, plan)
        else:
            tl.store(sums_out + tile * SUMS_WIDTH + row, tl.sum(wide * wide, 1), mask=row < m)
    if gained is not None:
        times = y.to(tl.float32) * tl.load(gain + column).to(tl.float32)[None, :]
        tl.store(gained + place, times.to(gained.dtype.element_ty), mask=row[:, None] < m)


@kernel(do_not_specialize=["m", "parts"])
def gated_kernel(
    x, weight, weights, scales, beside, out, sums, updates, partials, tickets, m, parts, plan: tl.constexpr,
):  # fmt: skip
    """out [m, n / 2] = act(gate) * up; the first half of the weight rows is the gate's."""
    row = tl.arange(0, plan.rows)
    first = tl.program_id(0) * plan.half
    pair, turn = tl.arange(0, plan.columns), by_warps(plan)
    column = first + pair % plan.half + pair // plan.half * (plan.n // 2)
    scaled = first + turn % plan.half + turn // plan.half * (plan.n // 2)
    first_scales = _first_scales(scales, beside, scaled, plan)
    _call(weight, column, plan)
    second = first + plan.n // 2
    of_gate, of_up = first + tl.arange(0, plan.half), second + tl.arange(0, plan.half)
    gate_uppers = uppers_before(updates, row, m, of_gate, first + lines_of(plan.half), plan)
    up_uppers = uppers_before(updates, row, m, of_up, second + lines_of(plan.half), plan)
    gate_part, up_part = part_at(updates, first, plan), part_at(updates, second, plan)
    adapted = adapted_before(updates, row, m, plan)
    _wait(updates, plan)
    gate_lowers = lowers_behind(updates, gate_uppers, row, gate_part, plan)
    up_lowers = lowers_behind(updates, up_uppers, row, up_part, plan)
    squares = _squares(sums, m, parts, plan)
    if plan.unit > 0:
        made = _packed_product(x, weights, scales, beside, scaled, 0, first, first_scales, plan)
        gate, up = _halves(made, plan)
    else:
        gate, up = _pair(x, weights, first, second, plan)
    wait_for_added(plan)
    _tell_end(updates, plan)
    if plan.split > 1:
        shares = _shares(partials, tl.arange(0, plan.half), plan)
        _leave(shares, gate, m, plan)
        _leave(shares + plan.half, up, m, plan)
        m = _finisher(tickets, m, plan)
        gate = _total(shares, m, plan, plan.split)
        up = _total(shares + plan.half, m, plan, plan.split)
    scale = _scale(squares, plan)[:, None]
    gate, up = _rounded(gate, x.dtype, plan), _rounded(up, x.dtype, plan)
    if plan.updated > 0:
        gate = updated(gate, updates, gate_uppers, gate_lowers, row, m, of_gate, gate_part, plan)
        up = updated(up, updates, up_uppers, up_lowers, row, m, of_up, up_part, plan)
        gate, up = _rounded(gate, x.dtype, plan), _rounded(up, x.dtype, plan)
    gate = with_added_beside(gate, updates, adapted, row, m, of_gate, plan)
    up = with_added_beside(up, updates, adapted, row, m, of_up, plan)
    gate *= scale
    y = gate * (up * scale) / (1.0 + tl.exp(-steepness(gate, plan.gelu)))
    place = row[:, None] * (plan.n // 2) + (first + tl.arange(0, plan.half))[None, :]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=row[:, None] < m)


@kernel(do_not_specialize=["m", "parts"], do_not_specialize_on_alignment=["positions", "kv_rows"])
def qkv_rope_kernel(
    x, weight, weights, scales, beside, bias, gains, updates, q_out, pool, cos, sin, positions, kv_rows, sums,
    partials, tickets, m, parts, heads: tl.constexpr, plan: tl.constexpr,
):  # fmt: skip
    """Queries go to `q_out`, keys and values to the pool's `kv_rows` (-1: nowhere); q and k are rotated."""
    # A tile lies within one head: some elements of its lower half, and their partners in its upper half.
    # Where heads are normalised, or stored with scales, it is all of them.
    row = tl.arange(0, plan.rows)
    first = tl.program_id(0) * plan.half
    head = first // heads.half
    offset = first % heads.half
    element = offset + tl.arange(0, plan.half)
    lower = head * heads.dim + offset
    pair, turn = tl.arange(0, plan.columns), by_warps(plan)
    column = lower + pair % plan.half + pair // plan.half * heads.half
    scaled = lower + turn % plan.half + turn // plan.half * heads.half
    first_scales = _first_scales(scales, beside, scaled, plan)
    _call(weight, column, plan)
    part = part_at(updates, lower, plan)
    HALF: tl.constexpr = plan.half
    low = tl.multiple_of(lower, HALF)
    uppers = head_uppers_before(updates, row, m, low, heads.half, plan)
    adapted = adapted_before(updates, row, m, plan)
    _wait(updates, plan)
    lowers = lowers_behind(updates, uppers[0], row, part, plan)
    position = tl.load(positions + row, mask=row < m, other=0).to(tl.int64)
    kv_row = tl.load(kv_rows + row, mask=row < m, other=-1).to(tl.int64)
    squares = _squares(sums, m, parts, plan)
    if plan.unit > 0:
        y = _packed_product(x, weights, scales, beside, scaled, head, offset, first_scales, plan)
    else:
        y = _head_product(x, weights, head, offset, plan)
    wait_for_added(plan)
    _tell_end(updates, plan)
    if plan.split > 1:
        shares = _shares(partials, tl.arange(0, plan.columns), plan)
        _leave(shares, y, m, plan)
    angle = position[:, None] * heads.half + element[None, :]
    turned = (row[:, None] < m) & (head < heads.q + heads.kv)
    c = tl.load(cos + angle, mask=turned, other=1.0)
    s = tl.load(sin + angle, mask=turned, other=0.0)
    if plan.split > 1:
        m = _finisher(tickets, m, plan)
        y = _total(shares, m, plan, plan.split)
    y = _rounded(y, x.dtype, plan)
    if plan.updated > 0:
        y = updated_head(y, updates, uppers, lowers, row, m, low, heads.half, part, plan)
        y = _rounded(y, x.dtype, plan)
    y = with_added_beside(y, updates, adapted, row, m, column, plan)
    y *= _scale(squares, plan)[:, None]
    if bias is not None:
        element_bias = tl.load(bias + column)
        y += element_bias.to(tl.float32)[None, :]
    if gains is not None and head < heads.q + heads.kv:
        gain = tl.load(gains + (head >= heads.q) * heads.dim + pair).to(tl.float32)
        squares_of_head = halving_sum(y * y) if plan.exact else tl.sum(y * y, 1)
        y *= tl.rsqrt(squares_of_head / heads.dim + heads.eps)[:, None] * gain[None, :]
    low, high = _halves(y, plan)
    low, high = rotated(low, high, c, s)
    _store_head(q_out, pool, low, high, row, kv_row, row < m, head, element, heads)


@triton.jit
def _store_head(q_out, pool, low, high, row, kv_row, real, head, element, heads: tl.constexpr):
    """Halves of a head [rows, elements] go to `q_out`, or to the pool's `kv_row` [rows] (-1: nowhere)."""
    queries = q_out + (row * heads.q + head)[:, None] * heads.dim + element[None, :]
    store_halves(queries, low, high, (real & (head < heads.q))[:, None], heads.half)
    which, kv_head = (head - heads.q) // heads.kv, (head - heads.q) % heads.kv  # keys or values
    slot = pool_row(pool, kv_row, heads.page_stride, heads.page_size, heads.token)
    slot += which * heads.page_size * heads.token + kv_head * heads.dim
    stored = real & (kv_row >= 0) & (head >= heads.q)
    scales = pool_scale(pool, kv_row, which, kv_head, heads.page_stride, heads.page_size, heads.kv, heads.dim)
    store_scaled(slot[:, None] + element[None, :], scales, low, high, stored[:, None], stored, heads.half)


@triton.jit
def _leave_groups(sums_out, squares, m, plan: tl.constexpr):
    """The sums of `squares` [rows, columns] over each group of columns, wherever a tile begins."""
    GROUPS: tl.constexpr = plan.columns // plan.group
    row = tl.arange(0, plan.rows)[:, None]
    group = tl.arange(0, GROUPS)[None, :]
    sums = halving_sum(tl.reshape(squares, (plan.rows * GROUPS, plan.group)))
    place = sums_out + (tl.program_id(0) * GROUPS + group) * SUMS_WIDTH + row
    tl.store(place, tl.reshape(sums, (plan.rows, GROUPS)), mask=row < m)


@triton.jit
def _squares(sums, m, parts, plan: tl.constexpr):
    """The parts of each row's sum of squares, [slots, rows], or (where a thread has a row) `slots` tensors
    [rows]; they are added up when the product is done.
    """
    row = tl.arange(0, plan.rows)
    if plan.slots == 0:
        squares = ()
    elif plan.row_a_thread:
        squares = ()
        SLOTS: tl.constexpr = plan.slots
        for part in tl.static_range(SLOTS):
            at = sums + part * SUMS_WIDTH + row
            one = tl.load(at, mask=(part < parts) & (row < m), other=0.0)
            squares = squares + (one,)  # type: ignore[assignment]
    else:
        part = tl.arange(0, plan.slots)[:, None]
        at = sums + part * SUMS_WIDTH + row[None, :]
        squares = tl.load(at, mask=(part < parts) & (row < m)[None, :], other=0.0)
    return squares


@triton.jit
def _rounded(y, dtype: tl.constexpr, plan: tl.constexpr):
    """A product before anything is done to it: the exact arithmetic rounds it, since cuBLAS does."""
    if plan.exact:
        y = y.to(dtype).to(tl.float32)
    return y


@triton.jit
def _scale(squares, plan: tl.constexpr):
    """The factor that normalises each row, [rows]."""
    if plan.slots == 0:
        scale = tl.full((plan.rows,), 1.0, tl.float32)
    elif plan.row_a_thread:
        SLOTS: tl.constexpr = plan.slots
        scale = tl.rsqrt(halving_total(squares, SLOTS) / plan.k + plan.eps)
    else:
        total = halving_sum(tl.trans(squares)) if plan.exact else tl.sum(squares, 0)
        scale = tl.rsqrt(total / plan.k + plan.eps)
    return scale


@triton.jit
def _call(weight, rows, plan: tl.constexpr):
    """Calls the first of these rows into L2: no kernel writes them."""
    if plan.pdl and plan.ahead > 0:
        start = rows.to(tl.int64) * plan.stored + tl.program_id(1) * plan.stored_chunk
        line = tl.arange(0, plan.ahead)
        if plan.folds == 1:
            ahead = line * plan.line
        else:
            ahead = line % plan.ahead_of_each * plan.line + line // plan.ahead_of_each * plan.stretch
        lines = start[:, None] + ahead[None, :]
        call_ahead(weight + lines)


@triton.jit
def _wait(updates, plan: tl.constexpr):
    """Waits for the memory of the kernel before; or of that before the one that runs beside. Where one runs
    beside, two kernels come behind, and the first of them may begin at once.
    """
    if plan.added:
        rows_are_there(updates, plan.pdl)
    elif plan.pdl:
        gdc_wait()
    if plan.pdl and plan.early_next:
        gdc_launch_dependents()


@triton.jit
def _tell_end(updates, plan: tl.constexpr):
    if plan.first and plan.pdl:
        tell_end(updates[6])


@triton.jit
def _product(x, weights, plan: tl.constexpr):
    """This program's share of x . weight^T, float32 [rows, columns]."""
    first = tl.program_id(0) * plan.columns
    start = tl.program_id(1) * plan.chunk
    acc = tl.full((plan.columns, plan.rows), 0.0, tl.float32)
    if plan.folds == 1:
        for at in range(start, start + plan.chunk, plan.depth):
            acc = tl.dot(weights.load([first, at]), x.load([0, at]).T, acc, input_precision="ieee")
    else:
        acc = _two_stretches(x, weights, first, acc, plan)
    if plan.pdl and not plan.early_next:
        gdc_launch_dependents()
    return tl.trans(acc)


@triton.jit
def _two_stretches(x, weights, first, zeros, plan: tl.constexpr):
    """Both halves of k, each added up as by a program of its own, then they as the last of two adds them."""
    tl.static_assert(plan.folds == 2 and plan.split == 1)
    a, b = zeros, zeros
    for at in range(0, plan.stretch, plan.depth):
        a = tl.dot(weights.load([first, at]), x.load([0, at]).T, a, input_precision="ieee")
        then = at + plan.stretch
        b = tl.dot(weights.load([first, then]), x.load([0, then]).T, b, input_precision="ieee")
    return a + b


@triton.jit
def _head_product(x, weights, head, offset, plan: tl.constexpr):
    """The product of `half` weight rows from `offset` on in the head's lower half, and of their partners; see
    `_product`.
    """
    start = tl.program_id(1) * plan.chunk
    acc = tl.full((plan.columns, plan.rows), 0.0, tl.float32)
    for at in range(start, start + plan.chunk, plan.depth):
        tile = weights.load([head, 0, offset, at]).reshape(plan.columns, plan.depth)
        acc = tl.dot(tile, x.load([0, at]).T, acc, input_precision="ieee")
    if plan.pdl and not plan.early_next:
        gdc_launch_dependents()
    return tl.trans(acc)


@triton.jit
def _pair(x, weights, first, second, plan: tl.constexpr):
    """The products of the two blocks of weight rows that begin there: float32 [rows, half] each; see
    `_product`.
    """
    start = tl.program_id(1) * plan.chunk
    a = tl.full((plan.half, plan.rows), 0.0, tl.float32)
    b = tl.full((plan.half, plan.rows), 0.0, tl.float32)
    for at in range(start, start + plan.chunk, plan.depth):
        rows = x.load([0, at]).T
        a = tl.dot(weights.load([first, at]), rows, a, input_precision="ieee")
        b = tl.dot(weights.load([second, at]), rows, b, input_precision="ieee")
    if plan.pdl and not plan.early_next:
        gdc_launch_dependents()
    return tl.trans(a), tl.trans(b)


@triton.jit
def _packed_product(x, words, scales, beside, column, head, offset, following, plan: tl.constexpr):
    """`_product` of a `PackedWeight`: rows `column`, by `by_warps`, whose words are the block at `head` and
    `offset`. `following`: the scales of the first step; those of each are loaded a step before.
    """
    TURN: tl.constexpr = plan.step * plan.together
    WORDS: tl.constexpr = plan.unit * plan.together
    end = (tl.program_id(1) + 1) * plan.chunk
    acc = first_sums(plan)
    if plan.pdl and not plan.few and not plan.early_next:
        gdc_launch_dependents()  # soon: what the next kernel asks for takes longer to come than this one
    for at in range(_first_step(plan), end, TURN):
        of_step = following
        following = scales_of(scales, beside, column, at + TURN, plan)
        step = words.load([head, 0, offset, at // plan.parts]).reshape(plan.columns, WORDS)
        acc = with_step(acc, x, step, of_step, beside, at, plan)
    if plan.pdl and plan.few and not plan.early_next:
        gdc_launch_dependents()  # not sooner: programs that wait would crowd some SMs
    return tl.trans(finished(acc, beside, column, plan))


@triton.jit
def _first_step(plan: tl.constexpr):
    """The beginning of a program's first step. A stretch of the exact arithmetic may begin within it, and end
    within the last: then scales are zero outside.
    """
    return tl.program_id(1) * plan.chunk // plan.step * plan.step


@triton.jit
def _first_scales(scales, beside, column, plan: tl.constexpr):
    """The result of `scales_of` for a program's first step; () where the weight has no scales."""
    made = ()
    if plan.unit > 0:
        made = scales_of(scales, beside, column, _first_step(plan), plan)
    return made


@triton.jit
def _halves(y, plan: tl.constexpr):
    """The first half of a tile's columns, and the other."""
    return tl.split(tl.permute(tl.reshape(y, (plan.rows, 2, plan.half)), (0, 2, 1)))


# --- of a tile whose k is split: every program leaves its share, the last to arrive adds them up ---------


@triton.jit
def _shares(partials, column, plan: tl.constexpr):
    """The place where the first program of this tile leaves its share of these columns, [rows, columns]."""
    row = tl.arange(0, plan.rows)[:, None]
    tile = tl.program_id(0) * plan.split * (plan.rows * plan.columns)
    return partials + tile + row * plan.columns + column[None, :]


@triton.jit
def _leave(shares, share, m, plan: tl.constexpr):
    row = tl.arange(0, plan.rows)[:, None]
    tl.store(shares + tl.program_id(1) * (plan.rows * plan.columns), share, mask=row < m)


@triton.jit
def _finisher(tickets, m, plan: tl.constexpr):
    """m for the last of a tile's programs to arrive, 0 for the others."""
    tl.debug_barrier()  # one thread takes the ticket, for the stores of all
    tile = tl.program_id(0)
    last = tl.atomic_add(tickets + tile, 1, sem="acq_rel") == plan.split - 1
    tl.store(tickets + tile, 0, mask=last)
    return tl.where(last, m, 0)


@triton.jit
def _total(shares, m, plan: tl.constexpr, split: tl.constexpr):
    """The sum of all shares, in order."""
    row = tl.arange(0, plan.rows)[:, None]
    total = tl.zeros(shares.shape, tl.float32)
    for other in tl.static_range(split):
        # Past L1, which knows nothing of other SMs' stores.
        place = shares + other * (plan.rows * plan.columns)
        total += tl.load(place, mask=row < m, other=0.0, cache_modifier=".cg")
    return total
