"""The paged pool as attention kernels see it: where the rows of a sequence lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.attention.scores import ScoreScaling


@dataclass(frozen=True)
class PagedKv:
    """One layer of a pool, the page tables that lead to its rows, and how queries meet them.

    `pool` [pages, 2 (K, V), page_size, kv_heads, dim] is one layer's view of the page-major pool: contiguous
    except between pages, where, in FP8, the scales of its rows lie, and between heads, if others than the
    pool's share its rows (`KvPool.layer`). `tables` int32 [slots, most pages] holds
    physical pages; unused entries are 0. `scores`: the layer's rule (None: all rows, scaled by 1 /
    sqrt(dim)). `firsts` int32 [slots]: each slot's first row that may be seen, what lies below it being
    anything (None: all rows may).
    """

    pool: torch.Tensor
    tables: torch.Tensor
    scores: ScoreScaling | None = None
    firsts: torch.Tensor | None = None

    @property
    def rule(self) -> ScoreScaling:
        """The layer's rule, or the usual one."""
        return self.scores or ScoreScaling(self.dim**-0.5)

    @property
    def scaled(self) -> bool:
        """Whether keys and values are in FP8, with scales."""
        return self.pool.dtype == torch.float8_e4m3fn

    @property
    def page_size(self) -> int:
        """Rows per page."""
        return self.pool.shape[2]

    @property
    def kv_heads(self) -> int:
        """Key and value heads on this rank."""
        return self.pool.shape[3]

    @property
    def dim(self) -> int:
        """Values per head."""
        return self.pool.shape[4]

    @property
    def share(self) -> int:
        """Values from one head to the next."""
        return self.pool.stride(3)

    @property
    def values(self) -> torch.Tensor:
        """The pool's view, starting at the first value row."""
        return self.pool[:, 1]


def keys_at_a_time(key_bytes: int) -> int:
    """The number of keys of this size, with their values, that a program may hold in each stage of its
    pipeline.
    """
    return max(16, min(64, 16384 // key_bytes))


@triton.jit
def pages_of(table, rows, end, PAGE: tl.constexpr):
    """The pages, int64 [n, 1], of logical `rows` int32 [n]. Rows from `end` on get page 0."""
    return tl.load(table + rows // PAGE, mask=rows < end, other=0).to(tl.int64)[:, None]


@triton.jit
def scales_of(keys, head, layout: tl.constexpr):
    """The address of a head's scales in the pool's first page, as `eyas.common.wire.pool.scale_rows` says;
    it means something in FP8 alone.
    """
    behind = keys + 2 * layout.page_size * layout.row_stride + head * layout.dim
    return behind.to(tl.pointer_type(tl.float32))


@triton.jit
def read_rows(rows, at, scales, pages, row, there, FIELD: tl.constexpr, q_tile, layout: tl.constexpr):
    """The keys (FIELD 0) or values (1) [n, dim] that lie at `rows` + `at`, `there` [n, 1] or all (None).

    In FP8 each row is multiplied by its scale, and rounded to the type of `q_tile`: pages [n, 1], logical
    rows [n], `scales` as of `scales_of`.
    """
    if there is None:
        x = tl.load(rows + at)
    else:
        x = tl.load(rows + at, mask=there, other=0.0)
    if x.dtype == tl.float8e4nv:
        EACH: tl.constexpr = layout.dim // 4  # scales of a head in a row of scales
        number = (FIELD * layout.page_size + row % layout.page_size)[:, None]
        place = number // EACH * (layout.row_stride // 4) + number % EACH
        place += pages * (layout.page_stride // 4)
        if there is None:
            scale = tl.load(scales + place)
        else:
            scale = tl.load(scales + place, mask=there, other=0.0)
        x = (x.to(tl.float32) * scale).to(q_tile.dtype)
    return x


@triton.jit
def block_pages(table, block, end, layout: tl.constexpr):
    """Where the rows from `block` on lie, a multiple of `layout.keys`, as `read_words` takes it: the pages of
    rows, the places of rows in them, and the pages of scales. Rows from `end` on, which is not 0, get
    the page of the last before it.

    Where pages divide blocks, the places are the same in each block, and scales are read page by page.
    """
    place, last = tl.arange(0, layout.keys), (end - 1) // layout.page_size
    if layout.keys % layout.page_size == 0:
        first = block // layout.page_size
        own = tl.load(table + tl.minimum(first + place // layout.page_size, last))
        page = tl.arange(0, layout.keys // layout.page_size)
        pages = (own, place % layout.page_size, tl.load(table + tl.minimum(first + page, last)))
    else:
        row = block + place
        own = tl.load(table + tl.minimum(row // layout.page_size, last))
        pages = (own, row % layout.page_size, own)
    return pages


@triton.jit
def _scales(scales, pages, FIELD: tl.constexpr, layout: tl.constexpr):
    """The scales [n] of keys (FIELD 0) or values (1) of the rows that `pages` says."""
    EACH: tl.constexpr = layout.dim // 4  # scales of a head in a row of scales
    if pages[2].shape[0] < pages[0].shape[0]:
        slot = tl.arange(0, layout.page_size)[None, :]
        page = pages[2][:, None]
    else:
        slot = pages[1]
        page = pages[2]
    number = FIELD * layout.page_size + slot
    place = number // EACH * (layout.row_stride // 4) + number % EACH
    read = tl.load(scales + place + page.to(tl.int64) * (layout.page_stride // 4))
    return tl.reshape(read, (pages[0].shape[0],))


@triton.jit
def read_words(words, scales, pages, layout: tl.constexpr):
    """Keys and values in FP8 of the rows that `pages` says (`block_pages`), as words of two uint16
    [n, dim / 2], and the scales of both.

    words: the addresses [1, dim / 2] of the head's keys in the pool's first row; scales: as of `scales_of`.
    """
    VALUES: tl.constexpr = layout.page_size * layout.row_stride // 2  # from a key to its value
    at = words + (pages[1] * (layout.row_stride // 2))[:, None]
    at += (pages[0].to(tl.int64) * (layout.page_stride // 2))[:, None]
    key_scale, value_scale = _scales(scales, pages, 0, layout), _scales(scales, pages, 1, layout)
    return tl.load(at), tl.load(at + VALUES), key_scale, value_scale
