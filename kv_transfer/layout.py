"""What a page is: the handshake's hash of meaning, the geometry of a pool, and the maths of whole pages.

Two workers may exchange pages if their bytes mean the same (`PageMeaning`) and lie the same way (`Geometry`).
This file knows sizes and names only: it never touches a pool.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from eyas.common.errors import ConfigError
from eyas.common.types import KvKind

PROTOCOL = 2  # raised whenever pages, handles or the rules of a lease change their meaning

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_Count = Annotated[int, msgspec.Meta(ge=1)]


class PageMeaning(msgspec.Struct, frozen=True):
    """Everything that gives a page's bytes their meaning.

    `fingerprint` names the weights; `rope` spells every parameter of the rotary embedding, since keys are
    stored rotated.
    """

    fingerprint: str
    group: KvKind
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    rope: str

    def hash(self) -> str:
        """32 hexadecimal digits, equal on two workers exactly if every field and the protocol are."""
        text = msgspec.json.encode((PROTOCOL, self))
        return hashlib.blake2b(text, digest_size=16).hexdigest()


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A page-major pool `[page, layer, K/V, slot, head, dim]`: one page of all layers is one block."""

    pages: _Count
    page_size: _Count  # rows (tokens) a page
    layers: _Count
    kv_heads: _Count
    head_dim: _Count
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in _ITEMSIZE:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(_ITEMSIZE)}")

    @property
    def page_bytes(self) -> int:
        rows = 2 * self.layers * self.page_size
        return rows * self.kv_heads * self.head_dim * _ITEMSIZE[self.dtype]

    @property
    def pool_bytes(self) -> int:
        return self.pages * self.page_bytes

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Geometry:
        """Read a peer's geometry; anything but a well-formed one is a `ConfigError`."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ConfigError(f"The peer's KV geometry cannot be read: {error}.") from error


class PoolLayout(msgspec.Struct, frozen=True):
    """What one side of a handshake says about one group of KV: a `PageMeaning.hash()` and its geometry."""

    layout_hash: str
    geometry: Geometry


def pages_for(tokens: int, page_size: int) -> int:
    """How many pages hold `tokens` rows, the last one perhaps in part."""
    return -(-tokens // page_size)


def check_compatible(mine: PoolLayout, theirs: PoolLayout) -> None:
    """Raise a `ConfigError` that names the first difference, unless pages of `theirs` can become `mine`.

    Pools may differ in length: page numbers are mapped one by one.
    """
    ours, peers = mine.geometry, theirs.geometry
    for field in ("dtype", "layers", "kv_heads", "head_dim", "page_size"):
        here, there = getattr(ours, field), getattr(peers, field)
        if here != there:
            raise ConfigError(
                f"KV pages cannot be exchanged: {field} is {here} here and {there} at the peer."
            )
    if mine.layout_hash != theirs.layout_hash:
        raise ConfigError(
            "KV pages cannot be exchanged: the peer's hash of meaning differs "
            f"({theirs.layout_hash}, here {mine.layout_hash}): its weights, RoPE form or protocol version do."
        )
