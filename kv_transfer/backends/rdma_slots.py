"""`rdma_slots`: READs of NIXL between slots in the memory of GPUs, where pages of their pools are gathered.

For NICs that cannot read a pool (libfabric transfers no memory of cuMemCreate), and for numbers of ranks that
differ: single heads of rows are too small for any NIC. No byte passes a host's memory. Each rank of ours has
slots on its own GPU, so what it reads crosses the NIC that is nearest to that one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from eyas.common.errors import ConfigError
from eyas.common.wire.pool import Export
from kv_transfer.backends.base import BackendSite, CopyJob, PeerSource
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.backends.nixl_agent import OwnPages, load


class RdmaSlotsBackend(NixlBackend):
    """Reads slots of other agents' GPUs into slots of ours."""

    name = "rdma_slots"
    on_device = True

    def __init__(self, site: BackendSite, bindings: Callable[[], Any] = load) -> None:
        super().__init__(site, bindings)
        self._slots = site.slots
        self._first = site.devices[0].allocation if site.devices else None

    def export(self, rank: int = 0) -> Export | None:
        """None without slots."""
        return super().export(rank) if self._slots else None

    def open(self, export: Export) -> PeerSource:
        """Raises ConfigError without slots of our own."""
        if not self._slots:
            raise ConfigError("this worker has no staging in the memory of its devices")
        return super().open(export)

    def checksum(self, proof: CopyJob) -> int:
        raise AssertionError("a proof in slots is judged by their owner")

    def _own_pages(self) -> Sequence[OwnPages]:
        return [OwnPages.on_device(slots) for slots in self._slots]

    def _gpu(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._first is None else self._first.driver.bound()
