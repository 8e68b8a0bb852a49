"""The one order in which kernels of the gated delta rule add up a row, whichever does it, and beside whom.

Rows stand in columns: number `SPAN` of them behind a state's position, a row's ancestors in order. With G
the sum of a row's log decays from the state on, S the state, and j the columns before a row i or its own:

    a_ij   = beta_i exp(G_i - G_j) k_i k_j, below the diagonal        p_ij = scale exp(G_i - G_j) q_i k_j
    solved = (1 + a)^-1            weights = p solved                 (lower triangles, row by row)
    miss_i = beta_i (v_i - exp(G_i) S^T k_i)                          (of a row and the state alone)
    out_i  = scale exp(G_i) S^T q_i + sum_j weights_ij miss_j
    S'     = exp(G_63) S + sum_j exp(G_63 - G_j) k_j (solved miss)_j  (of 64 certain rows)

which is the recurrence row by row, rearranged. A row's `solved`, `weights`, `miss` and G follow from the
state and from its ancestors, and are made once: who makes them, with how many others, changes no bit.
* S^T k, the products of queries and keys, the sums over misses, and S' are products of the matrix unit, whose
  order is that of `tensor_core`'s model: left to right in groups of 16, and nothing of a tile plays a part. A
  float32 operand is the sum of two of the rows' dtype; each pair of these has a sum of its own, added last.
* `solved` and `weights` are left folds of fused multiply-adds over columns, so that a row adds its certain
  ancestors, then those of this step, on whatever path.
* G is a whole number of 2^-40: sums of such have no order, and far from the state its differences are exact.
Rows of float32 are multiplied in float32 (the CPU's interpreter; on a GPU slow).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.states.delta import DeltaRule
from eyas.engine.states.shape import SPAN, DeltaShape
from eyas.engine.states.store import LayerStates

COLUMNS = tl.constexpr(SPAN)
STEP = tl.constexpr(16)
"""Columns that are taken at a time."""


@dataclass(frozen=True)
class SolvedRows:
    """What kernels keep of the rows in one layer's ring, row r of a slot in place r % ring; see above.

    keys [slots, ring, key heads, key size], convolved and normed, of the rows' dtype; misses float32 [slots,
    ring, value heads, value size]; solved float32 [slots, ring, value heads, SPAN]; sums int64 [slots,
    ring, value heads]: of log decays. They follow from the ring's rows, and a prompt's kernels make them
    again; rows of an accepted path move with those of the ring (`accepted`).
    """

    keys: torch.Tensor
    misses: torch.Tensor
    solved: torch.Tensor
    sums: torch.Tensor

    @staticmethod
    def row(shape: DeltaShape, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Of each part its dtype and a row's sides; `dtype`: of the rows. An empty state has none."""
        heads = shape.value_heads if shape.key_size else 0
        return {
            "keys": (dtype, (shape.key_heads, shape.key_size)),
            "misses": (torch.float32, (heads, shape.value_size)),
            "solved": (torch.float32, (heads, SPAN)),
            "sums": (torch.int64, (heads,)),
        }

    @classmethod
    def on(cls, states: LayerStates, shape: DeltaShape) -> SolvedRows:
        """Allocates for a layer's slots."""
        like, slots = states.inputs, states.inputs.shape[:2]
        parts = cls.row(shape, like.dtype).items()
        return cls(**{name: like.new_zeros(*slots, *sides, dtype=dtype) for name, (dtype, sides) in parts})

    @classmethod
    def slot_bytes(cls, shape: DeltaShape, ring: int, dtype: torch.dtype) -> int:
        """Bytes of a slot; `dtype`: of the rows."""
        parts = cls.row(shape, dtype).values()
        return ring * sum(kind.itemsize * math.prod(sides) for kind, sides in parts)


@dataclass(frozen=True)
class DeltaLayer:
    """A layer's rule, its slots, and what kernels keep of the rows there."""

    rule: DeltaRule
    stored: LayerStates
    solved: SolvedRows


@dataclass(frozen=True)
class DeltaLayout:
    """The kernels' compile-time parameters: `block` columns of a value head to a program, and a tile of
    `rows` rows. `tree`: a row's ancestors need not be the rows before it. `pdl`: programmatic dependent
    launch. Strides are those of slots.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int
    ring: int
    block: int
    rows: int
    tree: bool
    pdl: bool
    state_stride: int
    tail_stride: int
    input_stride: int
    gate_stride: int

    @classmethod
    def of(
        cls,
        layer: DeltaLayer,
        rows: int,
        block: int,
        tree: bool = False,
        pdl: bool = False,
    ) -> DeltaLayout:
        """Raises ValueError for sizes of heads that no tile has, and for other rules."""
        rule, stored, shape = layer.rule, layer.stored, layer.rule.shape
        if type(shape) is not DeltaShape or rule.bias is not None or rule.skip is not None:
            raise ValueError("kernels of states have the gated delta rule alone")
        for size in (shape.key_size, shape.value_size):
            if size < 16 or size & (size - 1):
                raise ValueError(f"kernels of states take heads of a power of 2, 16 or more, not {size}")
        parts = (stored.states, stored.tails, stored.inputs, stored.gates)
        return cls(
            *(shape.key_heads, shape.value_heads, shape.key_size, shape.value_size, shape.kernel),
            *(stored.inputs.shape[1], min(block, shape.value_size), rows, tree, pdl),
            *(part.stride(0) for part in parts),
        )

    @property
    def slice(self) -> int:
        """Rows of a state that a program reads at a time, where it need not have the whole."""
        return min(32, self.key_size)

    @property
    def tile(self) -> int:
        """Rows of the least tile of the matrix unit that has all."""
        return max(16, self.rows)

    @property
    def scale(self) -> float:
        """Of queries."""
        return float(self.key_size**-0.5)

    @property
    def inputs(self) -> int:
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def blocks(self) -> int:
        """Programs of a value head."""
        return self.value_size // self.block

    @property
    def state(self) -> int:
        """Elements of a slot's state."""
        return self.value_heads * self.key_size * self.value_size


@triton.jit
def ticks(decay):
    """Log decays as whole numbers; below -1e5 nothing is left of a state anyway."""
    return (tl.maximum(decay, -1.0e5) * 1099511627776.0).to(tl.int64)


@triton.jit
def grown(ticks):
    """The factor by which a sum of log decays shrinks a state."""
    return tl.exp(ticks.to(tl.float32) * (1.0 / 1099511627776.0))


@triton.jit
def parts_of(x, DTYPE: tl.constexpr):
    """x float32 as the sum of two: what DTYPE has of it, and what that leaves."""
    if DTYPE == tl.bfloat16:
        high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)  # cut: much the sooner
    else:
        high = x.to(DTYPE).to(tl.float32)
    return high.to(DTYPE), (x - high).to(DTYPE)


@triton.jit
def rows_times_onto(rows, x, high, low, DTYPE: tl.constexpr):
    """high and low, sums that are added in the end, with rows [m, k] . x [k, n]; rows of DTYPE, x float32."""
    if DTYPE == tl.float32:
        return tl.dot(rows, x, high, input_precision="ieee"), low
    else:
        x_high, x_low = parts_of(x, DTYPE)
        return tl.dot(rows, x_high, high), tl.dot(rows, x_low, low)


@triton.jit
def apart(x, y):
    """x + y, of which each is a product. Written as a sum, Triton would make it one product that goes on
    where the other ends, in kernels where that begins with nothing: another number, here and there.
    """
    return tl.fma(x, tl.full(x.shape, 1.0, tl.float32), y)


@triton.jit
def rows_times(rows, x, DTYPE: tl.constexpr):
    """rows [m, k] . x [k, n], rows of DTYPE, x float32."""
    none = tl.full((rows.shape[0], x.shape[1]), 0.0, tl.float32)
    high, low = rows_times_onto(rows, x, none, none, DTYPE)
    return apart(high, low)


@triton.jit
def product_onto(x, y, high, left, right, DTYPE: tl.constexpr):
    """Three sums, which `joined` adds, with x [m, k] . y [k, n], both float32."""
    if DTYPE == tl.float32:
        return tl.dot(x, y, high, input_precision="ieee"), left, right
    else:
        x_high, x_low = parts_of(x, DTYPE)
        y_high, y_low = parts_of(y, DTYPE)
        return tl.dot(x_high, y_high, high), tl.dot(x_high, y_low, left), tl.dot(x_low, y_high, right)


@triton.jit
def joined(high, left, right):
    """What the three sums of `product_onto` amount to."""
    return apart(high, apart(left, right))


@triton.jit
def product(x, y, DTYPE: tl.constexpr):
    """x [m, k] . y [k, n], both float32."""
    none = tl.full((x.shape[0], y.shape[1]), 0.0, tl.float32)
    high, left, right = product_onto(x, y, none, none, none, DTYPE)
    return joined(high, left, right)


@triton.jit
def corrections(k, columns, beta, sums, column_sums, below):
    """-a: k [m, n] and the columns' keys [c, n]; beta and sums [m], column_sums [c]; `below` [m, c]: the
    columns before a row.
    """
    decay = grown(sums[:, None] - column_sums[None, :])
    made = tl.dot(k, tl.trans(columns), input_precision="ieee")
    return tl.where(below, -beta[:, None] * decay * made, 0.0)


@triton.jit
def readings(q, columns, scale, sums, column_sums, seen):
    """p, as `corrections`; `seen` [m, c]: the columns before a row, and its own."""
    decay = grown(sums[:, None] - column_sums[None, :])
    made = tl.dot(q, tl.trans(columns), input_precision="ieee")
    return tl.where(seen, scale * decay * made, 0.0)


@triton.jit
def solve_behind(
    solved, weights, k, q, beta, sums, keys, column_sums, column_solved, near, scale
):  # fmt: skip
    """`solved` and `weights` [m, 64] with `STEP` columns more, whose rows have been solved: their keys
    [c, n], sums [c] and `solved` [c, 64]; `near` [m, c]: those that a row has before it.
    """
    below = corrections(k, keys, beta, sums, column_sums, near)
    solved = tl.dot(below, column_solved, solved, input_precision="ieee")
    seen = readings(q, keys, scale, sums, column_sums, near)
    return solved, tl.dot(seen, column_solved, weights, input_precision="ieee")


@triton.jit
def solve_further(solved, weights, below, seen, count):
    """`solved` and `weights` [m, 64] with `count` columns more, one after the other: column c's row is row c.

    below, seen [m, c]: `corrections` and `readings` of these columns.
    """
    row = tl.arange(0, solved.shape[0])[:, None]
    column = tl.arange(0, below.shape[1])[None, :]
    for c in range(count):
        whole = tl.broadcast_to(tl.sum(tl.where(row == c, solved, 0.0), 0)[None, :], solved.shape)
        factor = tl.sum(tl.where(column == c, below, 0.0), 1)
        solved = tl.fma(tl.broadcast_to(factor[:, None], solved.shape), whole, solved)
        factor = tl.sum(tl.where(column == c, seen, 0.0), 1)
        weights = tl.fma(tl.broadcast_to(factor[:, None], solved.shape), whole, weights)
    return solved, weights


@triton.jit
def missed(values, beta, sums, known):
    """The misses of rows: values and `known`, what the state has for their keys, [m, n]; beta, sums [m]."""
    return beta[:, None] * (values.to(tl.float32) - grown(sums)[:, None] * known)


@triton.jit
def read(known, scale, sums, acc):
    """What rows read: `known`, what the state has for their queries, and acc, the sum over misses."""
    return known * (scale * grown(sums))[:, None] + acc


@triton.jit
def shares_of(solved, misses, sums, total, DTYPE: tl.constexpr):
    """What rows add to a state beside their keys, [64, n]: solved [64, 64], misses [64, n], sums [64], the
    last of which is `total`.
    """
    return product(solved, misses, DTYPE) * grown(total - sums)[:, None]


@triton.jit
def folded(state, keys, shares, total, DTYPE: tl.constexpr):
    """Rows of a state [k, n] behind as many rows as there are columns: their keys [64, k] and `shares`."""
    return state * grown(total) + rows_times(tl.trans(keys), shares, DTYPE)
