"""Names of pages in a prefix cache: a digest of all tokens from the prompt's start to the page's key.

A page's key is its own tokens and `lookahead` more, where draft KV lives in the same pages. Workers and
gateways compute the same names, and so can speak of pages without sending tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NAME_BYTES = 16
_ID = "I"  # a token id as it is digested: four bytes, so that a page's are one block of the digest
SHORT_BYTES = 8
"""As names travel: two pages with one short name cost a prompt that is computed twice, never a token."""


@dataclass(frozen=True)
class PageShape:
    """What decides a page's key: its tokens, and how many after them."""

    size: int = 16
    lookahead: int = 0

    def keys(self, tokens: Sequence[int], rows: int, first: int = 0) -> Iterator[tuple[int, ...]]:
        """The keys, from number `first` on, of the whole pages below `rows` whose look-ahead is known."""
        count = min(rows, len(tokens) - self.lookahead) // self.size
        return (
            tuple(tokens[i * self.size : (i + 1) * self.size + self.lookahead]) for i in range(first, count)
        )

    def names(self, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """The short names of the pages that a cache can serve: the last token is always computed again."""
        count = max(min(len(tokens) - 1, len(tokens) - self.lookahead), 0) // self.size
        ids = array(_ID, tokens)
        data, width, after = ids.tobytes(), ids.itemsize * self.size, ids.itemsize * self.lookahead
        digest, names, name = hashlib.blake2b, list[bytes](), b""
        for begin in range(0, width * count, width):  # thousands of times for a long prompt
            name = digest(name + data[begin : begin + width + after], digest_size=NAME_BYTES).digest()
            names.append(name[:SHORT_BYTES])
        return tuple(names)


def named(parent: bytes, key: tuple[int, ...]) -> bytes:
    """The name of the page with this key after the page of this name (b"": after none)."""
    return hashlib.blake2b(parent + array(_ID, key).tobytes(), digest_size=NAME_BYTES).digest()


def split(names: bytes) -> Iterator[bytes]:
    """Packed short names, one by one."""
    return (names[i : i + SHORT_BYTES] for i in range(0, len(names), SHORT_BYTES))
