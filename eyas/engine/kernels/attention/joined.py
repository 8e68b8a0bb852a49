"""Work around attention by dense kernels: rows of pages side by side, and parts of keys made one."""

from __future__ import annotations

import torch
import triton.language as tl

from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2


def rows_of_pages(pool: torch.Tensor, pages: torch.Tensor, end: int, rows: int) -> torch.Tensor:
    """The keys and values of a sequence's first `end` rows, and nothing but 0 behind them.

    pool [pages, 2, page_size, kv_heads, dim] of a layer; pages int32 [any]: the sequence's, as many as have
    those rows. Returns [2, rows, kv_heads, dim], rows >= end.
    """
    _, _, page_size, heads, dim = pool.shape
    made = torch.empty(2, rows, heads, dim, dtype=pool.dtype, device=pool.device)
    sizes = {"PAGE": page_size, "HEADS": heads, "DIM": dim, "WIDTH": power_of_2(dim)}
    strides = {
        f"BY_{name}": stride
        for name, stride in zip(("PAGE", "FIELD", "ROW", "HEAD"), pool.stride(), strict=False)
    }
    _read_pages[(cdiv(rows, page_size), 2)](pool, pages, made, end, rows, **sizes, **strides, num_warps=4)
    return made


@kernel(do_not_specialize=["pages", "end", "rows"])
def _read_pages(
    pool, pages, made, end, rows,
    PAGE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    BY_PAGE: tl.constexpr, BY_FIELD: tl.constexpr, BY_ROW: tl.constexpr, BY_HEAD: tl.constexpr,
):  # fmt: skip
    """Grid (pages, keys and values)."""
    number, field = tl.program_id(0), tl.program_id(1)
    place, column = tl.arange(0, PAGE), tl.arange(0, WIDTH)[None, :]
    row = number * PAGE + place
    there = (row < end)[:, None] & (column < DIM)
    page = tl.load(pages + number, mask=number * PAGE < end, other=0).to(tl.int64)
    source = pool + page * BY_PAGE + field * BY_FIELD + (place * BY_ROW)[:, None] + column
    target = made + ((field * rows + row).to(tl.int64) * (HEADS * DIM))[:, None] + column
    for head in tl.static_range(HEADS):
        x = tl.load(source + head * BY_HEAD, mask=there, other=0.0)
        tl.store(target + head * DIM, x, mask=(row < rows)[:, None] & (column < DIM))


def join(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
) -> torch.Tensor:
    """Attention over the keys of both, from what is made of each: rows [m, heads, dim], and the logarithms of
    their sums of exponentials, float32 [heads, m]; of any strides, but dim is contiguous.

    Writes the rows to `out` [m, heads, dim], which may be those of one; returns the logarithms of both.
    """
    m, heads, dim = out.shape
    sums = torch.empty(heads, m, dtype=torch.float32, device=out.device)
    strides = [stride for rows in (first[0], second[0], out) for stride in rows.stride()[:2]]
    strides += [stride for logs in (first[1], second[1]) for stride in logs.stride()]
    _join_parts[(m,)](
        *(*first, *second, out, sums, m, *strides),
        HEADS=heads,
        SLOTS=power_of_2(heads),
        DIM=dim,
        WIDTH=power_of_2(dim),
        num_warps=4,
    )
    return sums


@kernel(do_not_specialize=["m"])
def _join_parts(
    a, a_sums, b, b_sums, out, sums, m, a_row, a_head, b_row, b_head, out_row, out_head,
    a_sums_head, a_sums_row, b_sums_head, b_sums_row,
    HEADS: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (m,)."""
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, SLOTS), tl.arange(0, WIDTH)[None, :]
    real = head < HEADS
    there = real[:, None] & (column < DIM)
    x_sums = tl.load(a_sums + head * a_sums_head + row * a_sums_row, mask=real, other=0.0)
    y_sums = tl.load(b_sums + head * b_sums_head + row * b_sums_row, mask=real, other=0.0)
    peak = tl.maximum(x_sums, y_sums)
    x_share, y_share = tl.exp(x_sums - peak), tl.exp(y_sums - peak)
    total = x_share + y_share
    x = tl.load(a + row * a_row + (head * a_head)[:, None] + column, mask=there, other=0.0).to(tl.float32)
    y = tl.load(b + row * b_row + (head * b_head)[:, None] + column, mask=there, other=0.0).to(tl.float32)
    both = x * (x_share / total)[:, None] + y * (y_share / total)[:, None]
    at = out + row * out_row + (head * out_head)[:, None] + column
    tl.store(at, both.to(out.dtype.element_ty), mask=there)
    tl.store(sums + head * m + row, peak + tl.log(total), mask=real)
