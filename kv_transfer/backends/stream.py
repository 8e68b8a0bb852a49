"""`grpc`: pages as a stream of bytes, for peers that share no memory.

The owner's front cuts its pages into chunks, and the puller's front writes the chunks into its own pages.
This module has both ends of the stream and the engine's backend; the fronts make the calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eyas.common.errors import ConfigError, TransferFailed
from eyas.common.wire.pool import Export
from kv_transfer.area import Pages
from kv_transfer.backends.base import BackendSite, CopyJob, CopyResult, PeerSource, TransferBackend

CHUNK_BYTES = 1024 * 1024


class FrontSource(PeerSource):
    """A peer whose front sends its pages."""

    @property
    def divides(self) -> bool:
        return True


class StreamBackend(TransferBackend):
    """Copies that the fronts make, straight into the file of the site's area."""

    name = "grpc"

    def __init__(self, site: BackendSite) -> None:
        self._area = site.area
        self._wire = site.wire
        self._reachable = bool(site.area.path)

    def export(self, rank: int = 0) -> Export | None:
        """Returns no fields: the front has its members, and asks the one that owns the handle."""
        return {} if self._reachable else None

    def open(self, export: Export) -> PeerSource:
        if not self._reachable:
            raise ConfigError("this worker's front cannot write to its KV pool")
        return FrontSource()

    def start(self, source: PeerSource, job: CopyJob) -> None:
        self._wire.fetch(job)

    def poll(self) -> list[CopyResult]:
        done = self._wire.stopped()
        return [CopyResult(d.job, self.name, d.bytes, d.seconds, d.error) for d in done]

    def cancel(self, job: CopyJob) -> None:
        self._wire.stop(job)

    def checksum(self, proof: CopyJob) -> int:
        return self._area.checksum(proof.dst_pages[0])

    def close(self, deadline: float) -> bool:
        """Has nothing to release: the front, which outlives the engine, has its own mapping of the file."""
        return True


def chunks(source: Pages, pages: Sequence[int]) -> Iterator[bytes]:
    """The bytes of `pages`, one page after another, in chunks of CHUNK_BYTES; the last may be shorter.

    A page is read when its chunk is requested. Raises TransferFailed for a page that `source` does not have.
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
    """Writes a stream of bytes into `pages` of `destination`, one page after the other, and nowhere else.

    `width`: bytes of each, from its beginning on; 0: all.
    """

    def __init__(self, destination: Pages, pages: Sequence[int], width: int = 0) -> None:
        self._left = [destination[page, : width or None].data for page in reversed(pages)]
        self.bytes = 0  # written so far

    def write(self, chunk: bytes | memoryview) -> None:
        """Writes the next bytes. Raises TransferFailed, and writes no more, when the pages are full."""
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
        """Raises TransferFailed unless every byte of every page has been written."""
        if self._left:
            missing = sum(len(page) for page in self._left)
            raise TransferFailed(f"the owner ended the stream {missing} bytes too early")
