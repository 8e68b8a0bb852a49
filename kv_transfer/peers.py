"""The peers whose pages come here: a record of each incarnation, for all groups and ranks.

A record begins when the worker has described some of its pages. It is let go as a whole: when another
incarnation of the worker is met, when its memory is seen to be gone, or when too many others came later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from eyas.common.errors import EyasError, TransferFailed
from eyas.common.types import KvHandle, KvKind
from eyas.common.wire.pool import PoolInfo, RankPool
from kv_transfer.backends.base import PeerSource, TransferBackend
from kv_transfer.lease_board import LeaseBoardView

MOST_PEERS = 1024
"""Records at once. A worker beyond it is met anew, which costs a handshake and a proof."""


@dataclass(frozen=True)
class PeerRoute:
    """One backend's way to one peer's area."""

    backend: TransferBackend
    source: PeerSource


@dataclass(frozen=True)
class ProvenRoute:
    """The way by which a peer's proof page came, and what stood in the way of those tried before it."""

    route: PeerRoute
    refusals: Mapping[str, EyasError]


@dataclass(eq=False)
class KvPeer:
    """One incarnation of a worker. `board`: of its leases; None if it is on another host, or gone.

    `pools`: as its handshakes described them. `proven`: the ways to its pages, by group and rank.
    """

    worker: str
    epoch: int
    board: LeaseBoardView | None
    pools: dict[KvKind, PoolInfo] = field(default_factory=dict)
    proven: dict[tuple[KvKind, int], ProvenRoute] = field(default_factory=dict)

    @property
    def gone(self) -> bool:
        """Whether memory that was reached belongs to nobody any more."""
        return not all(proven.route.source.current for proven in self.proven.values())

    def pages(self, group: KvKind, rank: int) -> PeerPages:
        """The pages of one rank, of a group that was described."""
        return PeerPages(self, group, rank)


@dataclass(frozen=True)
class PeerPages:
    """The pages of one rank of a peer."""

    peer: KvPeer
    group: KvKind
    rank: int

    @property
    def worker(self) -> str:
        """The peer's name."""
        return self.peer.worker

    @property
    def info(self) -> PoolInfo:
        """The description of all ranks."""
        return self.peer.pools[self.group]

    @property
    def pool(self) -> RankPool:
        """The pool of this rank. Raises TransferFailed for a rank that the handshake did not describe."""
        for pool in self.info.ranks:
            if pool.rank == self.rank:
                return pool
        raise TransferFailed(f"worker {self.worker} described no {self.group} pages of rank {self.rank}")

    @property
    def proven(self) -> ProvenRoute | None:
        """The way that led there, until a copy fails."""
        return self.peer.proven.get((self.group, self.rank))

    def prove(self, route: PeerRoute, refusals: Mapping[str, EyasError]) -> None:
        """The proof page came this way, after others were refused."""
        self.peer.proven[self.group, self.rank] = ProvenRoute(route, dict(refusals))

    def doubt(self) -> None:
        """A copy failed: the next pull proves a way anew."""
        self.peer.proven.pop((self.group, self.rank), None)


class KvPeers:
    """The records of an engine. `pool_dir`: the folder where lease boards of this host lie."""

    def __init__(self, pool_dir: str) -> None:
        self._pool_dir = pool_dir
        self._peers: dict[str, KvPeer] = {}  # by worker; the one that was longest unused first

    def known(self, handle: KvHandle) -> KvPeer | None:
        """The incarnation that offered `handle`, if it has described pages of the meaning that these have."""
        peer = self._peers.get(handle.worker)
        info = None if peer is None else peer.pools.get(handle.group)
        if peer is None or info is None or (info.epoch, info.layout_hash) != (handle.epoch, handle.layout):
            return None
        self._use(peer)
        return peer

    def meet(self, worker: str, group: KvKind, info: PoolInfo) -> KvPeer:
        """The incarnation that has just described its pages; nothing is kept of one before it."""
        peer = self._peers.get(worker)
        if peer is None or peer.epoch != info.epoch:
            self._peers = {name: other for name, other in self._peers.items() if not other.gone}
            peer = KvPeer(worker, info.epoch, LeaseBoardView.find(info.board, self._pool_dir))
        peer.pools[group] = info
        self._use(peer)
        while len(self._peers) > MOST_PEERS:
            del self._peers[next(iter(self._peers))]
        return peer

    def _use(self, peer: KvPeer) -> None:
        self._peers.pop(peer.worker, None)
        self._peers[peer.worker] = peer
