"""Rules that cut attention over latents into programs, by the number of rows and of programs.

A program's results are 512 columns wide in float32, so that 64 rows are all that the registers of eight warps
hold.
"""

from __future__ import annotations

from eyas.engine.kernels.attention.attend_tiles import AttentionTiling
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2

MOST_ROWS = 64
"""Of a program: queries times heads."""

MOST_PARTS = 64
_LEAST, _LEAST_OF_FEW = 128, 64
_FEW = 8  # rows of a step

_PROGRAMS = (264, 132)  # of 16 rows two for each multiprocessor, of more one: there is no room for a second
_KEYS = 32
_ALONE = 8  # sequences, of which a step has no more: more warps for each, measured on an H200
_FEWEST = 2  # of which more are cut into two pieces, others into four


def latent_tiling_of(batch: int, rows: int) -> AttentionTiling:
    """The tiling for `batch` sequences of `rows` = width * heads rows, all of which read the same latents."""
    tile = tile_of(rows)
    programs = batch * cdiv(rows, tile)
    target = _PROGRAMS[tile > 16] // programs
    parts = min(MOST_PARTS, 1 << max(target, 1).bit_length() - 1)
    if tile == 16 and batch <= _ALONE:
        return AttentionTiling(tile, 2 * _KEYS, parts, warps=8, stages=2)
    return AttentionTiling(tile, _KEYS, parts, warps=4 if tile == 16 else 8, stages=3)


def least_part(rows: int) -> int:
    """The fewest keys of a part in a step of `rows` rows: parts of few rows are cheap to add up."""
    return _LEAST_OF_FEW if rows <= _FEW else _LEAST


def piece_of(latent: int, tile: int, batch: int) -> int:
    """Elements of latents that the matrix unit adds up by themselves, for programs of `tile` rows in a step
    of `batch` sequences: of 16 rows, one sum of 512 elements waits for itself 32 times.
    """
    pieces = 1 if tile > 16 else 2 if _FEWEST < batch <= _ALONE else 4
    return max(latent // pieces, 16)


def latent_chunk_tiling(heads: int) -> AttentionTiling:
    """The tiling for chunks of prompts: a tile's keys are one program's."""
    tile = tile_of(heads * latent_tile_rows(heads))
    return AttentionTiling(tile, _KEYS, 1, warps=4 if tile == 16 else 8, stages=3)


def latent_tile_rows(heads: int) -> int:
    """The most query rows of one tile of a chunk, for callers that cut chunks into tiles."""
    return max(1, MOST_ROWS // heads)


def tile_of(rows: int) -> int:
    """Rows of a program, where `rows` rows share the keys."""
    return min(MOST_ROWS, max(16, power_of_2(rows)))
