"""`cuda_ipc`: the peer's pool is memory of GPUs of this host, which this process maps and reads.

An owner's death does not disturb a copy: only the lease decides what its bytes are worth. But it leaves the
memory readable, and allocated: it is free only when all have unmapped it. So a thread waits for the end of
each owner, and unmaps at once. Ranks may differ in number: each of ours takes its heads from the peer's ranks
that have them; from one, where all have all.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eyas.common.errors import ConfigError, TransferFailed
from eyas.common.wire.pool import Export
from kv_transfer.area import DeviceArea
from kv_transfer.backends.base import BackendSite, BlockingBackend, CopyJob, PeerSource, check_pages, runs
from kv_transfer.gpu.driver import CopyBlock, DriverError, GpuDriver, GpuMemory
from kv_transfer.gpu.handover import take, wait_for_end
from kv_transfer.host_files import HostFile
from kv_transfer.layout import HeadShare, replicas, shares


@dataclass(frozen=True)
class _PeerView:
    """A peer's rank as one of ours sees it. `heads`: how many the peer has; `share`: the ones that come."""

    ours: DeviceArea
    peer: MappedMemory
    heads: int
    share: HeadShare

    @property
    def whole(self) -> bool:
        """Whether pages of the two have the same bytes."""
        return self.heads == self.share.heads == self.ours.geometry.kv_heads

    @property
    def head_bytes(self) -> int:
        """The bytes of one head of one row."""
        geometry = self.ours.geometry
        return geometry.page_bytes // (geometry.page_rows * geometry.kv_heads)

    @property
    def peer_page(self) -> int:
        """Bytes of the peer's pages."""
        return self.ours.geometry.page_rows * self.heads * self.head_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes that come of a page."""
        return self.ours.geometry.page_rows * self.share.heads * self.head_bytes

    def blocks(self, job: CopyJob, memory: GpuMemory) -> Iterator[CopyBlock]:
        """Returns the blocks of the peer's `memory` to copy for the pages of a job."""
        size = self.ours.geometry.page_bytes
        if self.whole:
            for src, dst, count in runs(job.source.pages, job.dst_pages):
                yield CopyBlock(memory.address + src * size, self.ours.address + dst * size, count * size)
            return
        head, share = self.head_bytes, self.share
        for src, dst in zip(job.source.pages, job.dst_pages, strict=True):
            yield CopyBlock(
                memory.address + src * self.peer_page + share.theirs * head,
                self.ours.address + dst * size + share.ours * head,
                share.heads * head,
                self.ours.geometry.page_rows,
                self.heads * head,
                self.ours.geometry.kv_heads * head,
            )


@dataclass(frozen=True)
class PeerRank(PeerSource):
    """The pool of one of the peer's ranks, by those of our ranks that take something of it."""

    views: tuple[_PeerView, ...]
    direct = True

    @property
    def current(self) -> bool:
        """False once the owner's process has ended."""
        return not any(view.peer.gone for view in self.views)


class CudaIpcBackend(BlockingBackend):
    """Copies from pools whose sockets lie directly in `pool_dir`: a peer may name no other file here."""

    name = "cuda_ipc"
    direct = True

    def __init__(self, site: BackendSite) -> None:
        super().__init__(site)
        self._pool_dir = site.pool_dir
        self._devices = site.devices
        self._peers: dict[tuple[HostFile, int], MappedMemory] = {}  # by its socket and our rank

    def export(self, rank: int = 0) -> Export | None:
        """Returns a rank's handover socket, its GPU, and its heads."""
        if not self._devices or (area := self._devices[rank]).allocation is None:
            return None
        return {
            **HostFile.at(area.giver).export(),
            "gpu": area.allocation.driver.uuid,
            "rank": str(rank).encode(),
            "ranks": str(len(self._devices)).encode(),
            "heads": str(area.geometry.kv_heads).encode(),
        }

    def open(self, export: Export) -> PeerSource:
        """Raises ConfigError if the peer is on another host, or on a GPU that ours cannot read."""
        giver = HostFile.find(export, self._pool_dir)
        rank, heads = (_number(export, field) for field in ("rank", "heads"))
        our_shares = self._shares(export, rank, heads)
        if self._devices and (ours := self._devices[0].geometry).state_pages and heads != ours.kv_heads:
            raise ConfigError(
                "heads of recurrent states are gathered in staging, which this way does without"
            )
        return PeerRank(
            tuple(self._view(share, giver, export.get("gpu", b""), heads) for share in our_shares)
        )

    def _shares(self, export: Export, rank: int, heads: int) -> list[HeadShare]:
        """Returns our ranks' shares of the peer's heads, by their number."""
        if self._devices and self._devices[0].geometry.replicated:
            return replicas(rank, _number(export, "ranks"), heads, len(self._devices))
        ours = self._devices[0].geometry.kv_heads if self._devices else 0
        if matched := shares(rank, heads, ours, len(self._devices)):
            return matched
        raise ConfigError("this worker's KV pool is not on a GPU, or needs nothing of this peer's")

    def copy(self, source: PeerSource, job: CopyJob) -> int:
        """Pages into all of our ranks that take some of them; the bytes that came."""
        assert isinstance(source, PeerRank)
        moved = 0
        for view in source.views:
            with _transfer_errors(), view.peer.mapped() as memory:
                check_pages(job, memory.size // view.peer_page)
                view.peer.driver.copy(list(view.blocks(job, memory)))
            moved += len(job.dst_pages) * view.page_bytes
        return moved

    def read_back(self, source: PeerSource, proof: CopyJob) -> int:
        """Returns the checksum of the peer's page with the copied bytes as they are in our pool.

        If one of our ranks has other bytes than the proof wants, it is that one's. Where none takes anything,
        nothing is wrong.
        """
        assert isinstance(source, PeerRank)
        checksums = [_checksum(view, proof) for view in source.views] or [proof.proof or 0]
        return next((one for one in checksums if one != proof.proof), checksums[0])

    def _view(self, share: HeadShare, giver: HostFile, gpu: bytes, heads: int) -> _PeerView:
        """`giver`: the peer's socket."""
        ours = self._devices[share.rank]
        if ours.allocation is None:
            raise ConfigError("this worker's KV pool is in memory that takes no peer's pages")
        driver = ours.allocation.driver
        with _transfer_errors():
            obstacle = driver.obstacle(gpu)
        if obstacle:
            raise ConfigError(f"the peer's KV pool cannot be read: {obstacle}")
        self._peers = {name: peer for name, peer in self._peers.items() if not peer.gone}
        peer = self._peers.setdefault((giver, share.rank), MappedMemory(giver.path, driver))
        return _PeerView(ours, peer, heads, share)

    def close(self, deadline: float) -> bool:
        """Unmaps all peers' pools; False if a copy still runs."""
        if not super().close(deadline):
            return False
        for peer in self._peers.values():
            peer.close()
        return True


def _checksum(view: _PeerView, proof: CopyJob) -> int:
    """CRC-32 of the proof page as the peer has it, but for the heads that one of our ranks took of it."""
    with _transfer_errors(), view.peer.mapped() as memory:
        driver, page = view.peer.driver, view.ours.geometry.page_bytes
        ours = driver.read(view.ours.address + proof.dst_pages[0] * page, page)
        if view.whole:
            return zlib.crc32(ours)
        theirs = driver.read(memory.address + proof.source.pages[0] * view.peer_page, view.peer_page)
    rows, share = view.ours.geometry.page_rows, view.share
    whole = np.frombuffer(bytearray(theirs), np.uint8).reshape(rows, view.heads, -1)
    came = np.frombuffer(ours, np.uint8).reshape(rows, view.ours.geometry.kv_heads, -1)
    whole[:, share.theirs : share.theirs + share.heads] = came[:, share.ours : share.ours + share.heads]
    return zlib.crc32(whole.data)


@contextlib.contextmanager
def _transfer_errors() -> Iterator[None]:
    """Turns errors of the driver into TransferFailed."""
    try:
        yield
    except DriverError as error:
        raise TransferFailed(str(error)) from None


def _number(export: Export, field: str) -> int:
    text = export.get(field, b"")
    if not text.isdigit():
        raise ConfigError(f"the peer's KV pool has {text!r} for its {field}, which is no number")
    return int(text)


class MappedMemory:
    """The memory of the giver at `path`, mapped for one GPU of ours."""

    def __init__(self, path: str, driver: GpuDriver) -> None:
        self._path = path
        self.driver = driver
        self._using = threading.Lock()  # by the copy that runs, or the one that maps or unmaps
        self._memory: GpuMemory | None = None
        self._giver: socket.socket | None = None
        self._watcher: threading.Thread | None = None
        self._gone = False

    @property
    def gone(self) -> bool:
        """Whether the owner has ended, or we have closed it."""
        return self._gone

    @contextlib.contextmanager
    def mapped(self) -> Iterator[GpuMemory]:
        """The memory, mapped at least until the end of the `with`.

        Raises TransferFailed if the owner is gone, or gives nothing; DriverError if it cannot be mapped.
        """
        with self._using:
            yield self._map()

    def close(self) -> None:
        """Unmaps, once no copy holds it."""
        with self._using:
            self._gone = True
            if self._giver is not None:
                with contextlib.suppress(OSError):
                    self._giver.shutdown(socket.SHUT_RDWR)  # wakes the watcher
        if self._watcher is not None:
            self._watcher.join()

    def _map(self) -> GpuMemory:
        if self._gone:
            raise TransferFailed(f"the owner of {self._path} is gone")
        if self._memory is None:
            taken = take(self._path)
            try:
                self._memory = self.driver.map(taken.descriptor, taken.size)
            except DriverError:
                taken.giver.close()
                raise
            finally:
                os.close(taken.descriptor)
            self._giver = taken.giver
            self._watcher = threading.Thread(target=self._until_end, name="kv-mapping", daemon=True)
            self._watcher.start()
        return self._memory

    def _until_end(self) -> None:
        assert self._giver is not None
        wait_for_end(self._giver)
        with self._using:  # a copy that runs ends well: the memory lives as long as it is mapped
            self._gone = True
            self._giver.close()
            assert self._memory is not None
            self.driver.unmap(self._memory)
            self._memory = None
