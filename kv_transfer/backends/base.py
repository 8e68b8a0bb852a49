"""What a backend is, and the records of one copy. Nothing here knows leases, attempts or requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from eyas.common.errors import ConfigError, EyasError, TransferFailed
from eyas.common.types import Shard
from kv_transfer.layout import Geometry

Pages: TypeAlias = NDArray[np.uint8]  # [pages, page_bytes], a view of a page-major pool


@dataclass(frozen=True)
class Copy:
    """One job: page `source.pages[i]` of the peer's pool becomes page `dst_pages[i]` of this one.

    `pull` and `number` name the job; `source.rank` says which rank's copier does it.
    """

    pull: int
    number: int
    source: Shard
    dst_pages: tuple[int, ...]


@dataclass(frozen=True)
class CopyResult:
    """A job that has stopped: nothing touches its destination pages any more, whatever `error` says."""

    job: Copy
    path: str  # the backend that really moved the bytes
    bytes: int
    seconds: float
    error: EyasError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


class Backend(ABC):
    """Moves whole pages from a peer's pool into this worker's. Called by one thread only.

    `copy` returns the bytes moved once the job's destination is written and will not be written again;
    it raises an `EyasError` (`TransferFailed` if the source is gone) under the same promise, and ends
    within a bounded time. `close` lets go of all memory.
    """

    name: str

    @abstractmethod
    def copy(self, job: Copy) -> int: ...

    @abstractmethod
    def close(self) -> None: ...


def page_view(memory: memoryview, geometry: Geometry) -> Pages:
    """View a pool's memory as `[geometry.pages, page_bytes]` without a copy."""
    if memory.nbytes < geometry.pool_bytes:
        raise ConfigError(f"The KV pool has {memory.nbytes} bytes, its geometry needs {geometry.pool_bytes}.")
    flat = np.frombuffer(memory, np.uint8, geometry.pool_bytes)
    return flat.reshape(geometry.pages, geometry.page_bytes)


def copy_pages(job: Copy, source: Pages, destination: Pages) -> int:
    """Copy a job's pages between mapped pools, runs of consecutive pages in one go; returns the bytes.

    NumPy copies them without holding the GIL, so the engine's loop goes on beside it.
    """
    pages = job.source.pages
    if pages and not 0 <= min(pages) <= max(pages) < len(source):
        raise TransferFailed(f"The handle names pages that the pool {job.source.pool} does not have.")
    for src, dst, count in _runs(pages, job.dst_pages):
        destination[dst : dst + count] = source[src : src + count]
    return len(pages) * int(destination.shape[1])


def _runs(src: tuple[int, ...], dst: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(first source page, first destination page, count) of every stretch where both go up by one."""
    start = 0
    for i in range(1, len(src) + 1):
        if i == len(src) or src[i] != src[i - 1] + 1 or dst[i] != dst[i - 1] + 1:
            yield src[start], dst[start], i - start
            start = i
