"""`grpc`: pages as a stream of bytes, for peers that share no memory. Both ends of the stream, not the wire.

The owner cuts its pages into chunks, the puller writes chunks into its own pages. Whoever carries them, and
whether what was read counts, is not this file's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eyas.common.errors import TransferFailed
from kv_transfer.backends.base import Pages

CHUNK_BYTES = 1024 * 1024


def chunks(source: Pages, pages: Sequence[int]) -> Iterator[bytes]:
    """The bytes of `pages`, one page after the other, in chunks of CHUNK_BYTES; the last may be shorter.

    A page is read when its chunk is asked for. Raises TransferFailed for a page that `source` does not have.
    """
    if pages and not 0 <= min(pages) <= max(pages) < len(source):
        raise TransferFailed(f"pages are outside of the pool, which has {len(source)} of them")
    pieces: list[memoryview] = []
    room = CHUNK_BYTES
    for page in pages:
        rest = source[page].data
        while rest:
            pieces.append(rest[:room])
            room, rest = room - len(pieces[-1]), rest[room:]
            if room == 0:
                yield b"".join(pieces)
                pieces, room = [], CHUNK_BYTES
    if pieces:
        yield b"".join(pieces)


class PageWriter:
    """Writes a stream of bytes into `pages` of `destination`, one page after the other, and nowhere else."""

    def __init__(self, destination: Pages, pages: Sequence[int]) -> None:
        self._left = [destination[page].data for page in reversed(pages)]
        self.bytes = 0  # written so far

    def write(self, chunk: bytes | memoryview) -> None:
        """The next bytes. Raises TransferFailed, and writes no more, when the pages are full."""
        rest = memoryview(chunk)
        while rest:
            if not self._left:
                raise TransferFailed("the owner sent more bytes than the pages hold")
            page = self._left.pop()
            count = min(len(page), len(rest))
            page[:count] = rest[:count]
            self.bytes += count
            rest = rest[count:]
            if count < len(page):
                self._left.append(page[count:])

    def finish(self) -> None:
        """Raises TransferFailed unless every byte of every page came."""
        if self._left:
            missing = sum(len(page) for page in self._left)
            raise TransferFailed(f"the owner ended the stream {missing} bytes too early")
