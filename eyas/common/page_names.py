"""Names of pages in a prefix cache, and a worker's report of the names in its cache and their changes.

A page's name is a digest of all tokens from the start of the prompt to the end of the page's key. The key is
the page's own tokens and `lookahead` more, if draft KV is in the same pages. The digest starts from the salt
of the text, if it has one, so names under different salts differ. Workers and gateways compute the same
names, so they can refer to pages without sending tokens. A worker logs a bounded number of changes; a gateway
that missed more receives all names.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

NAME_BYTES = 16
_ID: Final = "i"  # a token id as it is digested
ID_BYTES = 4  # so that the ids of a page fit into one block of the digest
SHORT_BYTES = 8
"""The bytes of a name in messages. If two pages share a short name, a prompt may be computed again, but no
token is ever wrong.
"""
MOST_LOGGED = 1 << 20  # bytes of names


@dataclass(frozen=True)
class PageShape:
    """The tokens of a page's key: `size` of its own, and `lookahead` after them."""

    size: int = 16
    lookahead: int = 0

    def keys(self, tokens: Sequence[int], rows: int, first: int = 0) -> Iterator[tuple[int, ...]]:
        """The keys, from number `first` on, of the whole pages below `rows` whose look-ahead is known."""
        count = min(rows, len(tokens) - self.lookahead) // self.size
        return (
            tuple(tokens[i * self.size : (i + 1) * self.size + self.lookahead]) for i in range(first, count)
        )

    def names(self, ids: bytes, salt: bytes = b"") -> PageNames:
        """The short names of a prompt's pages that a cache can serve: its last token is always computed
        again.

        `ids`: the tokens as `packed`. `salt`: from `salt_of`.
        """
        tokens = len(ids) // ID_BYTES
        return PageNames(self, max(min(tokens - 1, tokens - self.lookahead), 0) // self.size, ids, salt)


class PageNames:
    """The short names of a prompt's first pages, in order, computed on demand.

    A long prompt has thousands of pages, and each name depends on the one before.
    """

    def __init__(self, shape: PageShape, count: int, ids: bytes, salt: bytes) -> None:
        """`ids`: of the whole prompt, `packed`."""
        self._shape = shape
        self._count = count
        self._ids = ids
        self._names: list[bytes] = []
        self._last = salt  # the full name of the last computed page

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, page: int) -> bytes:
        if page >= self._count:
            raise IndexError(page)
        if page >= len(self._names):
            self._compute(page + 1)
        return self._names[page]

    def _compute(self, count: int) -> None:
        """Computes the names of the first `count` pages."""
        width, after = ID_BYTES * self._shape.size, ID_BYTES * self._shape.lookahead
        digest, ids, name, add = hashlib.blake2b, self._ids, self._last, self._names.append
        for begin in range(width * len(self._names), width * count, width):
            name = digest(name + ids[begin : begin + width + after], digest_size=NAME_BYTES).digest()
            add(name[:SHORT_BYTES])
        self._last = name


def salt_of(text: str, adapter: str = "") -> bytes:
    """The parent name of a first page: a digest of everything other than tokens that determines what a page
    contains, or who may share it; b"" if there is none.

    `text`: the caller's salt. `adapter`: the id of the adapter that computes the page. Both may be "".
    """
    if adapter:
        text = f"{adapter}\0{text}"
    person = b"adapter" if adapter else b"salt"
    return hashlib.blake2b(text.encode(), digest_size=NAME_BYTES, person=person).digest() if text else b""


def salt_of_weights(salt: bytes, digest: str) -> bytes:
    """Extends a salt from `salt_of` by the digest of the weights that compute the pages."""
    return hashlib.blake2b(digest.encode() + salt, digest_size=NAME_BYTES, person=b"weights").digest()


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids in the form that is hashed and sent: `ID_BYTES` each, little-endian."""
    return (tokens if isinstance(tokens, array) else array(_ID, tokens)).tobytes()


def unpacked(ids: bytes) -> tuple[int, ...]:
    """Reverses `packed`. Raises ValueError unless the length is a multiple of `ID_BYTES`."""
    return tuple(memoryview(ids).cast(_ID))


def named(parent: bytes, key: tuple[int, ...]) -> bytes:
    """The name of the page with this key, after the page named `parent` (for a first page: the salt)."""
    return hashlib.blake2b(parent + packed(key), digest_size=NAME_BYTES).digest()


def split(names: bytes) -> Iterator[bytes]:
    """Packed short names, one by one."""
    return (names[i : i + SHORT_BYTES] for i in range(0, len(names), SHORT_BYTES))


class CacheNews(msgspec.Struct, frozen=True):
    """An update of the cached pages, by packed short names: first remove the `dropped` ones (all, if
    `whole`), then add the `added` ones.

    `epoch`: of the pool. `until`: the number to pass to the next `CachedPages.since`.
    """

    epoch: int
    shape: PageShape
    added: bytes = b""
    dropped: bytes = b""
    whole: bool = False
    until: int = 0


IN_POOL, ON_HOST = 1, 2


class CachedPages:
    """The pages cached in one pool or in its host memory tier, and a log of the latest changes."""

    def __init__(self, epoch: int, shape: PageShape, most_logged: int = MOST_LOGGED) -> None:
        self._epoch = epoch
        self._shape = shape
        self._most = most_logged
        self._cached: dict[bytes, int] = {}  # by name: IN_POOL, ON_HOST, or both
        self._log: deque[tuple[bytes, bytes]] = deque()  # (dropped, added)
        self._logged = 0  # bytes
        self._end = 0  # the number of the next change

    def change(
        self, added: bytes, dropped: bytes, host_added: bytes = b"", host_dropped: bytes = b""
    ) -> None:
        """Records the pages that the engine added and dropped, in the pool and on the host."""
        before: dict[bytes, int] = {}
        for names, tier, is_added in (
            (dropped, IN_POOL, False),
            (host_dropped, ON_HOST, False),
            (added, IN_POOL, True),
            (host_added, ON_HOST, True),
        ):
            for name in split(names):
                tiers = self._cached.get(name, 0)
                before.setdefault(name, tiers)
                self._cached[name] = tiers | tier if is_added else tiers & ~tier
        for name in before:
            if not self._cached[name]:
                del self._cached[name]
        dropped = b"".join(name for name, was in before.items() if was and name not in self._cached)
        added = b"".join(name for name, was in before.items() if not was and name in self._cached)
        if not (dropped or added):
            return
        self._log.append((dropped, added))
        self._end += 1
        self._logged += len(dropped) + len(added)
        while self._logged > self._most:
            self._logged -= sum(map(len, self._log.popleft()))

    def since(self, number: int | None) -> CacheNews | None:
        """Returns the changes from `number` on; for None, or if the log is too short, all cached pages.

        Returns None if nothing changed.
        """
        if number == self._end:
            return None
        if number is None or number < self._end - len(self._log):
            return CacheNews(self._epoch, self._shape, b"".join(self._cached), whole=True, until=self._end)
        dropped: set[bytes] = set()
        added: dict[bytes, None] = {}
        for removed, new in list(self._log)[number - self._end :]:
            for name in split(removed):
                added.pop(name, None)
                dropped.add(name)
            added.update(dict.fromkeys(split(new)))
        return CacheNews(self._epoch, self._shape, b"".join(added), b"".join(dropped), until=self._end)
