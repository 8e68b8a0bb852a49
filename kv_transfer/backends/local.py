"""`local`: the source pool lives in this process (a unified worker's other half, tests)."""

from __future__ import annotations

from collections.abc import Mapping

from eyas.common.errors import TransferFailed
from kv_transfer.backends.base import Backend, Copy, Pages, copy_pages


class LocalBackend(Backend):
    """Copies from one of `pools` (by pool name; the mapping may grow and shrink meanwhile)."""

    name = "local"

    def __init__(self, destination: Pages, pools: Mapping[str, Pages]) -> None:
        self._destination = destination
        self._pools = pools

    def copy(self, job: Copy) -> int:
        source = self._pools.get(job.source.pool)
        if source is None:
            raise TransferFailed(f"The pool {job.source.pool} is not in this process.")
        return copy_pages(job, source, self._destination)

    def close(self) -> None:
        self._pools = {}
