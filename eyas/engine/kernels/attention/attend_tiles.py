"""Rules that cut split-KV attention into programs, measured, by the number of rows and of programs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eyas.engine.kernels.attention.paged import keys_at_a_time
from eyas.engine.kernels.launch.sizes import cdiv, padded_batch, power_of_2

# (programs of few rows, at most; parts that each of them is cut into). Measured on an H200, the longest
# sequences first: parts let the others help with those; adding them up costs more where rows are more.
_PARTS = ((16, 16), (160, 8), (224, 6), (384, 4), (512, 3))
NARROW, WIDE_ROWS = 256, 32
"""Values of a head: of wider ones registers have room for these rows of a program."""

SPARE, LONG = 8, 512
"""Shares for the longest sequences, and the keys that a sequence has at least whose half is no long one."""

_SHORT_WINDOW, _WINDOW_PROGRAMS = 256, 256  # measured with 128 keys at one sequence and at 32
_PROGRAMS = 512  # of more than 8 rows, about four for each of 132 multiprocessors
_FEW_PROGRAMS = 256  # of 17 to 32 rows, two of which fill one: measured at 8 and 32 sequences of 700 keys


@dataclass(frozen=True)
class AttentionTiling:
    """The tiling of a launch: a program takes `rows` rows (queries times heads of one key head) and goes
    through its keys `keys` at a time; at most `parts` programs share a sequence's keys, but for the longest,
    which have `spare` (a power of two) times as many more among them.

    Programs start in the order of the sequences: with the longest first none is left alone at the end.
    """

    rows: int
    keys: int
    parts: int
    warps: int
    stages: int
    spare: int = 0


def tiling_of(
    batch: int, rows: int, kv_heads: int, key_bytes: int = 256, scaled: bool = False, dim: int = NARROW
) -> AttentionTiling:
    """The tiling for `batch` sequences of `rows` = width * group rows a key head, with keys of `dim` values
    in `key_bytes` bytes; `scaled`: in FP8.
    """
    batch, most_keys = padded_batch(batch), keys_at_a_time(key_bytes)
    if rows <= 16:
        programs = batch * kv_heads
        parts = next((parts for most, parts in _PARTS if programs <= most), 2)
        if rows > 8:
            parts = min(parts, max(2, cdiv(_PROGRAMS, programs)))
        warps = 1 if scaled and key_bytes <= 128 else 2  # one has registers for no longer keys
        if dim > NARROW:
            warps = 4
        spare = SPARE if batch > SPARE and 2 * parts <= most_parts(16) else 0
        return AttentionTiling(16, min(32, most_keys), parts, warps, 3, spare)
    tile = 32 if rows <= 32 else 64 if batch * cdiv(rows, 64) * kv_heads < _PROGRAMS else 128
    if dim > NARROW:
        tile = WIDE_ROWS
    programs = batch * kv_heads * cdiv(rows, tile)
    most = _FEW_PROGRAMS if rows <= 32 and programs < _FEW_PROGRAMS else _PROGRAMS
    parts = min(most_parts(tile), power_of_2(cdiv(most, programs)))
    keys = min(32 if tile == 128 else 64, most_keys)
    if most == _PROGRAMS and rows <= 32 and key_bytes <= 256 and not scaled:
        return AttentionTiling(tile, keys, parts, 2, 2)
    many = tile == 128 or dim > NARROW
    return AttentionTiling(tile, keys, parts, 8 if many else 4, 3 if most_keys > 16 else 2)


def within(tiling: AttentionTiling, window: int, programs: int) -> AttentionTiling:
    """The tiling of queries that see `window` keys at most (0: all of them). `programs`: sequences times key
    heads. To add up parts takes longer than to read a few more keys, once there is a program for each SM.
    """
    if not 0 < window <= _SHORT_WINDOW:
        return tiling
    return replace(tiling, parts=min(tiling.parts, max(1, _WINDOW_PROGRAMS // programs)))


def most_parts(tile: int) -> int:
    """The more rows a program has, the fewer parts: adding up should cost the last one the same."""
    return max(4, 256 // tile)


def merged_parts(tiling: AttentionTiling) -> int:
    """The most parts that the last of a tile's programs has room for: with half as many it adds up twice as
    many rows at a time.
    """
    most = most_parts(tiling.rows)
    return most // 2 if tiling.rows == 32 and tiling.parts <= most // 2 else most
