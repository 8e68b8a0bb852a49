"""The device side of `skinny`: three kernels, which differ in what they do with a finished tile.

All are one story: ask L2 for the first weights while the kernel before still runs, wait for it, read what is
small, multiply, and finish the tile in float32. They know a `Plan` and addresses, and check nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SUMS_WIDTH = tl.constexpr(64)
"""Columns of every tensor of sums: the rows of the tallest product."""


@dataclass(frozen=True)
class Plan:
    """What a kernel knows when it is compiled: x [rows, k] (padded), weight [n, k], and how they are cut.

    A program owns `columns` weight rows and one of `split` parts of k, by steps of `depth`. `line` elements
    are 128 bytes. `ahead`: how far L2 is asked in advance (0: not at all). `early`: what is left of its part
    of k when the next kernel may start. `slots`: the most parts of sums (0: there are none).
    """

    rows: int
    n: int
    k: int
    columns: int
    depth: int
    split: int
    warps: int
    stages: int
    ahead: int
    early: int
    line: int
    slots: int
    eps: float
    pdl: bool

    @property
    def half(self) -> int:
        return self.columns // 2

    @property
    def chunk(self) -> int:
        return self.k // self.split

    @property
    def early_in_loop(self) -> bool:
        return self.pdl and 0 < self.early < self.chunk

    @property
    def early_step(self) -> int:
        """The step at which the next kernel may start."""
        return (self.chunk - self.early) // self.depth * self.depth

    @property
    def ahead_lines(self) -> int:
        return self.ahead // self.line

    @property
    def depth_lines(self) -> int:
        return self.depth // self.line


@dataclass(frozen=True)
class Heads:
    """Heads of `qkv_rope` and the pool's layout, in elements."""

    q: int
    kv: int
    dim: int
    page_size: int
    page_stride: int

    @property
    def half(self) -> int:
        return self.dim // 2

    @property
    def token(self) -> int:
        """One slot's keys, or values."""
        return self.kv * self.dim


@triton.jit(do_not_specialize=["m", "parts"])
def linear_kernel(x, weight, out, residual, sums, sums_out, partials, tickets, m, parts, plan: tl.constexpr):
    tile = tl.program_id(0)
    row = tl.arange(0, plan.rows)
    column = tile * plan.columns + tl.arange(0, plan.columns)
    weights = _weight_rows(weight, column, plan)
    _begin(weights, plan)
    squares = _squares(sums, m, parts, plan)
    place = row[:, None] * plan.n + column[None, :]
    if residual is not None:
        added = tl.load(residual + place, mask=row[:, None] < m, other=0.0)
    y, m = _product(x, weights, m, partials, tickets, plan)
    y = _normed(y, squares, plan)
    if residual is not None:
        y += added.to(tl.float32)
    y = y.to(out.dtype.element_ty)
    tl.store(out + place, y, mask=row[:, None] < m)
    if sums_out is not None:
        wide = y.to(tl.float32)
        tl.store(sums_out + tile * SUMS_WIDTH + row, tl.sum(wide * wide, 1), mask=row < m)


@triton.jit(do_not_specialize=["m", "parts"])
def gated_kernel(x, weight, out, sums, partials, tickets, m, parts, plan: tl.constexpr):
    # Gates and ups alternate in the tile, so that one split of the accumulator pairs them.
    row = tl.arange(0, plan.rows)
    first = tl.program_id(0) * plan.half
    pair = tl.arange(0, plan.columns)
    weights = _weight_rows(weight, first + pair // 2 + (pair % 2) * (plan.n // 2), plan)
    _begin(weights, plan)
    squares = _squares(sums, m, parts, plan)
    y, m = _product(x, weights, m, partials, tickets, plan)
    y = _normed(y, squares, plan)
    gate, up = tl.split(tl.reshape(y, (plan.rows, plan.half, 2)))
    y = gate * up / (1.0 + tl.exp(-gate))
    place = row[:, None] * (plan.n // 2) + (first + tl.arange(0, plan.half))[None, :]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=row[:, None] < m)


@triton.jit(do_not_specialize=["m", "parts"], do_not_specialize_on_alignment=["positions", "kv_rows"])
def qkv_rope_kernel(
    x, weight, q_out, pool, cos, sin, positions, kv_rows, sums, partials, tickets, m, parts,
    heads: tl.constexpr, plan: tl.constexpr,
):  # fmt: skip
    # A tile lies within one head; elements i and i + dim / 2 alternate in it.
    row = tl.arange(0, plan.rows)
    first = tl.program_id(0) * plan.half
    head = first // heads.half
    element = first % heads.half + tl.arange(0, plan.half)
    pair = tl.arange(0, plan.columns)
    weight_row = head * heads.dim + first % heads.half + pair // 2 + (pair % 2) * heads.half
    weights = _weight_rows(weight, weight_row, plan)
    _begin(weights, plan)
    position = tl.load(positions + row, mask=row < m, other=0).to(tl.int64)
    kv_row = tl.load(kv_rows + row, mask=row < m, other=-1).to(tl.int64)
    squares = _squares(sums, m, parts, plan)
    y, m = _product(x, weights, m, partials, tickets, plan)
    y = _normed(y, squares, plan)
    low, high = tl.split(tl.reshape(y, (plan.rows, plan.half, 2)))
    angle = position[:, None] * heads.half + element[None, :]
    turned = (row[:, None] < m) & (head < heads.q + heads.kv)
    c = tl.load(cos + angle, mask=turned, other=1.0)
    s = tl.load(sin + angle, mask=turned, other=0.0)
    low, high = low * c - high * s, high * c + low * s
    is_query = head < heads.q
    queries = q_out + (row * heads.q + head)[:, None] * heads.dim + element[None, :]
    _store_pair(queries, low, high, (row < m) & is_query, heads.half)
    which = (head - heads.q) // heads.kv  # keys or values
    slot = kv_row // heads.page_size * heads.page_stride
    slot += (which * heads.page_size + kv_row % heads.page_size) * heads.token
    kept = pool + (slot + (head - heads.q) % heads.kv * heads.dim)[:, None] + element[None, :]
    _store_pair(kept, low, high, (row < m) & (kv_row >= 0) & (head >= heads.q), heads.half)


@triton.jit
def _store_pair(to, low, high, mask, half: tl.constexpr):
    tl.store(to, low.to(to.dtype.element_ty), mask=mask[:, None])
    tl.store(to + half, high.to(to.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _weight_rows(weight, rows, plan: tl.constexpr):
    """Where this program's part of each weight row begins, [columns]."""
    return weight + rows.to(tl.int64) * plan.k + tl.program_id(1) * plan.chunk


@triton.jit
def _begin(weights, plan: tl.constexpr):
    """Waits for the kernel before; the weights, which no kernel writes, are asked for meanwhile."""
    if plan.pdl:
        if plan.early >= plan.chunk:
            gdc_launch_dependents()
        if plan.ahead > 0:
            line = tl.arange(0, plan.ahead_lines) * plan.line
            _ask_l2(weights[:, None] + line[None, :], (line < plan.chunk)[None, :])
        gdc_wait()


@triton.jit
def _ask_l2(lines, wanted):
    """Starts the fetch of the 128-byte lines at these addresses into L2."""
    address, wanted = tl.broadcast(lines.to(tl.uint64), wanted.to(tl.int32))
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [address, wanted],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _let_next_start(now):
    """If `now`, the next kernel's programs may be placed, and ask for weights while this one's tail runs."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p griddepcontrol.launch_dependents; mov.b32 $0, 0; }",
        "=r,r",
        [now.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _squares(sums, m, parts, plan: tl.constexpr):
    """The parts of each row's sum of squares, [slots, rows]; they are added up when the product is done."""
    if plan.slots == 0:
        squares = 0.0
    else:
        part = tl.arange(0, plan.slots)[:, None]
        row = tl.arange(0, plan.rows)[None, :]
        squares = tl.load(sums + part * SUMS_WIDTH + row, mask=(part < parts) & (row < m), other=0.0)
    return squares


@triton.jit
def _normed(y, squares, plan: tl.constexpr):
    if plan.slots:
        y *= tl.rsqrt(tl.sum(squares, 0) / plan.k + plan.eps)[:, None]
    return y


@triton.jit
def _product(x, weights, m, partials, tickets, plan: tl.constexpr):
    """This tile of x . weight^T, float32 [rows, columns]; and m, or 0 where another program finishes."""
    row = tl.arange(0, plan.rows)[None, :]
    step = tl.arange(0, plan.depth)
    x += tl.program_id(1) * plan.chunk
    acc = tl.full((plan.columns, plan.rows), 0.0, tl.float32)
    for at in range(0, plan.chunk, plan.depth):
        if plan.early_in_loop:
            _let_next_start(at == plan.early_step)
        if plan.ahead > 0:
            line = at + plan.ahead + tl.arange(0, plan.depth_lines) * plan.line
            _ask_l2(weights[:, None] + line[None, :], (line < plan.chunk)[None, :])
        inner = at + step
        tile = tl.load(weights[:, None] + inner[None, :])
        columns = tl.load(x + row * plan.k + inner[:, None], mask=row < m, other=0.0)
        acc = tl.dot(tile, columns, acc, input_precision="ieee")
    if plan.pdl and plan.early == 0:
        gdc_launch_dependents()
    y = tl.trans(acc)
    if plan.split > 1:
        y, m = _join(y, m, partials, tickets, plan, plan.split)
    return y, m


@triton.jit
def _join(share, m, partials, tickets, plan: tl.constexpr, split: tl.constexpr):
    """The last of a tile's programs to arrive adds up all shares, in order; the others get m = 0."""
    tile = tl.program_id(0)
    row = tl.arange(0, plan.rows)[:, None]
    cell = row * plan.columns + tl.arange(0, plan.columns)[None, :]
    shares = partials + tile * split * (plan.rows * plan.columns) + cell
    tl.store(shares + tl.program_id(1) * (plan.rows * plan.columns), share, mask=row < m)
    tl.debug_barrier()  # one thread takes the ticket, for the stores of all
    ticket = tl.atomic_add(tickets + tile, 1, sem="acq_rel")
    last = ticket == split - 1
    tl.store(tickets + tile, 0, mask=last)
    m = tl.where(last, m, 0)
    total = tl.zeros_like(share)
    for other in tl.static_range(split):
        # Past L1, which knows nothing of other SMs' stores.
        total += tl.load(
            shares + other * (plan.rows * plan.columns), mask=row < m, other=0.0, cache_modifier=".cg"
        )
    return total, m
