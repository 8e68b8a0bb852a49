"""The interface of a store of pages, and the seal with which each is stored.

A page's key is its name, a digest of all tokens from the start; who may share pages (weights, arithmetic, the
layout) is the store's namespace. A store may lose anything, or give other bytes: the seal covers the key and
all bytes, and what does not fit it is no page.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

import xxhash

_SEAL = struct.Struct("<8s16s")
_MAGIC = b"eyaspg01"
SEAL_BYTES = _SEAL.size

Parts = Sequence[memoryview]
"""The bytes of a page: its part of every pool, in order."""


class PageStore(Protocol):
    """Pages by key. Every call may block, for a bounded time; threads share it.

    Raises TransferFailed, with what the store said, where it does not work.
    """

    name: str

    def put(self, key: bytes, parts: Parts) -> int:
        """Stores a page; the bytes written, 0 if it has it."""
        ...

    def get(self, key: bytes, parts: Parts) -> bool:
        """Fills `parts` with a page. False: it is not there, or damaged, and `parts` hold anything."""
        ...

    def close(self) -> None:
        """Lets go of connections."""
        ...


def seal(key: bytes, parts: Parts) -> bytes:
    """The seal before a page's bytes in a store: SEAL_BYTES."""
    return _SEAL.pack(_MAGIC, _digest(key, parts))


def is_sealed(sealed: bytes, key: bytes, parts: Parts) -> bool:
    """Whether these are the bytes that were sealed under this key."""
    return sealed == seal(key, parts)


def _digest(key: bytes, parts: Parts) -> bytes:
    digest = xxhash.xxh3_128(key)
    for part in parts:
        digest.update(part)
    return digest.digest()
