"""Ways whose copies block their caller: a thread makes them, one after the other, for every such backend."""

from __future__ import annotations

from abc import abstractmethod

from kv_transfer.area import PoolArea
from kv_transfer.backends.base import CopyJob, CopyResult, PeerSource, TransferBackend
from kv_transfer.copy_thread import CopyThread


class BlockingBackend(TransferBackend):
    """A subclass says what it exports, what it opens, and how it copies."""

    def __init__(self, area: PoolArea) -> None:
        self.area = area
        self._thread: CopyThread[CopyJob] = CopyThread(self.name)
        self._checksums: dict[tuple[int, int], int] = {}  # of proofs, by name, until they are asked for

    @abstractmethod
    def copy(self, source: PeerSource, job: CopyJob) -> int:
        """Move the bytes of a job and give their number; called by the copy thread.

        Raises an EyasError (TransferFailed if the peer is gone). However it ends, nothing writes to the
        destination afterwards, and it ends within a bounded time.
        """

    def read_back(self, source: PeerSource, proof: CopyJob) -> int:
        """CRC-32 of the page that `proof` has brought, where it landed; called by the copy thread.

        A backend whose copies do not land in `area` has its own.
        """
        return self.area.checksum(proof.dst_pages[0])

    def start(self, source: PeerSource, job: CopyJob) -> None:
        self._thread.submit(job, lambda: self._do(source, job))

    def poll(self) -> list[CopyResult]:
        done = self._thread.finished()
        return [CopyResult(d.job, self.name, d.bytes, d.seconds, d.error) for d in done]

    def cancel(self, job: CopyJob) -> None:
        self._thread.cancel(job)

    def checksum(self, proof: CopyJob) -> int:
        return self._checksums.pop(proof.name)

    def close(self, deadline: float) -> bool:
        return self._thread.close(deadline)

    def _do(self, source: PeerSource, job: CopyJob) -> int:
        moved = self.copy(source, job)
        if job.proof is not None:
            self._checksums[job.name] = self.read_back(source, job)
        return moved
