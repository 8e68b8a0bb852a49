"""`tcp`: pages over several connections to their owner's process, for hosts without RDMA.

Both ends are engines: the owner's listener is in `tcp_owner`, the puller's threads in `tcp_reads`. Bytes go
in plain, with a checksum; any process that has the token of an export may read the area, as with `nixl`.
"""

from __future__ import annotations

import logging
import queue

from eyas.common.errors import ConfigError
from eyas.common.wire.pool import Export
from kv_transfer.backends.base import BackendSite, CopyJob, PeerSource
from kv_transfer.backends.staged_reads import ReadingBackend, is_staging
from kv_transfer.backends.tcp_owner import PageServer
from kv_transfer.backends.tcp_reads import SocketReads, TcpPeer
from kv_transfer.copy_threads import CopyDone

_log = logging.getLogger("eyas.pulls")


class TcpBackend(ReadingBackend):
    """Reads from the listeners of others, and listens itself once it has exported."""

    name = "tcp"

    def __init__(self, site: BackendSite) -> None:
        super().__init__(site)
        self._host = site.host
        self._server: PageServer | None = None
        self._done: queue.SimpleQueue[CopyDone[CopyJob]] = queue.SimpleQueue()
        self._ring = site.ring
        self._reads = SocketReads(self.area, self._tell)

    def export(self, rank: int = 0) -> Export | None:
        """Begins to listen. None without a file, or without a port."""
        if not self.area.path:
            return None
        try:
            self._server = self._server or PageServer(self.area, self._host)
        except OSError as error:
            _log.warning("KV pages cannot be read by tcp: %s", error)
            return None
        fields = {
            "host": self._server.host.encode(),
            "port": str(self._server.port).encode(),
            "token": self._server.token,
            "pages": str(len(self.area.pages)).encode(),
        }
        return self._offered(fields)

    def open(self, export: Export) -> PeerSource:
        try:
            host, port, pages = (export[name].decode() for name in ("host", "port", "pages"))
            peer = TcpPeer(host, int(port), export["token"], int(pages), is_staging(export))
        except (KeyError, ValueError) as error:
            raise ConfigError(f"what the peer exports is not a listener: {error!r}") from error
        if not (peer.host and 0 < peer.port < 65536 and peer.pages > 0 and len(peer.token) == 32):
            raise ConfigError("what the peer exports is not a listener's address")
        return peer

    def close(self, deadline: float) -> bool:
        if self._server is not None:
            self._server.close()
        return self._reads.close(deadline)

    def _read(self, source: PeerSource, job: CopyJob) -> None:
        assert isinstance(source, TcpPeer)
        self._reads.add(source, job)

    def _stop(self, job: CopyJob) -> None:
        self._reads.cancel(job)

    def _tell(self, done: CopyDone[CopyJob]) -> None:
        self._done.put(done)
        self._ring()

    def _stopped(self) -> list[CopyDone[CopyJob]]:
        return [self._done.get() for _ in range(self._done.qsize())]
