"""Tiles that cut the skinny products into programs: measured for known shapes, else by a rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from eyas.engine.kernels.launch.tile_table import TileTable

_SHARED_BYTES = 200 * 1024  # of an SM's 227 KiB, the rest for converting layouts at a program's end
MOST_STRETCHES = 4
"""Of k in exact products: more than `_rule` splits it into, there are none."""

_SMALL_BYTES = 24 << 20  # of a weight that L2 has room for beside what runs
_NARROWEST = 16  # the side of the smallest matrix instruction
MOST_SHARES = 32768
"""Columns times split of any product whose k is split: with 128 rows, 16 MiB of partial results."""

_TALLEST = 128  # rows of a product
_STEP_BYTES = 128  # of a row in a step of packed numbers
_MOST_STAGES = 8


@dataclass(frozen=True)
class ProductShape:
    """One product: out [rows, n] = x [rows, k] . weight [n, k]^T.

    `kind` is linear, gated, qkv or heads (qkv of which a tile is one head, see `skinny.qkv_kind`); `rows`
    is padded (16, 32, 64, 128; of packed numbers also 8); `span`: a tile's columns divide it, and are it
    where a tile is one head.
    """

    kind: str
    rows: int
    n: int
    k: int
    span: int


@dataclass(frozen=True)
class ProductTile:
    """A program's share: `columns` weight rows, by `depth` of k at a time, `stages` steps in flight.

    `split` programs share a tile's k. `ahead`: elements of each weight row, a power of two, that L2 is asked
    for while the kernel before still runs. The matrix unit takes 64 weight rows at once; gated, whose columns
    are two blocks, has 128. `folds`: stretches of k that one program adds up side by side, each on its own.
    `shares_k`: each warp has all columns, and steps of k of its own (packed numbers of four bits, few rows).
    """

    columns: int
    depth: int
    warps: int
    stages: int
    split: int = 1
    ahead: int = 0
    folds: int = 1
    shares_k: bool = False


@dataclass(frozen=True)
class PackedStep:
    """The part of a row that a product of packed numbers takes at a time: `unit` words of `parts` numbers and
    `size` bytes each. `form`: the format; "" and no unit: numbers are not packed.
    """

    form: str = ""
    unit: int = 0
    parts: int = 1
    size: int = 0

    @property
    def columns(self) -> int:
        """The numbers in it."""
        return self.unit * self.parts


Key = tuple[str, int, int, int]
"""Of a tile: the kind of its product, rows, n and k."""
Table = Mapping[Key, ProductTile]
PACKED_TILES: TileTable[Key, ProductTile] = TileTable(
    ProductTile, ("kind", "rows", "n", "k"), "products", "-int4"
)
"""The tiles of products with packed weights, as `eyas tune int4` or a first start measured them."""

MEASURED: Table = {
    ("gated", 128, 28672, 4096): ProductTile(columns=128, depth=64, warps=4, stages=3),
    ("gated", 16, 28672, 4096): ProductTile(columns=128, depth=64, warps=4, stages=5, ahead=128),
    ("gated", 32, 28672, 4096): ProductTile(columns=128, depth=128, warps=4, stages=5, ahead=256),
    ("gated", 64, 28672, 4096): ProductTile(columns=128, depth=128, warps=4, stages=4, ahead=256),
    ("linear", 128, 128256, 4096): ProductTile(columns=128, depth=64, warps=4, stages=3),
    ("linear", 128, 32000, 4096): ProductTile(columns=128, depth=64, warps=8, stages=3),
    ("linear", 128, 4096, 12288): ProductTile(columns=64, depth=128, warps=4, stages=4, split=2),
    ("linear", 128, 4096, 14336): ProductTile(columns=64, depth=128, warps=4, stages=4, split=2),
    ("linear", 128, 4096, 4096): ProductTile(columns=64, depth=128, warps=8, stages=4, split=2),
    ("linear", 16, 128256, 4096): ProductTile(columns=64, depth=128, warps=4, stages=5),
    ("linear", 16, 32000, 4096): ProductTile(columns=64, depth=128, warps=4, stages=5),
    ("linear", 16, 4096, 12288): ProductTile(columns=64, depth=256, warps=4, stages=5),
    ("linear", 16, 4096, 14336): ProductTile(columns=64, depth=256, warps=4, stages=5, ahead=512),
    ("linear", 16, 4096, 4096): ProductTile(columns=64, depth=128, warps=4, stages=5, ahead=512),
    ("linear", 32, 128256, 4096): ProductTile(columns=128, depth=64, warps=4, stages=5),
    ("linear", 32, 32000, 4096): ProductTile(columns=128, depth=64, warps=8, stages=5),
    ("linear", 32, 4096, 12288): ProductTile(columns=64, depth=256, warps=4, stages=4),
    ("linear", 32, 4096, 14336): ProductTile(columns=64, depth=128, warps=4, stages=8, ahead=512),
    ("linear", 32, 4096, 4096): ProductTile(columns=64, depth=256, warps=4, stages=4, ahead=256),
    ("linear", 64, 128256, 4096): ProductTile(columns=128, depth=128, warps=8, stages=4),
    ("linear", 64, 32000, 4096): ProductTile(columns=128, depth=128, warps=4, stages=4),
    ("linear", 64, 4096, 12288): ProductTile(columns=64, depth=256, warps=4, stages=3, split=2),
    ("linear", 64, 4096, 14336): ProductTile(columns=64, depth=256, warps=4, stages=3, split=2, ahead=256),
    ("linear", 64, 4096, 4096): ProductTile(columns=64, depth=128, warps=4, stages=6, split=2, ahead=256),
    ("qkv", 128, 6144, 4096): ProductTile(columns=64, depth=128, warps=4, stages=4, ahead=256),
    ("qkv", 128, 6144, 8192): ProductTile(columns=64, depth=128, warps=4, stages=4, ahead=256),
    ("linear", 16, 201088, 2880): ProductTile(columns=64, depth=256, warps=4, stages=5, ahead=256),
    ("qkv", 16, 5120, 2880): ProductTile(columns=64, depth=64, warps=4, stages=11, split=3, ahead=512),
    ("qkv", 32, 5120, 2880): ProductTile(columns=32, depth=128, warps=2, stages=6, ahead=512),
    ("qkv", 16, 6144, 4096): ProductTile(columns=64, depth=128, warps=4, stages=5, ahead=256),
    ("qkv", 16, 6144, 8192): ProductTile(columns=64, depth=128, warps=4, stages=5, ahead=256),
    ("qkv", 32, 6144, 4096): ProductTile(columns=64, depth=256, warps=4, stages=4, ahead=256),
    ("qkv", 32, 6144, 8192): ProductTile(columns=64, depth=256, warps=4, stages=4, ahead=256),
    ("qkv", 64, 6144, 4096): ProductTile(columns=64, depth=128, warps=4, stages=6, ahead=128),
    ("qkv", 64, 6144, 8192): ProductTile(columns=64, depth=128, warps=4, stages=6, ahead=256),
}


MEASURED_INT4: Table = {
    ("int4 gated", 8, 28672, 4096): ProductTile(columns=64, depth=256, warps=4, stages=3, ahead=128),
    ("int4 linear", 8, 4096, 4096): ProductTile(
        columns=32, depth=256, warps=4, stages=4, split=2, ahead=256, shares_k=True
    ),
    ("int4 linear", 8, 4096, 14336): ProductTile(columns=64, depth=256, warps=4, stages=3, split=8, ahead=64),
    ("int4 qkv", 8, 6144, 4096): ProductTile(columns=64, depth=256, warps=4, stages=3, split=4, ahead=64),
    ("int4 gated", 16, 28672, 4096): ProductTile(columns=128, depth=256, warps=4, stages=4, ahead=64),
    ("int4 gated", 32, 28672, 4096): ProductTile(columns=128, depth=256, warps=4, stages=3, ahead=64),
    ("int4 linear", 16, 4096, 4096): ProductTile(columns=64, depth=256, warps=4, stages=3, split=4),
    ("int4 linear", 16, 4096, 14336): ProductTile(
        columns=128, depth=256, warps=4, stages=3, split=8, ahead=64
    ),
    ("int4 linear", 32, 4096, 4096): ProductTile(
        columns=64, depth=256, warps=4, stages=4, split=4, ahead=128
    ),
    ("int4 linear", 32, 4096, 14336): ProductTile(
        columns=64, depth=256, warps=4, stages=4, split=4, ahead=128
    ),
    ("int4 gated", 64, 28672, 4096): ProductTile(columns=64, depth=256, warps=4, stages=3, ahead=128),
    ("int4 linear", 64, 4096, 4096): ProductTile(
        columns=64, depth=256, warps=4, stages=3, split=4, ahead=128
    ),
    ("int4 linear", 64, 4096, 14336): ProductTile(
        columns=64, depth=256, warps=4, stages=3, split=4, ahead=128
    ),
    ("int4 heads", 64, 6144, 4096): ProductTile(
        columns=128, depth=256, warps=8, stages=3, split=2, ahead=128
    ),
    ("int4 qkv", 16, 6144, 4096): ProductTile(columns=64, depth=256, warps=4, stages=4, split=4, ahead=128),
    ("int4 qkv", 32, 6144, 4096): ProductTile(columns=64, depth=256, warps=4, stages=3, split=4, ahead=64),
}
"""The same with an `Int4Weight`, whose kinds are "int4 " and the product's; other formats have theirs."""


def tile_for(shape: ProductShape, itemsize: int, table: Table = MEASURED) -> ProductTile:
    """The tile of a product of elements of `itemsize` bytes, always one that fits the shape and an SM.

    Raises ValueError if a side is not a multiple of 16.
    """
    tile = table.get((shape.kind, shape.rows, shape.n, shape.k)) or _rule(shape)
    split = tile.split
    if split * shape.n > MOST_SHARES or shape.k % (split * _NARROWEST):
        split = 1
    return _fitted(replace(tile, split=split), shape, itemsize)


def exact_tile_for(shape: ProductShape, itemsize: int, table: Table = MEASURED) -> ProductTile:
    """The tile of `tile_for`, with k cut into the stretches of `stretches_of`, whatever the number of rows.

    Where `tile_for` would leave both stretches to one program, that program takes them side by side, if there
    are few rows; with more, two programs are faster. Beside few rows L2 is asked for all of a small weight
    before: a state's heads take as long as reading it.
    """
    tile = table.get((shape.kind, shape.rows, shape.n, shape.k)) or _rule(shape)
    stretches = stretches_of(shape)
    side_by_side = stretches == 2 and tile.split == 1 and shape.kind == "linear"
    if side_by_side and shape.rows > _NARROWEST:
        tile = replace(_rule(shape), split=stretches)
    elif side_by_side:
        # A step of both stretches has the bytes of one before.
        tile = replace(tile, folds=2, depth=max(tile.depth // 2, _NARROWEST))
    else:
        tile = replace(tile, split=stretches)
    small = shape.n * shape.k * itemsize <= _SMALL_BYTES and tile.columns > _NARROWEST
    if small and shape.rows == _NARROWEST and shape.kind == "linear":
        tile = replace(tile, ahead=shape.k)
    return _fitted(tile, shape, itemsize)


def packed_tile_for(
    shape: ProductShape, step: PackedStep, itemsize: int, table: Table = MEASURED_INT4, *, exact: bool = False
) -> ProductTile:
    """The tile of a product with packed numbers; `exact`: with k cut into the stretches of `stretches_of`.

    x takes most of a step's memory where rows are many. `depth` is that step.
    """
    key = f"{step.form} {shape.kind}", shape.rows, shape.n, shape.k
    tile, depth = table.get(key) or _packed_rule(shape, step), step.columns
    split = min(tile.split, -(-shape.k // depth))
    if split * shape.n * shape.rows > MOST_SHARES * _TALLEST:
        split = 1
    if exact:
        split = stretches_of(shape)
    columns = shape.span if shape.kind == "heads" else math.gcd(tile.columns, shape.span)
    if columns // (2 if shape.kind == "gated" else 1) < _NARROWEST:
        raise ValueError(f"{shape} has a side that is not a multiple of {_NARROWEST}")
    shares = tile.shares_k and not exact
    together = tile.warps if shares else 1  # steps
    a_step = step.unit * step.size * columns + depth * itemsize * shape.rows
    stages = max(min(tile.stages, _SHARED_BYTES // (a_step * together)), 1)
    even = -(-shape.k // depth) % (split * together) == 0
    ahead = min(tile.ahead, 1 << (shape.k // split // step.parts).bit_length() - 1) if even else 0
    made = replace(tile, columns=columns, depth=depth, stages=stages, split=split, ahead=ahead)
    return replace(made, shares_k=shares)


def _packed_rule(shape: ProductShape, step: PackedStep) -> ProductTile:
    """Two programs for every SM: each warp waits for the matrix unit at every group. Where steps are short,
    more of them are in flight. Beside 64 rows narrow tiles of four bits are faster, as measured.
    """
    columns = 128 if shape.kind == "gated" or shape.rows > 32 else 64
    if step.form == "int4" and shape.rows == 64:
        columns = 64
    programs = shape.n // columns
    split = 1 if programs >= 128 else 2 if programs >= 112 else 4
    warps = 8 if shape.rows * columns > 8192 else 4
    stages = (4 if shape.rows <= 16 else 3) * max(_STEP_BYTES // (step.unit * step.size), 1)
    return ProductTile(columns, 0, warps, min(stages, _MOST_STAGES), split, ahead=64)


def stretches_of(shape: ProductShape) -> int:
    """The number of equal stretches into which the exact arithmetic cuts k: by the weight alone, never by the
    rows.

    Each stretch is added up from its beginning to its end, then they are, in order. A product of many rows
    pays for each by a pass over its results; one of few rows gains programs. So where k is longer than n
    there are as many as the tallest narrow product wants (with one, reading x into half of the SMs would bind
    it), else as many as the products of the fewest rows want.
    """
    split = _rule(replace(shape, rows=128 if shape.k > shape.n else 16)).split
    return 1 if split * shape.n > MOST_SHARES or shape.k % (split * _NARROWEST) else split


def _fitted(tile: ProductTile, shape: ProductShape, itemsize: int) -> ProductTile:
    """The tile with columns, depth, stages and lines ahead that suit the shape and fit an SM.

    Of a whole k the last step may lie beyond it in part: what is not there counts as zeros. Steps of a part
    must divide it; where they are shorter for that, more of them are in flight.
    """
    parts = tile.split * tile.folds
    stretch = shape.k // parts
    columns = shape.span if shape.kind == "heads" else math.gcd(tile.columns, shape.span)
    depth = math.gcd(tile.depth, stretch)
    if parts == 1 and tile.depth < stretch:
        depth = tile.depth
    if min(columns // (2 if shape.kind == "gated" else 1), depth) < _NARROWEST:
        raise ValueError(f"{shape} has a side that is not a multiple of {_NARROWEST}")
    most = _SHARED_BYTES // ((columns + shape.rows) * depth * tile.folds * itemsize)
    stages = min(tile.stages * tile.depth // depth, most)
    ahead = min(tile.ahead, 1 << stretch.bit_length() - 1)
    return replace(tile, columns=columns, depth=depth, stages=max(stages, 1), ahead=ahead)


def _rule(shape: ProductShape) -> ProductTile:
    """Half as many programs as SMs are enough; then wide tiles, since every program reads all of x."""
    columns = 128 if shape.kind == "gated" or shape.n >= 8192 else 64
    if shape.kind == "heads":
        columns = shape.span
    programs = shape.n // columns
    split = 1 if programs >= (64 if shape.rows <= 32 else 96) else 2 if programs >= 32 else 4
    # For the registers of what follows the product.
    warps = 8 if shape.rows == 128 or shape.rows * columns > 8192 else 4
    return ProductTile(columns, 64 if columns >= 128 else 128, warps, stages=5, split=split, ahead=256)
