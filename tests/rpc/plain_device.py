"""`memory`: a direct backend over plain memory, where a pool that is in no file lies at its address."""

from __future__ import annotations

import ctypes
import zlib
from dataclasses import dataclass

import numpy as np

from eyas.common.errors import ConfigError
from eyas.common.pool import Export
from kv_transfer.area import DeviceArea, Pages
from kv_transfer.backends.base import Copy, Site, Source, copy_pages
from kv_transfer.backends.blocking import BlockingBackend


@dataclass(frozen=True)
class Neighbour(Source):
    """A pool of this process."""

    pages: Pages


def pages_of(device: DeviceArea) -> Pages:
    """The pool and its proof page, where they lie."""
    size = (device.count + 1) * device.page_bytes
    memory = (ctypes.c_uint8 * size).from_address(device.address)
    return np.frombuffer(memory, np.uint8).reshape(device.count + 1, device.page_bytes)


class MemoryBackend(BlockingBackend):
    """Copies from pool to pool, where both are in no file."""

    name, direct = "memory", True

    def __init__(self, site: Site) -> None:
        super().__init__(site.area)
        self._device = site.device

    def export(self) -> Export | None:
        if self._device is None:
            return None
        return {"address": str(self._device.address).encode(), "count": str(self._device.count).encode()}

    def open(self, export: Export) -> Source:
        if self._device is None:
            raise ConfigError("this worker's pool is not a device's")
        address, count = (int(export[field]) for field in ("address", "count"))
        return Neighbour(pages_of(DeviceArea(address, self._device.page_bytes, count, ordinal=0)))

    def copy(self, source: Source, job: Copy) -> int:
        assert isinstance(source, Neighbour) and self._device is not None
        return copy_pages(job, source.pages, pages_of(self._device))

    def checksum(self, page: int) -> int:
        assert self._device is not None
        return zlib.crc32(pages_of(self._device)[page].data)


class OffByOne(MemoryBackend):
    """Brings the wrong page, and does not know it."""

    def checksum(self, page: int) -> int:
        return super().checksum(page - 1)
