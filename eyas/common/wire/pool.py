"""The description of a worker's KV pages for those who may read them: records only, the same on both ends.

Which backend can use which export is that backend's business, and what pages mean is `kv_transfer.layout`'s.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_Count = Annotated[int, msgspec.Meta(ge=1)]

SCALE_BYTES = 4
"""Bytes of a scale: they are float32."""


def scale_rows(fields: int, page_size: int, head_dim: int, itemsize: int) -> int:
    """How many rows of heads stand behind those of each layer of a page, and have its scales; 0: none.

    Keys and values of one byte have them, latents (of one field) not. The scale of a head's row `slot` of
    field f is float32 number f * page_size + slot of what that head has of these rows, which ends in padding:
    so a share of the heads of each row has the scales of these heads.
    """
    if fields == 1 or itemsize > 1:
        return 0
    return -(-fields * page_size * SCALE_BYTES // head_dim)


Export: TypeAlias = dict[str, bytes]
"""The fields with which one backend opens one pool: names of its own choice, with their values."""


class PoolGeometry(msgspec.Struct, frozen=True):
    """A page-major pool `[page, layer, field, slot, head, dim]`: one page of all layers is one block.

    `fields`: 2 for a key and a value, 1 for one row that is both. Each layer of a page may end in rows of
    scales, see `scale_rows`. `state_pages`: of a sequence's recurrent states, behind all others.

    Raises ValueError (or msgspec.ValidationError, which is one) for sizes that no pool has.
    """

    pages: _Count  # that a handle may name
    page_size: _Count  # rows (tokens) per page
    layers: _Count
    kv_heads: _Count
    head_dim: _Count
    dtype: str
    fields: _Count = 2
    state_pages: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in _ITEMSIZE:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(_ITEMSIZE)}")
        if min(self.pages, self.page_size, self.layers, self.kv_heads, self.head_dim, self.fields) < 1:
            raise ValueError("every size must be at least 1")
        if self.state_pages < 0:
            raise ValueError("state_pages must be at least 0")

    @property
    def replicated(self) -> bool:
        """Whether every rank has all heads: rows that are key and value are every query head's."""
        return self.fields == 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: all fields of all its slots, in all layers, and their scales."""
        return self.part_bytes(self.kv_heads)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one row."""
        return self.head_dim * _ITEMSIZE[self.dtype]

    def part_bytes(self, heads: int) -> int:
        """The bytes of a page that belong to `heads` of its heads; 0: all of them do."""
        return self.page_rows * (heads or self.kv_heads) * self.head_bytes

    @property
    def page_rows(self) -> int:
        """Rows of heads per page: the fields of each slot in each layer, and those of scales."""
        scales = scale_rows(self.fields, self.page_size, self.head_dim, _ITEMSIZE[self.dtype])
        return self.layers * (self.fields * self.page_size + scales)

    @property
    def pool_bytes(self) -> int:
        """The bytes of a pool without its proof page."""
        return self.pages * self.page_bytes


class RankPool(msgspec.Struct, frozen=True):
    """The pages of one rank, as its backends export them.

    Page number `PoolGeometry.pages`, one behind the last that a handle may name, is the proof page: random
    bytes with this CRC-32, by which a puller proves a route.
    """

    rank: int
    checksum: int
    exports: dict[str, Export]  # by backend


class PoolInfo(msgspec.Struct, frozen=True):
    """The pages of one group of one worker. `epoch` names their incarnation, `layout_hash` their meaning.

    `arithmetic`: how they are computed, which is part of that meaning; "": in any way.
    `board`: where pullers of the owner's host see which of its leases are alive; empty: nowhere.
    """

    epoch: int
    layout_hash: str
    geometry: PoolGeometry
    ranks: tuple[RankPool, ...]
    board: Export = {}
    arithmetic: str = ""
