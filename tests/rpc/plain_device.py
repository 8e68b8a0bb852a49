"""`memory`: a direct backend over plain memory, where a pool that is in no file lies at its address."""

from __future__ import annotations

import ctypes
import zlib
from dataclasses import dataclass

import msgspec
import numpy as np

from eyas.common.errors import ConfigError
from eyas.common.wire.pool import Export
from kv_transfer.area import DeviceArea, Pages
from kv_transfer.backends.base import BackendSite, BlockingBackend, CopyJob, PeerSource, copy_pages


@dataclass(frozen=True)
class Neighbour(PeerSource):
    """A pool of this process."""

    pages: Pages
    direct = True


def pages_of(device: DeviceArea) -> Pages:
    """The pool and its proof page, where they lie."""
    geometry = device.geometry
    memory = (ctypes.c_uint8 * (geometry.pool_bytes + geometry.page_bytes)).from_address(device.address)
    return np.frombuffer(memory, np.uint8).reshape(geometry.pages + 1, geometry.page_bytes)


class MemoryBackend(BlockingBackend):
    """Copies from pool to pool, where both are in no file."""

    name, direct = "memory", True

    def __init__(self, site: BackendSite) -> None:
        super().__init__(site)
        self._devices = site.devices

    def export(self, rank: int = 0) -> Export | None:
        if not self._devices:
            return None
        device = self._devices[rank]
        return {"address": str(device.address).encode(), "pages": str(device.geometry.pages).encode()}

    def open(self, export: Export) -> PeerSource:
        if not self._devices:
            raise ConfigError("this worker's pool is not a device's")
        address, pages = (int(export[field]) for field in ("address", "pages"))
        geometry = msgspec.structs.replace(self._devices[0].geometry, pages=pages)
        return Neighbour(pages_of(DeviceArea(address, geometry)))

    def copy(self, source: PeerSource, job: CopyJob) -> int:
        assert isinstance(source, Neighbour)
        return copy_pages(job, source.pages, pages_of(self._devices[0]))

    def read_back(self, source: PeerSource, proof: CopyJob) -> int:
        return zlib.crc32(pages_of(self._devices[0])[proof.dst_pages[0]].data)


class OffByOne(MemoryBackend):
    """Brings the page before the one that is asked for, and does not know it."""

    def copy(self, source: PeerSource, job: CopyJob) -> int:
        assert isinstance(source, Neighbour)
        return super().copy(Neighbour(np.roll(source.pages, 1, axis=0)), job)
