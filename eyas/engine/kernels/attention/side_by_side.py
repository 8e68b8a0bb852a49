"""Causal attention of a prompt chunk over keys and values that lie side by side, by the tensor memory
accelerator.

A program takes a tile of rows of one head (FlashAttention, Dao et al. 2022). Two of them share a
multiprocessor: while one weighs scores, the matrix unit has the other's products. Descriptors end where rows
do, so no blocks have a mask but those of a tile's own rows.
"""

from __future__ import annotations

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from eyas.engine.kernels.attention.scores import LOG2_E
from eyas.engine.kernels.attention.softmax import UNSEEN, settled, with_block
from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import cdiv

KEYS = 64
"""Rows before a chunk: a multiple of it, so that every tile begins with a block of keys."""

_ROWS = 128


def attend_side_by_side(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    """softmax(scale q k) v of q [m, heads, dim] -> out, as q: the last m rows of a sequence of n.

    keys, values [n, kv_heads, dim], n - m a multiple of `KEYS`, dim a power of two; a query sees the
    sequence's rows up to its own. Rows of every tensor may have any stride, a multiple of 16 bytes; what a
    row has is contiguous.
    """
    (m, heads, dim), (n, kv_heads, _) = q.shape, keys.shape
    rows = [_described(each, _ROWS if each is q or each is out else KEYS) for each in (q, keys, values, out)]
    _attend_rows[(heads, cdiv(m, _ROWS))](
        *(*rows, (n - m) // KEYS, scale * LOG2_E),
        GROUP=heads // kv_heads,
        DIM=dim,
        ROWS=_ROWS,
        KEYS=KEYS,
        num_warps=8,
        num_stages=2,
    )


def _described(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Rows [n, heads, dim] by tiles of `rows` rows of a head."""
    n, heads, dim = x.shape
    return TensorDescriptor(x, [n, heads * dim], [x.stride(0), 1], [rows, dim])


@kernel(do_not_specialize=["before"])
def _attend_rows(
    q, keys, values, out, before, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Grid (heads, tiles), those with most keys first, behind `before` whole blocks of keys. Fewer than 128
    registers, or there is no room for a second program.
    """
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    whole, first = before * KEYS + tile * ROWS, tile * ROWS
    column = head // GROUP * DIM
    q_tile = q.load([first, head * DIM])
    peak = tl.full([ROWS], UNSEEN, tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, DIM], 0.0, tl.float32)
    for block in range(0, whole, KEYS):
        k, v = keys.load([block, column]), values.load([block, column])
        acc = settled(acc)
        scores = tl.dot(q_tile, k.T, input_precision="ieee")
        peak, total, acc = with_block(scores, v, scale, peak, total, acc)
    own = tl.arange(0, ROWS)
    for block in range(0, ROWS, KEYS):
        k, v = keys.load([whole + block, column]), values.load([whole + block, column])
        acc = settled(acc)
        scores = tl.dot(q_tile, k.T, input_precision="ieee")
        key = block + tl.arange(0, KEYS)
        scores = tl.where(key[None, :] <= own[:, None], scores, UNSEEN)
        peak, total, acc = with_block(scores, v, scale, peak, total, acc)
    out.store([first, head * DIM], (acc / total[:, None]).to(out.dtype))
