"""The pages of a worker's prefix cache, and their latest changes, as its front reports them to gateways.

It keeps the names that are held and a bounded log of changes; who is further behind gets all names.
"""

from __future__ import annotations

from collections import deque

import msgspec

from eyas.common.page_names import PageShape, split

MOST_LOGGED = 1 << 20  # bytes of names


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


class CachedPages:
    """The pages of one pool."""

    def __init__(self, epoch: int, shape: PageShape, most_logged: int = MOST_LOGGED) -> None:
        self._epoch = epoch
        self._shape = shape
        self._most = most_logged
        self._cached: dict[bytes, None] = {}
        self._log: deque[tuple[bytes, bytes]] = deque()  # (dropped, added)
        self._logged = 0  # bytes
        self._end = 0  # the number of the next change

    def change(self, added: bytes, dropped: bytes) -> None:
        """Notes what the engine said."""
        for name in split(dropped):
            self._cached.pop(name, None)
        self._cached.update(dict.fromkeys(split(added)))
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
