"""The peers whose pages come here, and the backend that moves each one's pages.

A record of a peer is one incarnation's, for all groups and ranks. It begins when the worker has described
some of its pages. It is let go as a whole: when another incarnation of the worker is met, when its memory is
seen to be gone, or when too many others came later.

A route is the best backend that both ends have, proven by a copy first. A proof is a copy like any other, of
the peer's proof page. Who makes it, and into which page, is the caller's business; so is what it means for a
request that no way leads to its pages.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from eyas.common.errors import ConfigError, EyasError, TransferFailed
from eyas.common.types import KvHandle, KvKind
from eyas.common.wire.pool import PoolInfo, RankPool
from kv_transfer.backends.base import PeerSource, TransferBackend
from kv_transfer.backends.table import AUTO, BACKENDS, missing
from kv_transfer.layout import WHOLE, PagePart, RankPools
from kv_transfer.lease_board import LeaseBoardView

MOST_PEERS = 1024
"""Records at once. A worker beyond it is met anew, which costs a handshake and a proof."""
_log = logging.getLogger("eyas.pulls")


@dataclass(frozen=True)
class PeerRoute:
    """One backend's way to the area of a peer's rank. `parts`: what our ranks take of its pages by it.

    `worker`: the peer, all of whose ranks share what one peer may have.
    """

    backend: TransferBackend
    source: PeerSource
    parts: tuple[PagePart, ...] = (WHOLE,)
    worker: str = ""


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


class PeerRoutes:
    """The backends that may be taken to the pages of one group. `backends`: by name, the best first.
    `transfer`: auto, or the one that may be taken. `ours`: the pools that pages come to.
    """

    def __init__(self, backends: Mapping[str, TransferBackend], transfer: str, ours: RankPools) -> None:
        self._ours = ours
        self._backends = [b for name, b in backends.items() if transfer in (AUTO, name)]
        self._transfer = transfer
        self.refused: Counter[str] = Counter()  # proofs and copies that failed, by the way's name

    def known(self, pages: PeerPages) -> PeerRoute | None:
        """The proven way to these pages."""
        return None if pages.proven is None else pages.proven.route

    def passed_over(self, pages: PeerPages) -> dict[str, str]:
        """Why each way that is better than the proven one was not taken, by name, the best first."""
        proven = pages.proven
        if proven is None:
            return {}
        taken = proven.route.backend.name
        better = itertools.takewhile(lambda name: name != taken, BACKENDS)
        return {name: self._obstacle(name, proven.refusals) for name in better}

    def search(self, pages: PeerPages) -> RouteSearch:
        """A new search for a way to `pages`, through all backends that may be taken."""
        return RouteSearch(pages, list(self._backends), self._transfer, self._ours, self.refused)

    def _obstacle(self, name: str, refusals: Mapping[str, EyasError]) -> str:
        if name in refusals:
            return refusals[name].message
        return missing(name) or f"transfer is {self._transfer}, which allows no other way"


@dataclass
class RouteSearch:
    """The ways to one rank's pages, from the best on. `refused` counts those that failed."""

    pages: PeerPages
    left: list[TransferBackend]
    transfer: str
    ours: RankPools
    refused: Counter[str]
    refusals: dict[str, EyasError] = field(default_factory=dict)

    def next(self) -> PeerRoute:
        """The next way that opens, to be proven. Raises what stands in the way if none is left."""
        exports = self.pages.pool.exports
        while self.left:
            backend = self.left.pop(0)
            try:
                if backend.name not in exports:
                    raise ConfigError(f"worker {self.pages.worker} does not offer its KV by {backend.name}")
                if self.transfer == AUTO and (drawback := backend.drawback(exports[backend.name])):
                    raise ConfigError(drawback)
                return self._route(backend, backend.open(exports[backend.name]))
            except EyasError as error:
                self.refuse(backend.name, error)
        raise self._verdict()

    def _route(self, backend: TransferBackend, source: PeerSource) -> PeerRoute:
        """Raises ConfigError where only whole pages come this way, and ours are others."""
        if backend.direct:
            return PeerRoute(backend, source, worker=self.pages.worker)
        parts = self.ours.parts(self.pages.info, self.pages.rank, source.on_device)
        here, there = self.ours.ranks, len(self.pages.info.ranks)
        if any(part.width for part in parts) and not (self.ours.divides and source.divides):
            text = (
                f"pages are of {there} ranks there and of {here} here, and one of the two lets whole ones go"
            )
            raise ConfigError(f"{text}, by {backend.name}")
        return PeerRoute(backend, source, parts, self.pages.worker)

    def prove(self, route: PeerRoute) -> None:
        """The proof page came this way."""
        pages = self.pages
        if pages.proven is None:
            _log.info("%s KV of worker %s comes by %s", pages.group, pages.worker, route.backend.name)
        pages.prove(route, self.refusals)

    def refuse(self, way: str, error: EyasError) -> None:
        """Logs that this way does not lead to the peer's pages: another one will be taken."""
        self.refusals[way] = error
        if not isinstance(error, ConfigError):
            self.refused[way] += 1
        level = logging.INFO if isinstance(error, ConfigError) else logging.WARNING
        text = "%s KV of worker %s cannot come by %s: %s"
        _log.log(level, text, self.pages.group, self.pages.worker, way, error.message)

    def _verdict(self) -> EyasError:
        if self.transfer == AUTO:
            reasons = "; ".join(f"by {way}: {error.message}" for way, error in self.refusals.items())
            return TransferFailed(f"no way leads to the pages of worker {self.pages.worker}: {reasons}")
        if not self.refusals:
            return ConfigError(f"this worker has no way named {self.transfer}", param="transfer")
        (error,) = self.refusals.values()
        if not isinstance(error, ConfigError):
            return error
        only = f"{error.message}, and transfer is {self.transfer}, which allows no other way"
        return ConfigError(only, param="transfer")
