"""The one order in which kernels of states add up a row, whichever does it, and beside whom.

Rows stand in columns: number `SPAN` of them behind a state's position, a row's ancestors in order. With G
the sum of a row's log decays from the state on, S the state, and j the columns before a row i or its own:

    a_ij    = beta_i exp(G_i - G_j) k_i k_j, below the diagonal       solved = (1 + a)^-1, row by row
    miss_i  = beta_i (v_i - exp(G_i) S^T k_i)                         (of a row and the state alone)
    added_i = sum_j solved_ij miss_j           (in a state space model, which corrects nothing, beta_i v_i)
    p_ij    = scale exp(G_i - G_j) q_i k_j
    out_i   = scale exp(G_i) S^T q_i + sum_j p_ij added_j
    S'      = exp(G_63) S + sum_j exp(G_63 - G_j) k_j added_j         (of 64 certain rows)

which is the recurrence row by row, rearranged. A row's `solved`, miss, G and what it adds follow from the
state and from its ancestors, and are made once; neither the kernel nor the rows beside them change a bit.
* Products are those of the matrix unit, whose order is that of `tensor_core`'s model: left to right in groups
  of 16, and nothing of a tile plays a part. What is a row's own is rounded to the rows' dtype before them, as
  keys and values are; a state is the sum of two such numbers, each of which has a sum of its own. Sums over
  what rows add, and S', go on where the part that stands before them ends.
* `solved` is a left fold of fused multiply-adds over columns, so that a row adds its certain ancestors, then
  those of this step, on whatever path.
* G is a whole number of 2^-40: sums of such have no order, and far from the state its differences are exact.
Rows of float32 are multiplied in float32 (the CPU's interpreter; on a GPU slow).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.states.delta import DeltaRule
from eyas.engine.states.shape import SPAN, DeltaShape
from eyas.engine.states.store import LayerStates

COLUMNS = tl.constexpr(SPAN)
STEP = tl.constexpr(16)
"""Columns that are taken at a time."""


@dataclass(frozen=True)
class SolvedRows:
    """Rows as kernels keep them in one layer's ring, row r of a slot in place r % ring; see above.

    keys [slots, ring, key heads, key size], as the rule reads them; added and misses [slots, ring, value
    heads, value size]: all three of the rows' dtype; solved float32 [slots, ring, value heads, SPAN]; sums
    int64 [slots, ring, value heads]: of log decays. Of a rule that does not correct, misses and solved are
    empty. They follow from the ring's rows, and a prompt's kernels make them again; rows of an accepted path
    move with those of the ring (`rings`).
    """

    keys: torch.Tensor
    added: torch.Tensor
    misses: torch.Tensor
    solved: torch.Tensor
    sums: torch.Tensor

    @staticmethod
    def row(shape: DeltaShape, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The dtype and the sides of a row of each part; `dtype`: of the rows."""
        kinds = {"solved": torch.float32, "sums": torch.int64}
        return {name: (kinds.get(name, dtype), sides) for name, sides in shape.solved.items()}

    @classmethod
    def on(cls, states: LayerStates, shape: DeltaShape) -> SolvedRows:
        """Allocates for a layer's slots."""
        like, slots = states.inputs, states.inputs.shape[:2]
        parts = cls.row(shape, like.dtype).items()
        return cls(**{name: like.new_zeros(*slots, *sides, dtype=dtype) for name, (dtype, sides) in parts})


@dataclass(frozen=True)
class DeltaLayer:
    """A layer's rule, its slots, and what kernels keep of the rows there."""

    rule: DeltaRule
    stored: LayerStates
    solved: SolvedRows


@dataclass(frozen=True)
class DeltaLayout:
    """The kernels' compile-time parameters: `block` columns of a value head to a program, and no sequence has
    more than `width` rows. `tree`: a row's ancestors need not be the rows before it. `pdl`: programmatic
    dependent launch. `corrects`, `bias`, `skip`: what the rule has. Strides are those of slots.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int
    corrects: bool
    bias: bool
    skip: bool
    ring: int
    block: int
    width: int
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
        width: int,
        block: int,
        tree: bool = False,
        pdl: bool = False,
    ) -> DeltaLayout:
        """Raises ValueError for sizes of heads that no tile has, and for other rules."""
        rule, stored, shape = layer.rule, layer.stored, layer.rule.shape
        if shape.key_size < 16 or shape.key_size & (shape.key_size - 1):
            raise ValueError(f"kernels of states take keys of a power of 2, 16 or more, not {shape.key_size}")
        if shape.value_size % 16:
            raise ValueError(f"kernels of states take values of a multiple of 16, not {shape.value_size}")
        parts = (stored.states, stored.tails, stored.inputs, stored.gates)
        return cls(
            *(shape.key_heads, shape.value_heads, shape.key_size, shape.value_size, shape.kernel),
            shape.corrects,
            rule.bias is not None,
            rule.skip is not None,
            *(stored.inputs.shape[1], min(block, power_of_2(shape.value_size)), width, tree, pdl),
            *(part.stride(0) for part in parts),
        )

    @property
    def cache_key(self) -> str:
        """The key by which Triton keeps compiled kernels; of itself it would not see other numbers below."""
        made = (self.slice, self.tile, self.factors, self.scale, self.inputs, self.values, self.blocks)
        return f"{self} {made}"

    @property
    def slice(self) -> int:
        """Rows of a state that a program reads at a time, where it need not have the whole."""
        return 16

    @property
    def tile(self) -> int:
        """Rows of a tile that has all of a sequence's rows twice: by their keys, then by their queries."""
        return 2 * max(8, self.width)

    @property
    def factors(self) -> int:
        """Numbers of a row beside a head, while few rows are made: see `few_rows.factors_of`."""
        return 2 * SPAN + self.width

    @property
    def scale(self) -> float:
        """The scale of queries."""
        return float(self.key_size**-0.5) if self.corrects else 1.0

    @property
    def inputs(self) -> int:
        """Columns of the convolution."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def values(self) -> int:
        """Columns of a tile that has a whole value head."""
        return power_of_2(self.value_size)

    @property
    def blocks(self) -> int:
        """Programs of a value head."""
        return cdiv(self.value_size, self.block)


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
def apart(high, low):
    """high + low, of two products. Written as a sum, Triton would make it one product onto the other where
    that begins with nothing, and so here and there another number.
    """
    return tl.fma(high, tl.full(high.shape, 1.0, tl.float32), low)


@triton.jit
def rows_times(rows, x, DTYPE: tl.constexpr):
    """rows [m, k] . x [k, n], rows of DTYPE, x float32. One product of both parts side by side, joined and
    split by columns, gave an H200 wrong numbers.
    """
    none = tl.full((rows.shape[0], x.shape[1]), 0.0, tl.float32)
    high, low = rows_times_onto(rows, x, none, none, DTYPE)
    return apart(high, low)


@triton.jit
def product(x, y):
    """x [m, k] . y [k, n], both of the rows' dtype: float32."""
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def weighed(rows, columns, factor, sums, column_sums, near):
    """factor_i exp(G_i - G_j) times the products of keys or queries `rows` [m, k] and of the columns' keys
    [c, k]: [m, c], and 0 for columns that are not `near` [m, c]; factor and sums [m], column_sums [c].
    """
    decay = grown(sums[:, None] - column_sums[None, :])
    return tl.where(near, factor[:, None] * decay * product(rows, tl.trans(columns)), 0.0)


@triton.jit
def missed(values, beta, sums, known):
    """The misses of rows: values and `known`, what the state has for their keys, [m, n]; beta, sums [m]."""
    return (beta[:, None] * (values.to(tl.float32) - grown(sums)[:, None] * known)).to(values.dtype)


@triton.jit
def read(known, scale, sums):
    """What rows read of a state, [m, n], onto which goes what rows have added since: `known`, what the state
    has for their queries.
    """
    return known * (scale * grown(sums))[:, None]


@triton.jit
def folded(state, keys, added, sums, total):
    """Rows of a state [k, n] behind as many rows as there are columns: their keys [64, k], what they add
    [64, n], and their sums [64], the last of which is `total`.
    """
    shares = (added.to(tl.float32) * grown(total - sums)[:, None]).to(added.dtype)
    return tl.dot(tl.trans(keys), shares, state * grown(total), input_precision="ieee")
