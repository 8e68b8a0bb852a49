"""Causal attention of prompt chunks in the expanded form of latent attention: keys and values of every head.

Where a chunk has many rows, making its sequence's keys and values costs less than what scores over latents
cost more (DeepSeek-V2, arXiv 2405.04434, section 2.1). A program takes a tile of rows of one head
(FlashAttention, Dao et al. 2022); a head's key is its own part, and the rotated one that all share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from eyas.engine.kernels.attention.softmax import UNSEEN, with_block
from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import power_of_2
from eyas.engine.kernels.products.rope_store import rotated
from eyas.engine.kernels.products.skinny import RotaryInput

TILE = 128
"""Query rows of a program."""

_KEYS = 64


@dataclass(frozen=True)
class ExpandedRows:
    """The expansion of n rows: keys [n, heads, plain] and values [n, heads, value], each head's own; and rows
    [n, latent + rotated] as they are cached, whose last elements are the rotated key.
    """

    keys: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor


def attend_expanded(
    q: torch.Tensor,
    expanded: ExpandedRows,
    tiles: torch.Tensor,
    rotation: RotaryInput,
    scale: float,
    out: torch.Tensor,
) -> None:
    """softmax(scale q k) v of q [C, heads * (plain + rotated)], strided by row at most -> out [C, heads *
    value].

    The rotated elements of q are rotated here, i with i + rotated / 2. tiles int32 [T, 4]: (first row within
    q, count <= TILE, its first row's number in its sequence, where that begins in `expanded`). A query sees
    its sequence's rows up to its own. A tile whose number is negative is of no sequence, and may have rows
    that are not there: what is there becomes zeros. Rows that no tile names are not written.
    """
    (_, heads, plain), value = expanded.keys.shape, expanded.values.shape[2]
    half = (q.shape[1] // heads - plain) // 2
    whole = all(size == max(16, power_of_2(size)) for size in (plain, value, half))
    parts = expanded.keys.flatten(1), expanded.values.flatten(1), expanded.rows
    widths = plain, value, 2 * half
    described = [
        TensorDescriptor(part, list(part.shape), [part.stride(0), 1], [_KEYS, width]) if whole else part
        for part, width in zip(parts, widths, strict=True)
    ]
    _attend_expanded[(heads, tiles.shape[0])](
        *(q, q.stride(0), *parts, *described, tiles),
        *(rotation.cos, rotation.sin, rotation.positions, out, len(q), scale),
        HEADS=heads,
        PLAIN=plain,
        VALUE=value,
        WIDTH=expanded.rows.shape[1],
        HALF=half,
        PLAIN_BLOCK=max(16, power_of_2(plain)),
        VALUE_BLOCK=max(16, power_of_2(value)),
        HALF_BLOCK=max(16, half),
        ROWS=TILE,
        KEYS=_KEYS,
        WHOLE=whole,
        num_warps=8,
        num_stages=3,
    )


@kernel(do_not_specialize=["tiles", "positions", "m"])
def _attend_expanded(
    q, q_stride, keys, values, rows, key_tiles, value_tiles, row_tiles, tiles, cos, sin, positions, out,
    m, scale,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    PLAIN_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Grid (heads, T)."""
    head = tl.program_id(0)
    tile = tiles + 4 * tl.program_id(1)
    first, count, start = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    begin = tl.load(tile + 3).to(tl.int64)
    row = tl.arange(0, ROWS)
    if start < 0:
        nothing = tl.zeros((ROWS, VALUE_BLOCK), tl.float32)
        _store(out, nothing, first, head, tl.minimum(count, m - first), HEADS, VALUE)
        return
    real = (row < count)[:, None]
    plain, half = tl.arange(0, PLAIN_BLOCK)[None, :], tl.arange(0, HALF_BLOCK)[None, :]
    q_at = q + (first + row).to(tl.int64)[:, None] * q_stride + head * (PLAIN + 2 * HALF)
    q_plain = tl.load(q_at + plain, mask=real & (plain < PLAIN), other=0.0)
    there = real & (half < HALF)
    low = tl.load(q_at + PLAIN + half, mask=there, other=0.0).to(tl.float32)
    high = tl.load(q_at + PLAIN + HALF + half, mask=there, other=0.0).to(tl.float32)
    angle = tl.load(positions + first + row, mask=row < count, other=0).to(tl.int64)[:, None] * HALF + half
    c, s = tl.load(cos + angle, mask=there, other=1.0), tl.load(sin + angle, mask=there, other=0.0)
    q_low, q_high = rotated(low, high, c, s)
    q_turned = tl.reshape(tl.permute(tl.join(q_low, q_high), (0, 2, 1)), (ROWS, 2 * HALF_BLOCK))
    q_turned = q_turned.to(q_plain.dtype)
    keys += begin * (HEADS * PLAIN) + head * PLAIN
    values += begin * (HEADS * VALUE) + head * VALUE
    rows += begin * WIDTH + (WIDTH - 2 * HALF)
    peak = tl.full([ROWS], UNSEEN, tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, VALUE_BLOCK], 0.0, tl.float32)
    whole = start // KEYS * KEYS
    if WHOLE:
        peak, total, acc = _whole_blocks(
            q_plain, q_turned, key_tiles, value_tiles, row_tiles, begin.to(tl.int32), head, whole, scale,
            peak, total, acc, PLAIN, VALUE, WIDTH - 2 * HALF, KEYS,
        )  # fmt: skip
    else:
        peak, total, acc = _blocks(
            q_plain, q_turned, keys, values, rows, start, 0, whole, start + count, scale, peak, total, acc,
            HEADS, PLAIN, VALUE, WIDTH, HALF, PLAIN_BLOCK, VALUE_BLOCK, HALF_BLOCK, ROWS, KEYS, False,
        )  # fmt: skip
    peak, total, acc = _blocks(
        q_plain, q_turned, keys, values, rows, start, whole, start + count, start + count, scale,
        peak, total, acc,
        HEADS, PLAIN, VALUE, WIDTH, HALF, PLAIN_BLOCK, VALUE_BLOCK, HALF_BLOCK, ROWS, KEYS, True,
    )  # fmt: skip
    _store(out, acc / total[:, None], first, head, count, HEADS, VALUE)


@triton.jit
def _store(out, values, first, head, count, HEADS: tl.constexpr, VALUE: tl.constexpr):
    """A head's values [rows, at least VALUE] of `count` rows from `first` on."""
    row, column = tl.arange(0, values.shape[0])[:, None], tl.arange(0, values.shape[1])[None, :]
    out_at = out + ((first + row).to(tl.int64) * HEADS + head) * VALUE + column
    tl.store(out_at, values.to(out.dtype.element_ty), mask=(row < count) & (column < VALUE))


@triton.jit
def _whole_blocks(
    q_plain, q_turned, keys, values, rows, begin, head, last, scale, peak, total, acc,
    PLAIN: tl.constexpr, VALUE: tl.constexpr, TURNED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Keys 0 .. last - 1, which every query sees, in whole blocks, by the tensor memory accelerator."""
    for block in range(0, last, KEYS):
        k = keys.load([begin + block, head * PLAIN])
        turned = rows.load([begin + block, TURNED])
        v = values.load([begin + block, head * VALUE])
        scores = tl.dot(q_plain, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_turned, tl.trans(turned), scores, input_precision="ieee")
        peak, total, acc = with_block(scores, v, scale, peak, total, acc)
    return peak, total, acc


@triton.jit
def _blocks(
    q_plain, q_turned, keys, values, rows, start, first, last, end, scale, peak, total, acc,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    PLAIN_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys first .. last - 1, in whole blocks, added to the softmax so far; none from `end` on is read."""
    plain, both = tl.arange(0, PLAIN_BLOCK)[None, :], tl.arange(0, 2 * HALF_BLOCK)[None, :]
    turned_at = both % HALF_BLOCK + both // HALF_BLOCK * HALF
    real = both % HALF_BLOCK < HALF
    column = tl.arange(0, VALUE_BLOCK)[None, :]
    own = start + tl.arange(0, ROWS)
    for block in range(first, last, KEYS):
        key = (block + tl.arange(0, KEYS))[:, None]
        there = key < end
        at = key.to(tl.int64)
        k = tl.load(keys + at * (HEADS * PLAIN) + plain, mask=there & (plain < PLAIN), other=0.0)
        turned = tl.load(rows + at * WIDTH + turned_at, mask=there & real, other=0.0)
        v = tl.load(values + at * (HEADS * VALUE) + column, mask=there & (column < VALUE), other=0.0)
        scores = tl.dot(q_plain, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_turned, tl.trans(turned), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where(tl.trans(key) <= own[:, None], scores, UNSEEN)
        peak, total, acc = with_block(scores, v, scale, peak, total, acc)
    return peak, total, acc
