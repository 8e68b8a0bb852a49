"""Both products of attention of one row: weights wait in registers until the row is there.

As in `single`, each program asks for its weight rows before it waits for the kernel that makes the row, and
multiplies them in float32 when the row has come. The weights of q, k and v, and of the way back, nearly fit
the registers of all multiprocessors together; what does not waits in L2. So memory works while kernels run
that have little to read. `skinny` is the way of more rows, and what this is compared with; its sums have
another order, so this is no exact arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eyas.engine.kernels.launch.launching import call_ahead, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.products.rope_store import pool_row, rotated, store_halves
from eyas.engine.kernels.products.skinny import (
    KvRows,
    LinearEnd,
    ProductLaunch,
    QkvWeights,
    RotaryInput,
    SkinnyInput,
    SkinnyWeight,
)
from eyas.engine.kernels.products.skinny_kernels import SUMS_WIDTH, FusedHeads

_REGISTERS = 32 << 20
"""Bytes of a matrix at most: about what the registers of a Hopper GPU hold."""

_ROWS, _CHUNK, _WARPS = 4, 1024, 4
_EARLY = 3  # chunks that wait in registers; with more there is room for fewer programs
_LINE = 64  # elements of two bytes


@dataclass(frozen=True)
class SinglePlan:
    """A kernel's compile-time parameters: `rows` weight rows of a program, whose k it reads by `chunk`
    columns, the first `early` of them before it waits. `parts`: of the row's sum of squares, filled up (0:
    it is not normalised).
    """

    n: int
    k: int
    rows: int
    chunk: int
    early: int
    parts: int
    eps: float
    pdl: bool

    @property
    def chunks(self) -> int:
        """Times that a program reads a piece of its rows."""
        return cdiv(self.k, self.chunk)

    @property
    def half(self) -> int:
        """Weight rows of each of the two that a rotation pairs."""
        return self.rows // 2

    @property
    def late(self) -> int:
        """Lines of a chunk."""
        return self.chunk // _LINE


def can_take(rows: int, weight: SkinnyWeight | None, launch: ProductLaunch) -> bool:
    """True if `linear` takes this number of rows to the weight [n, k]."""
    if rows != 1 or launch.exact or not isinstance(weight, torch.Tensor) or weight.element_size() != 2:
        return False
    return weight.shape[0] % _ROWS == 0 and weight.nbytes <= _REGISTERS


def can_take_qkv(rows: int, qkv: QkvWeights, kv: KvRows, launch: ProductLaunch) -> bool:
    """The same of `qkv_rope`: no program has a whole head, to normalise it or to find its scale, and none
    adds what adapters do.
    """
    bare = qkv.norms is None and qkv.updates is None
    return can_take(rows, qkv.weight, launch) and bare and not kv.scaled


def linear(x: torch.Tensor, weight: SkinnyWeight, out: torch.Tensor, end: LinearEnd, pdl: bool) -> None:
    """The product of one row x [1, k]; see `skinny.linear`. `end` has no more than a residual and a bias."""
    assert isinstance(weight, torch.Tensor)
    plan = _plan(SkinnyInput(x), weight, pdl)
    _linear[(plan.n // plan.rows,)](
        *(x, weight, out, end.residual, end.bias), plan, num_warps=_WARPS, launch_pdl=pdl
    )


def qkv_rope(
    source: SkinnyInput,
    qkv: QkvWeights,
    q_out: torch.Tensor,
    rotation: RotaryInput,
    kv: KvRows,
    pdl: bool,
) -> None:
    """Queries, keys and values of one row, whose heads pass no norm and are stored without scales; see
    `skinny.qkv_rope`.
    """
    assert isinstance(qkv.weight, torch.Tensor) and qkv.norms is None and not kv.scaled
    _, _, page_size, kv_heads, dim = kv.layer.shape
    heads = FusedHeads(q_out.shape[1], kv_heads, dim, page_size, kv.layer.stride(0))
    plan = _plan(source, qkv.weight, pdl)
    _qkv_rope[(plan.n // plan.rows,)](
        *(source.x, qkv.weight, qkv.bias, q_out, kv.layer, rotation.cos, rotation.sin),
        *(rotation.positions, kv.rows, source.sums, 0 if source.sums is None else len(source.sums)),
        heads,
        plan,
        num_warps=_WARPS,
        launch_pdl=pdl,
    )


def _plan(source: SkinnyInput, weight: torch.Tensor, pdl: bool) -> SinglePlan:
    (n, k), chunk = weight.shape, min(_CHUNK, power_of_2(weight.shape[1]))
    parts = 0 if source.sums is None else power_of_2(len(source.sums))
    return SinglePlan(n, k, _ROWS, chunk, min(_EARLY, cdiv(k, chunk)), parts, source.eps, pdl)


@kernel
def _linear(x, weight, out, residual, bias, plan: tl.constexpr):
    """Grid (n / rows): some columns of the result."""
    row = tl.program_id(0) * plan.rows + tl.arange(0, plan.rows)
    tiles = _early(weight, row, plan)
    added = tl.full((plan.rows,), 0.0, tl.float32)
    if bias is not None:
        added += tl.load(bias + row).to(tl.float32)
    if plan.pdl:
        gdc_wait()
        gdc_launch_dependents()
    if residual is not None:
        added += tl.load(residual + row).to(tl.float32)
    y = _product(_values(x, plan), tiles, weight, row, plan) + added
    tl.store(out + row, y.to(out.dtype.element_ty))


@kernel(do_not_specialize=["parts"], do_not_specialize_on_alignment=["positions", "kv_rows"])
def _qkv_rope(
    x, weight, bias, q_out, pool, cos, sin, positions, kv_rows, sums, parts, heads: tl.constexpr,
    plan: tl.constexpr,
):  # fmt: skip
    """Grid (n / rows): elements of the lower half of a head, and their partners."""
    first = tl.program_id(0) * plan.half
    head, element = first // heads.half, first % heads.half + tl.arange(0, plan.half)
    lower = head * heads.dim + element
    upper = lower + heads.half
    low_tiles, high_tiles = _early(weight, lower, plan), _early(weight, upper, plan)
    low_bias, high_bias = 0.0, 0.0
    if bias is not None:
        low_bias = tl.load(bias + lower).to(tl.float32)
        high_bias = tl.load(bias + upper).to(tl.float32)
    if plan.pdl:
        gdc_wait()
        gdc_launch_dependents()
    position, kv_row = tl.load(positions).to(tl.int64), tl.load(kv_rows).to(tl.int64)
    values, scale = _values(x, plan), _scale(sums, parts, plan)
    turned = head < heads.q + heads.kv
    c = tl.load(cos + position * heads.half + element, mask=turned, other=1.0)
    s = tl.load(sin + position * heads.half + element, mask=turned, other=0.0)
    low = _product(values, low_tiles, weight, lower, plan) * scale + low_bias
    high = _product(values, high_tiles, weight, upper, plan) * scale + high_bias
    low, high = rotated(low, high, c, s)
    is_query = head < heads.q
    store_halves(q_out + head * heads.dim + element, low, high, is_query & (element >= 0), heads.half)
    which, kv_head = (head - heads.q) // heads.kv, (head - heads.q) % heads.kv  # keys or values
    slot = pool_row(pool, kv_row, heads.page_stride, heads.page_size, heads.token)
    slot += which * heads.page_size * heads.token + kv_head * heads.dim
    stored = (kv_row >= 0) & (head >= heads.q) & (element >= 0)
    store_halves(slot + element, low, high, stored, heads.half)


@triton.jit
def _early(weight, row, plan: tl.constexpr):
    """The first chunks of weight rows; L2 gets the others, which no kernel writes."""
    EARLY: tl.constexpr = plan.early
    CHUNKS: tl.constexpr = plan.chunks
    tiles = ()
    for chunk in tl.static_range(EARLY):
        tiles = tiles + (_tile(weight, row, chunk, plan),)  # type: ignore[assignment]
    if plan.pdl and plan.early < plan.chunks:
        line = tl.arange(0, plan.late)
        for chunk in tl.static_range(EARLY, CHUNKS):
            column = tl.minimum(chunk * plan.chunk + line * (plan.chunk // plan.late), plan.k - 1)
            call_ahead(weight + row[:, None] * plan.k + column[None, :])
    return tiles


@triton.jit
def _tile(weight, row, chunk: tl.constexpr, plan: tl.constexpr):
    column = chunk * plan.chunk + tl.arange(0, plan.chunk)
    at = weight + row[:, None] * plan.k + column[None, :]
    if (chunk + 1) * plan.chunk <= plan.k:
        made = tl.load(at)
    else:
        made = tl.load(at, mask=(column < plan.k)[None, :], other=0.0)
    return made


@triton.jit
def _values(x, plan: tl.constexpr):
    """The row, by chunks."""
    CHUNKS: tl.constexpr = plan.chunks
    values = ()
    for chunk in tl.static_range(CHUNKS):
        column = chunk * plan.chunk + tl.arange(0, plan.chunk)
        one = tl.load(x + column, mask=column < plan.k, other=0.0)
        values = values + (one,)  # type: ignore[assignment]
    return values


@triton.jit
def _product(values, tiles, weight, row, plan: tl.constexpr):
    """The row times weight rows, float32 [rows]."""
    CHUNKS: tl.constexpr = plan.chunks
    made = tl.full((row.shape[0], plan.chunk), 0.0, tl.float32)
    for chunk in tl.static_range(CHUNKS):
        if chunk < plan.early:
            tile = tiles[chunk]
        else:
            tile = _tile(weight, row, chunk, plan)
        made += tile.to(tl.float32) * values[chunk].to(tl.float32)[None, :]
    return tl.sum(made, 1)


@triton.jit
def _scale(sums, parts, plan: tl.constexpr):
    """The factor that normalises the row."""
    scale = tl.full((), 1.0, tl.float32)
    if plan.parts > 0:
        part = tl.arange(0, plan.parts)
        squares = tl.load(sums + part * SUMS_WIDTH, mask=part < parts, other=0.0)
        scale = tl.rsqrt(tl.sum(squares, 0) / plan.k + plan.eps)
    return scale
