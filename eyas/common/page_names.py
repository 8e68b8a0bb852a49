"""Names of pages in a prefix cache, and those of a worker's with their latest changes, as it reports them.

A name is a digest of all tokens from the prompt's start to the page's key: its own tokens and `lookahead`
more, where draft KV lives in the same pages. It begins with the text's salt, if it has one: names under
different salts differ. Workers and gateways compute the same names, and so can speak of pages without
sending tokens. A worker's report has a bounded log of changes; a gateway further behind gets all names.
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
ID_BYTES = 4  # so that a page's are one block of the digest
SHORT_BYTES = 8
"""The bytes of a name on its way: two pages with one short name cost a prompt computed twice, never a token.
"""
MOST_LOGGED = 1 << 20  # bytes of names


@dataclass(frozen=True)
class PageShape:
    """The tokens that a page's key is made of: its own, and some after them."""

    size: int = 16
    lookahead: int = 0

    def keys(self, tokens: Sequence[int], rows: int, first: int = 0) -> Iterator[tuple[int, ...]]:
        """The keys, from number `first` on, of the whole pages below `rows` whose look-ahead is known."""
        count = min(rows, len(tokens) - self.lookahead) // self.size
        return (
            tuple(tokens[i * self.size : (i + 1) * self.size + self.lookahead]) for i in range(first, count)
        )

    def names(self, ids: bytes, salt: bytes = b"") -> PageNames:
        """The short names of the pages that a cache can serve: the last token is always computed again.

        `ids`: `packed`. `salt`: `salt_of`.
        """
        tokens = len(ids) // ID_BYTES
        return PageNames(self, max(min(tokens - 1, tokens - self.lookahead), 0) // self.size, ids, salt)


class PageNames:
    """The short names of a prompt's first pages, in order. A long prompt has thousands, each made from the
    one before, so they are made as far as they are looked at.
    """

    def __init__(self, shape: PageShape, count: int, ids: bytes, salt: bytes) -> None:
        """`ids`: of the whole prompt, `packed`."""
        self._shape = shape
        self._count = count
        self._ids = ids
        self._names: list[bytes] = []
        self._last = salt  # the whole name of the last of them

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, page: int) -> bytes:
        if page >= self._count:
            raise IndexError(page)
        if page >= len(self._names):
            self._make(page + 1)
        return self._names[page]

    def _make(self, count: int) -> None:
        """Up to `count` in all."""
        width, after = ID_BYTES * self._shape.size, ID_BYTES * self._shape.lookahead
        digest, ids, name, add = hashlib.blake2b, self._ids, self._last, self._names.append
        for begin in range(width * len(self._names), width * count, width):
            name = digest(name + ids[begin : begin + width + after], digest_size=NAME_BYTES).digest()
            add(name[:SHORT_BYTES])
        self._last = name


def salt_of(text: str, adapter: str = "") -> bytes:
    """The name in place of a page before the first one: a digest of all that decides what a page holds, or
    who may share it, beside its tokens; b"" if nothing does.

    `text`: the caller's salt. `adapter`: the id of the one that computes the page; both may be "".
    """
    if adapter:
        text = f"{adapter}\0{text}"
    person = b"adapter" if adapter else b"salt"
    return hashlib.blake2b(text.encode(), digest_size=NAME_BYTES, person=person).digest() if text else b""


def salt_of_weights(salt: bytes, digest: str) -> bytes:
    """The same where weights of this digest compute the pages, from what `salt_of` returns."""
    return hashlib.blake2b(digest.encode() + salt, digest_size=NAME_BYTES, person=b"weights").digest()


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as they are digested, and as they travel: `ID_BYTES` each, little-endian."""
    return (tokens if isinstance(tokens, array) else array(_ID, tokens)).tobytes()


def unpacked(ids: bytes) -> tuple[int, ...]:
    """Reverses `packed`. Raises ValueError for a length that it does not give."""
    return tuple(memoryview(ids).cast(_ID))


def named(parent: bytes, key: tuple[int, ...]) -> bytes:
    """The name of the page with this key after the page of this name (after none: the text's salt)."""
    return hashlib.blake2b(parent + packed(key), digest_size=NAME_BYTES).digest()


def split(names: bytes) -> Iterator[bytes]:
    """Packed short names, one by one."""
    return (names[i : i + SHORT_BYTES] for i in range(0, len(names), SHORT_BYTES))


class CacheNews(msgspec.Struct, frozen=True):
    """Packed short names of pages: forget the `dropped` ones, all if `whole`; then hold the `added` ones.

    `epoch`: of the pool. `until`: what to ask after next.
    """

    epoch: int
    shape: PageShape
    added: bytes = b""
    dropped: bytes = b""
    whole: bool = False
    until: int = 0


IN_POOL, ON_HOST = 1, 2


class CachedPages:
    """The pages of one pool, and of the host's memory behind it: a page is cached as long as one has it."""

    def __init__(self, epoch: int, shape: PageShape, most_logged: int = MOST_LOGGED) -> None:
        self._epoch = epoch
        self._shape = shape
        self._most = most_logged
        self._cached: dict[bytes, int] = {}  # where, by name
        self._log: deque[tuple[bytes, bytes]] = deque()  # (dropped, added)
        self._logged = 0  # bytes
        self._end = 0  # the number of the next change

    def change(
        self, added: bytes, dropped: bytes, host_added: bytes = b"", host_dropped: bytes = b""
    ) -> None:
        """Notes what the engine said: what came and left, on the host as well."""
        before: dict[bytes, int] = {}
        for names, where, here in (
            (dropped, IN_POOL, False),
            (host_dropped, ON_HOST, False),
            (added, IN_POOL, True),
            (host_added, ON_HOST, True),
        ):
            for name in split(names):
                now = self._cached.get(name, 0)
                before.setdefault(name, now)
                self._cached[name] = now | where if here else now & ~where
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
        """Returns the changes from `number` on; for None, or where the log is too short, all cached pages.

        None: nothing changed.
        """
        if number == self._end:
            return None
        if number is None or number < self._end - len(self._log):
            return CacheNews(self._epoch, self._shape, b"".join(self._cached), whole=True, until=self._end)
        dropped: set[bytes] = set()
        added: dict[bytes, None] = {}
        for out, came in list(self._log)[number - self._end :]:
            for name in split(out):
                added.pop(name, None)
                dropped.add(name)
            added.update(dict.fromkeys(split(came)))
        return CacheNews(self._epoch, self._shape, b"".join(added), b"".join(dropped), until=self._end)
