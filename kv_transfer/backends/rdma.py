"""`rdma`: NIXL's READs from GPU to GPU of two hosts, by network cards that reach the pools themselves.

The pool is registered once. A card reaches it where the driver lets it, so the backend offers nothing without
a card that is up near the GPU, or where the pool's memory is not for cards. And a READ of a GPU's memory
comes by whatever the library finds, TCP at last, without a word: so the rate of a probe decides whether this
is RDMA, and that of every long copy whether it still is. What falls below is refused by name, and pages go by
the next way.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from eyas.common.errors import ConfigError
from eyas.common.wire.pool import Export
from kv_transfer import nics
from kv_transfer.area import DeviceArea
from kv_transfer.backends.base import BackendSite, CopyJob, PeerSource
from kv_transfer.backends.nixl import SLOW, NixlBackend
from kv_transfer.backends.nixl_agent import NixlMemory, OwnPages, load
from kv_transfer.gpu.driver import DeviceAllocation, DriverError, GpuDriver
from kv_transfer.nics import RdmaCard

ALLOWED_PART = 1 / 16  # of a card's rate: many may read from one at a time
SLOW_PART = 1 / 4  # of a card's rate: what carries less than SLOW is no RDMA, unless its card is as slow

_log = logging.getLogger("eyas.pulls")


class RdmaBackend(NixlBackend):
    """Reads the pools of other GPUs into ours."""

    name = "rdma"
    on_device = True
    reads_pools = True

    def __init__(self, site: BackendSite, bindings: Callable[[], Any] = load) -> None:
        super().__init__(site, bindings)
        self.exports_staging = False
        self._pool, self._obstacle, cards = _reachable(site)
        self._cards = tuple(card.name for card in cards)
        self._rate = min((card.bytes_per_s for card in cards), default=0.0)
        self._scratch: DeviceAllocation | None = None
        if cards:
            _log.info("a GPU's pages are read by %s", ", ".join(self._cards))

    def export(self, rank: int = 0) -> Export | None:
        if self._obstacle:
            _log.info("KV pages cannot be read by rdma: %s", self._obstacle)
            return None
        return super().export(rank)

    def open(self, export: Export) -> PeerSource:
        """Raises ConfigError if there is no card here, or the export is none of this backend's."""
        if self._obstacle:
            raise ConfigError(self._obstacle)
        return super().open(export)

    def checksum(self, proof: CopyJob) -> int:
        return self._area.checksum(proof.dst_pages[0])

    def close(self, deadline: float) -> bool:
        ended = super().close(deadline)
        if ended and self._scratch is not None:
            self._scratch.free()
            self._scratch = None
        return ended

    @property
    def _area(self) -> DeviceArea:
        assert self._pool is not None
        return self._pool

    @property
    def _driver(self) -> GpuDriver:
        assert self._area.allocation is not None
        return self._area.allocation.driver

    def _offered(self, fields: Export) -> Export:
        return super()._offered(fields) | {"rate": str(int(self._rate)).encode()}

    def _floor(self, export: Export) -> float:
        rate = export.get("rate", b"")
        if not rate.isdigit():
            raise ConfigError(f"what the peer exports has a rate of {rate!r}")
        return least_rate(min(self._rate, float(rate)))

    def _own_pages(self) -> Sequence[OwnPages]:
        geometry, device = self._area.geometry, self._driver.ordinal
        try:
            self._scratch = self._scratch or DeviceAllocation.new(self._driver, geometry.page_bytes)
        except DriverError as error:
            raise ConfigError(f"the GPU has no memory for a scratch page: {error}") from None
        pool = NixlMemory(self._area.address, geometry.page_bytes, geometry.pages + 1, device)
        scratch = NixlMemory(self._scratch.memory.address, geometry.page_bytes, 1, device)
        return (OwnPages(pool, scratch, (self._pool, self._scratch)),)

    def _gpu(self) -> contextlib.AbstractContextManager[None]:
        return self._driver.bound()


def least_rate(card: float) -> float:
    """Bytes per second that READs must have, by cards of which the slower carries `card` of them."""
    return max(ALLOWED_PART * card, min(SLOW, SLOW_PART * card)) if card else SLOW


def _reachable(site: BackendSite) -> tuple[DeviceArea | None, str, tuple[RdmaCard, ...]]:
    """The pool that cards reach, why none is reached (empty: it is), and the cards."""
    if len(site.devices) != 1 or site.devices[0].allocation is None:
        return None, "this worker's KV pool is not one GPU's", ()
    pool, driver = site.devices[0], site.devices[0].allocation.driver
    try:
        if not driver.rdma_capable(pool.address):
            return None, "the driver lets no network card read this GPU's pool", ()
        cards = tuple(nics.near(driver.pci_address)) if site.cards is None else site.cards
    except DriverError as error:
        return None, f"the driver does not say whether cards reach the pool: {error}", ()
    return (pool, "", cards) if cards else (None, "no RDMA card of this host is up", ())
