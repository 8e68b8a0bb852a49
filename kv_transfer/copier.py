"""The copies that run: each is given to the backend of its route, and reported once when it has stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from eyas.common.errors import TransferFailed
from kv_transfer.backends.base import CopyJob, CopyResult, TransferBackend
from kv_transfer.peers import PeerRoute


class PageCopier:
    """Copies by `backends`, into the memory that they were made for. No call blocks, but `close`."""

    def __init__(self, backends: Mapping[str, TransferBackend]) -> None:
        self._backends = backends
        self._running: dict[tuple[int, int], tuple[PeerRoute, CopyJob]] = {}

    def submit(self, route: PeerRoute, job: CopyJob) -> None:
        """Begin a copy; exactly one `CopyResult` follows."""
        self._running[job.name] = route, job
        route.backend.start(route.source, job)

    def cancel(self, pull: int) -> None:
        """End the copies of a pull early; each is reported when it has stopped."""
        for route, job in list(self._running.values()):
            if job.pull == pull:
                route.backend.cancel(job)

    @property
    def brief(self) -> bool:
        """Does a copy run that ends within milliseconds? Those between GPUs do."""
        return any(route.backend.direct for route, _ in self._running.values())

    def finished(self) -> list[CopyResult]:
        """The copies that stopped since the last call."""
        results = [result for backend in self._backends.values() for result in backend.poll()]
        return [self._judged(result) for result in results]

    def close(self, deadline: float) -> bool:
        """End all backends; False if one still copies at `deadline` (monotonic seconds).

        After False the memory that they copy into must stay mapped.
        """
        return all([backend.close(deadline) for backend in self._backends.values()])

    def _judged(self, result: CopyResult) -> CopyResult:
        """A proof that came, but with other bytes, proves nothing."""
        route, job = self._running.pop(result.job.name)
        if job.proof is None or not result.ok or route.backend.checksum(job) == job.proof:
            return result
        error = TransferFailed(f"{result.path} brought other bytes than the owner has")
        return dataclasses.replace(result, error=error)
