"""Tiles that cut grouped products into programs: measured for known shapes, else by a rule.

`eyas tune` measures, and writes a file for each kind of GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from eyas.engine.kernels.launch.sizes import power_of_2
from eyas.engine.kernels.launch.tile_table import TileTable

_SHARED_BYTES = 200 * 1024
SHORT = 2
"""Steps of k, up to which a tile has no loop of its own."""
_SHORT = 512  # of a product whose tiles end before they have begun: more of them stand beside each other
_BESIDE = 4  # programs on an SM, at most
_PROGRAMS = 132  # about as many as a Hopper GPU has SMs
_ENOUGH = _PROGRAMS * 3 // 4
_CROWDED = 8 * _PROGRAMS  # programs of packed products of few rows, which wait for each other at every step
_PACKED_PROGRAMS = 10 * _PROGRAMS  # of two warps, which an SM has room for at once
_FEW_BLOCKS, _FEWEST_ROWS, _MOST_PACKED_PARTS = 32, 8, 6
_MATRIX_SIDE = 64  # weight rows that the matrix unit takes at once
_STRETCH_UNIT = 128  # the deepest step of k within a stretch
_LINE = 128  # bytes
_MOST_LINES = 8
MOST_PARTS = 32768 * 128
"""Numbers that programs which share a tile's k may leave behind, all together
(`skinny.ProductLaunch.partials`)."""
MOST_TICKETS = 32768


@dataclass(frozen=True)
class GroupedShape:
    """x [choices, k] . weight [experts, n, k]^T, each choice by its expert; 1 expert: a dense product.

    `gated`: the n rows are a gate's and then as many of what it multiplies. `itemsize`: bytes of a
    number; 0: it has four bits.
    """

    experts: int
    n: int
    k: int
    gated: bool
    itemsize: int

    @property
    def outputs(self) -> int:
        """Columns of the result."""
        return self.n // 2 if self.gated else self.n


@dataclass(frozen=True)
class GroupedTile:
    """A program's share: `columns` of the result for `rows` choices, by `depth` of k at a time.

    `split` programs share a tile's k. `group`: blocks of rows that follow each other before the next columns
    (their weights are then in L2). `stages` steps of k are in flight.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    split: int = 1
    group: int = 8


Key = tuple[int, int, int, bool, int, int]
"""Of a tile: its shape, and the number of choices rounded up to a power of two."""
Table = Mapping[Key, GroupedTile]
TILES: TileTable[Key, GroupedTile] = TileTable(
    GroupedTile, ("experts", "n", "k", "gated", "itemsize", "choices"), "experts"
)


def key_of(shape: GroupedShape, choices: int) -> Key:
    """The tile's key in a table."""
    bucket = power_of_2(max(choices, 16))
    return shape.experts, shape.n, shape.k, shape.gated, shape.itemsize, bucket


def tile_for(shape: GroupedShape, choices: int, table: Table, rows: int = 0) -> GroupedTile:
    """A tile that fits the shape and an SM; with `rows`, if they are given.

    Raises ValueError if a side is not a multiple of 16.
    """
    if shape.outputs % 16 or shape.k % 16:
        raise ValueError(f"{shape} has a side that is not a multiple of 16")
    if not shape.itemsize:
        tile = table.get(key_of(shape, choices)) or _packed_rule(shape, choices, rows)
        return replace(tile, rows=rows or tile.rows)
    tile = table.get(key_of(shape, choices)) or _rule(shape, choices, rows)
    return fitted(replace(tile, rows=rows or tile.rows), shape, choices)


def tile_over(shape: GroupedShape, choices: int, table: Table, rows: int) -> GroupedTile:
    """The tile of experts' `down` for blocks of `rows` rows: it may have more, which then stand empty.

    Where few rows meet a short k, weights are what takes the time, and lie better on the matrix unit's short
    side, beside rows that come as they do: 133 us for 169 at 128 rows of 256 experts, on an H200.
    """
    few = shape.itemsize == 2 and shape.experts > 1 and shape.k <= _SHORT and rows < _MATRIX_SIDE
    if not few:
        return tile_for(shape, choices, table, rows)
    return fitted(GroupedTile(_MATRIX_SIDE, 128, 64, warps=4, stages=4), shape, choices)


def exact_tile_for(shape: GroupedShape, choices: int, table: Table, rows: int = 0) -> GroupedTile:
    """The tile of `tile_for`, with k cut into the stretches of `stretches_of`, by as many programs or by one.

    The numbers that it leaves to the rows change no bit of a row: how many of them, how many columns and how
    much of k a tile takes at a time.
    """
    tile, stretches = tile_for(shape, choices, table, rows), stretches_of(shape)
    columns = max(tile.columns, _MATRIX_SIDE)
    depth = min(tile.depth, _STRETCH_UNIT) if stretches > 1 else tile.depth
    split = stretches if tile.split > 1 else 1
    return fitted(replace(tile, columns=columns, depth=depth, split=split), shape, choices)


def stretches_of(shape: GroupedShape) -> int:
    """The number of stretches, one or two, into which the exact arithmetic cuts k: by the weight alone.

    Two of a dense weight that is too narrow for as many programs as a GPU has room for.
    """
    narrow = shape.experts == 1 and -(-shape.outputs // _MATRIX_SIDE) < _ENOUGH
    return 2 if narrow and shape.k > _SHORT and shape.k % (2 * _STRETCH_UNIT) == 0 else 1


def most_blocks(choices: int, experts: int, rows: int) -> int:
    """The most blocks of `rows` rows, each of one expert, into which the choices can fall."""
    touched = min(choices, experts)
    return touched + (choices - touched) // rows


def fitted(tile: GroupedTile, shape: GroupedShape, choices: int) -> GroupedTile:
    """A copy with columns, depth, stages and split that the shape and an SM allow."""
    blocked = shape.itemsize == 1
    columns = min(tile.columns, 128, power_of_2(shape.outputs))
    depth = 128 if blocked else min(tile.depth, power_of_2(shape.k))
    weights = 2 if shape.gated else 1
    step = depth * (columns * weights + tile.rows) * shape.itemsize
    split = tile.split
    programs = most_blocks(choices, shape.experts, tile.rows) * -(-shape.outputs // columns)
    parts = programs * columns * tile.rows * weights
    while split > 1 and (split * parts > MOST_PARTS or programs > MOST_TICKETS or shape.k % (split * depth)):
        split //= 2
    steps = -(-shape.k // (max(split, 1) * depth))
    in_flight = step * (steps if steps <= SHORT else 1)
    stages = max(min(tile.stages, _SHARED_BYTES // in_flight), 1)
    return replace(tile, columns=columns, depth=depth, stages=stages, split=max(split, 1))


def lines_ahead(shape: GroupedShape, tile: GroupedTile) -> int:
    """The number of lines of a weight row that a program calls into L2 before it may begin: where few rows
    read it, the product's time is that of its weights.
    """
    if tile.rows > 32:
        return 0
    lines = max(shape.k // tile.split * shape.itemsize // _LINE, 1)
    return min(1 << (lines.bit_length() - 1), _MOST_LINES)


def steps_together(shape: GroupedShape, tile: GroupedTile) -> int:
    """The number of steps of k that a program asks for at once, 1 or 2: the lines of a weight row that lie
    beside each other then come one behind the other, as memory gives them fastest. No bit follows it.

    Two of experts' gate and up in FP8 where few rows meet them: on an H200 a layer of 256 experts takes
    435 us for 438 at 128 rows.
    """
    by_weights = shape.gated and shape.experts > 1 and shape.itemsize == 1 and tile.rows <= 16
    wide = tile.columns == _STRETCH_UNIT and tile.stages > 4
    return 2 if by_weights and wide and shape.k % (2 * tile.split * tile.depth) == 0 else 1


def programs(tile: GroupedTile, shape: GroupedShape) -> int:
    """The number of a split's programs that a GPU runs at a time: more would only wait."""
    weights = 2 if shape.gated else 1
    step = tile.depth * (tile.columns * weights + tile.rows) * shape.itemsize
    beside = max(_SHARED_BYTES // (step * tile.stages), 1)
    return -(-_PROGRAMS * min(beside, _BESIDE, 16 // tile.warps) // tile.split)


def _rule(shape: GroupedShape, choices: int, rows: int = 0) -> GroupedTile:
    """Few rows: weights are read once, by enough programs. Many: square tiles, as long as they are enough."""
    touched = min(choices, shape.experts)
    each = -(-choices // touched)
    few = 16 if shape.itemsize == 2 and not rows else 32
    if shape.experts > 1 and (rows or each) > few:
        return _tall(shape, rows or _tall_rows(shape, each))
    rows = rows or (16 if each <= 16 else 32 if each <= 32 else 64 if each <= 96 else 128)
    if rows == 128:
        square = 128 if not shape.gated and shape.k > _SHORT else 64
        columns = square if _count(shape, choices, rows, square) >= _ENOUGH else 64
        split = _split(_count(shape, choices, rows, columns))
        return GroupedTile(rows, columns, 64, 8 if shape.k > _SHORT else 4, stages=4, split=split)
    columns, depth = 64, 64 if shape.gated and shape.itemsize > 1 else 128
    if shape.gated and shape.itemsize == 1 and rows <= 32:
        columns = 128  # all that shares a scale of what the gate passes: the program rounds it
    programs = _count(shape, choices, rows, columns)
    if programs > _BESIDE * _PROGRAMS and not shape.gated and rows <= 32:
        columns, programs = 128, programs // 2
        depth = 128 // shape.itemsize  # so that two stand beside each other
    split = _split(programs)
    beside = programs * split > _PROGRAMS and shape.gated and columns == 128
    return GroupedTile(rows, columns, depth, 4, stages=3 if beside and split > 1 else 5, split=split)


def _tall(shape: GroupedShape, rows: int) -> GroupedTile:
    """The tile where each expert has many rows. Numbers in FP8 have two sums of a tile, of which not both are
    wide.
    """
    tall = rows > _MATRIX_SIDE
    columns = 64 if tall and shape.gated and shape.itemsize == 1 else 128
    stages = 4 if shape.gated or not tall else 3  # two programs of `down` stand beside each other
    return GroupedTile(rows, columns, 128 // shape.itemsize, warps=8, stages=stages)


def _tall_rows(shape: GroupedShape, each: int) -> int:
    """Rows of a block: numbers of 16 bits have tiles of half of 128 for a last block that is half empty."""
    return 128 if each > _MATRIX_SIDE and shape.itemsize == 2 else 64


def _packed_rule(shape: GroupedShape, choices: int, rows: int = 0) -> GroupedTile:
    """The tile of packed numbers, which are widened for every block of rows that meets them."""
    each = -(-choices // min(choices, shape.experts))
    rows = rows or (8 if each <= 5 else 16 if each <= 12 else 32 if each <= 24 else 64 if each <= 96 else 128)
    if rows >= _MATRIX_SIDE:
        return GroupedTile(rows, 128, 128, warps=8, stages=3)
    if rows <= _FEWEST_ROWS and most_blocks(choices, shape.experts, rows) <= _FEW_BLOCKS:
        return _few_packed(shape, choices, rows)
    split, programs = 1, _count(shape, choices, rows, 64 if shape.gated else 128)
    while split < 4 and programs * split < 2 * _PROGRAMS:
        split *= 2
    if rows <= _FEWEST_ROWS and split == 1:
        return GroupedTile(rows, 128 if shape.gated else 64, 128, warps=4 if shape.gated else 2, stages=3)
    return GroupedTile(rows, 128, 128, warps=4, stages=4, split=split)


def _few_packed(shape: GroupedShape, choices: int, rows: int) -> GroupedTile:
    """The tile of few blocks of few rows: narrow, with parts of k, until the SMs have enough programs."""
    programs = _count(shape, choices, rows, 32 if shape.gated else 64)
    if programs >= _CROWDED:
        return GroupedTile(rows, 64, 128, warps=4 if shape.gated else 2, stages=4 if shape.gated else 6)
    if shape.gated:
        split = min(-(-_PACKED_PROGRAMS // programs), _MOST_PACKED_PARTS, -(-shape.k // _STRETCH_UNIT))
        return GroupedTile(rows, 64, 128, warps=2, stages=3, split=split)
    programs = _count(shape, choices, rows, 128)
    split = min(-(-_CROWDED // programs), _MOST_PACKED_PARTS, -(-shape.k // _STRETCH_UNIT))
    return GroupedTile(rows, 128, 128, warps=4, stages=3, split=split)


def _count(shape: GroupedShape, choices: int, rows: int, columns: int) -> int:
    """The number of tiles."""
    return most_blocks(choices, shape.experts, rows) * -(-shape.outputs // columns)


def _split(programs: int) -> int:
    """The number of parts into which k is cut, for enough programs."""
    split = 1
    while split < 8 and programs * split < _ENOUGH:
        split *= 2
    return split
