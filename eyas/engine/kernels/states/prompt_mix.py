"""Work before the rule, over a prompt's chunks: the convolution, silu, the norm of queries and keys.

A thread goes down `_EACH` rows, so that each input is read once and not once per tap of the filter. Rows that
came before this forward are read from the ring and the tail, row by row, where a chunk begins among them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.states.mixing import convolved, key_rows, numbers_back, passed_silu
from eyas.engine.kernels.states.order import COLUMNS

_EACH = tl.constexpr(8)  # rows that a thread goes down


@kernel
def mix_rows(
    inputs, stride, gates, filters, bias, ring, ring_gates, tails, chunks, slots, firsts, counts, starts,
    bounds, mixed, every, layout: tl.constexpr,
):  # fmt: skip
    """Grid (heads of q, k and v, chunks): a head's columns, and its gates. Missing rows are zeros."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    sequence, base = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    slot, first = tl.load(slots + sequence).to(tl.int64), tl.load(firsts + sequence)
    start, bound = tl.load(starts + sequence), tl.load(bounds + sequence)
    end = start + tl.load(counts + sequence)
    if base >= end:  # a chunk of padding, of which a step has room for many
        return
    inputs += (first + base - start).to(tl.int64) * stride
    ring += slot * layout.input_stride
    tails += slot * layout.tail_stride
    mixed += chunk.to(tl.int64) * (COLUMNS * layout.inputs)
    rows = (filters, bias, inputs, stride, base, start, ring, tails, bound)
    if head < 2 * layout.key_heads:
        key = tl.arange(0, layout.key_size)
        _mix_head(head * layout.key_size + key, key >= 0, end, rows, mixed, layout, True)
    else:
        head -= 2 * layout.key_heads
        value = tl.arange(0, layout.values)
        v = 2 * layout.key_heads * layout.key_size + head * layout.value_size + value
        _mix_head(v, value < layout.value_size, end, rows, mixed, layout, False)
        row = tl.arange(0, COLUMNS)
        number = base + row
        real = number < end
        ring_gates += slot * layout.gate_stride + head
        every += chunk.to(tl.int64) * (COLUMNS * 2 * layout.value_heads) + head
        _gates_of(number, real, row, gates + head, first, start, ring_gates, every, layout)
        step = layout.value_heads
        _gates_of(
            number, real, row, gates + head + step, first, start, ring_gates + step, every + step, layout
        )


@triton.jit
def _mix_head(column, there, end, rows, mixed, layout: tl.constexpr, KEYS: tl.constexpr):
    """Columns of a chunk's rows; the ring and the tail are read where the forward has not all of them."""
    filters, bias, inputs, stride, base, start, ring, tails, bound = rows
    KERNEL: tl.constexpr = layout.kernel
    group = tl.arange(0, COLUMNS // _EACH) * _EACH
    if base - KERNEL + 1 < start:
        for i in range(_EACH):
            number = base + group + i
            real = number < end
            x = convolved(
                numbers_back(number, real, None, start, layout), real, column, there,
                filters, bias, inputs, stride, base, start, ring, tails, bound, layout, True,
            )  # fmt: skip
            _store(x, group + i, real, column, there, mixed, layout, KEYS)
    else:
        window, factors = (), ()
        for tap in tl.static_range(KERNEL):
            factor = tl.load(filters + tap * layout.inputs + column, mask=there, other=0.0)
            factors = factors + (factor,)  # type: ignore[assignment]
        for i in tl.static_range(_EACH + KERNEL - 1):
            row = group + (i - KERNEL + 1)
            mask = (base + row < end)[:, None] & there[None, :]
            read = tl.load(inputs + row[:, None] * stride + column[None, :], mask=mask, other=0.0)
            window = window + (read,)  # type: ignore[assignment]
        for i in tl.static_range(_EACH):
            acc = tl.full((COLUMNS // _EACH, column.shape[0]), 0.0, tl.float32)
            for tap in tl.static_range(KERNEL):
                factor = tl.broadcast_to(factors[tap][None, :], acc.shape)
                acc = tl.fma(window[i + tap].to(tl.float32), factor, acc)
            x = passed_silu(acc, column, there, bias, layout)
            _store(x, group + i, base + group + i < end, column, there, mixed, layout, KEYS)


@triton.jit
def _store(x, row, real, column, there, mixed, layout: tl.constexpr, KEYS: tl.constexpr):
    if KEYS:
        x = key_rows(x, layout)
    x = tl.where(real[:, None], x, 0.0)
    at = mixed + row[:, None] * layout.inputs + column[None, :]
    tl.store(at, x.to(mixed.dtype.element_ty), mask=there[None, :] & (row >= 0)[:, None])


@triton.jit
def _gates_of(number, real, row, gates, first, start, ring, every, layout: tl.constexpr):
    """One gate of a chunk's rows, read from the forward or from the ring; zero for missing rows."""
    place = (first + number - start).to(tl.int64) * (2 * layout.value_heads)
    new = tl.load(gates + place, mask=real & (number >= start), other=0.0)
    place = number % layout.ring * (2 * layout.value_heads)
    old = tl.load(ring + place, mask=real & (number < start), other=0.0)
    tl.store(every + row * (2 * layout.value_heads), tl.where(number >= start, new, old))
