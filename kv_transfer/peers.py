"""The peers from which pages are pulled, and the backend that moves the pages of each.

A record of a peer is that of one incarnation, for all groups and ranks. It is created when the worker has
described its pages, and dropped as a whole: when another incarnation of the worker appears, when its memory
is gone, or when there are too many records.

A route is the best backend that both ends have and that was proven by a copy of the peer's proof page. The
caller makes that copy, and decides what happens to a request whose pages no backend can reach.
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
"""The most records. A worker whose record was dropped costs another handshake and proof."""
_log = logging.getLogger("eyas.pulls")


@dataclass(frozen=True)
class PeerRoute:
    """One backend's access to the pages of a peer's rank. `parts`: the parts of them that our ranks pull.

    `worker`: the peer's name, by which quotas count.
    """

    backend: TransferBackend
    source: PeerSource
    parts: tuple[PagePart, ...] = (WHOLE,)
    worker: str = ""


@dataclass(frozen=True)
class ProvenRoute:
    """The route by which a peer's proof page arrived, and why the better routes were refused."""

    route: PeerRoute
    refusals: Mapping[str, EyasError]


@dataclass(eq=False)
class KvPeer:
    """One incarnation of a worker. `board`: its lease board; None if it is on another host, or gone.

    `pools`: as its handshakes described them. `proven`: the routes to its pages, by group and rank.
    """

    worker: str
    epoch: int
    board: LeaseBoardView | None
    pools: dict[KvKind, PoolInfo] = field(default_factory=dict)
    proven: dict[tuple[KvKind, int], ProvenRoute] = field(default_factory=dict)

    @property
    def gone(self) -> bool:
        """Whether the memory of the peer is known to be gone."""
        return not all(proven.route.source.current for proven in self.proven.values())

    def pages(self, group: KvKind, rank: int) -> PeerPages:
        """The pages of one rank, of a described group."""
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
        """The proven route, until a copy fails."""
        return self.peer.proven.get((self.group, self.rank))

    def prove(self, route: PeerRoute, refusals: Mapping[str, EyasError]) -> None:
        """Records that the proof page arrived by `route`, after the others were refused."""
        self.peer.proven[self.group, self.rank] = ProvenRoute(route, dict(refusals))

    def doubt(self) -> None:
        """Drops the proven route after a failed copy: the next pull proves one again."""
        self.peer.proven.pop((self.group, self.rank), None)


class KvPeers:
    """The records of all peers of an engine. `pool_dir`: the folder of this host's lease boards."""

    def __init__(self, pool_dir: str) -> None:
        self._pool_dir = pool_dir
        self._peers: dict[str, KvPeer] = {}  # by worker, least recently used first

    def known(self, handle: KvHandle) -> KvPeer | None:
        """The incarnation that offered `handle`, if it has described pages of the handle's layout."""
        peer = self._peers.get(handle.worker)
        info = None if peer is None else peer.pools.get(handle.group)
        if peer is None or info is None or (info.epoch, info.layout_hash) != (handle.epoch, handle.layout):
            return None
        self._use(peer)
        return peer

    def meet(self, worker: str, group: KvKind, info: PoolInfo) -> KvPeer:
        """The record of an incarnation that has described its pages; replaces that of an earlier one."""
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
    """The backends that may be used for the pages of one group. `backends`: by name, the best first.
    `transfer`: auto, or the only backend to use. `ours`: the destination pools.
    """

    def __init__(self, backends: Mapping[str, TransferBackend], transfer: str, ours: RankPools) -> None:
        self._ours = ours
        self._backends = [b for name, b in backends.items() if transfer in (AUTO, name)]
        self._transfer = transfer
        self.refused: Counter[str] = Counter()  # failed proofs and copies, by backend

    def known(self, pages: PeerPages) -> PeerRoute | None:
        """The proven route to these pages; None if there is none."""
        return None if pages.proven is None else pages.proven.route

    def passed_over(self, pages: PeerPages) -> dict[str, str]:
        """Why each backend that is better than the proven one is not used, by name, the best first."""
        proven = pages.proven
        if proven is None:
            return {}
        taken = proven.route.backend.name
        better = itertools.takewhile(lambda name: name != taken, BACKENDS)
        return {name: self._obstacle(name, proven.refusals) for name in better}

    def search(self, pages: PeerPages) -> RouteSearch:
        """A new search for a route to `pages`, over all backends that may be used."""
        return RouteSearch(pages, list(self._backends), self._transfer, self._ours, self.refused)

    def _obstacle(self, name: str, refusals: Mapping[str, EyasError]) -> str:
        if name in refusals:
            return refusals[name].message
        return missing(name) or f"transfer is {self._transfer}, which allows no other way"


@dataclass
class RouteSearch:
    """Tries the routes to one rank's pages, the best first. `refused` counts those that failed."""

    pages: PeerPages
    left: list[TransferBackend]
    transfer: str
    ours: RankPools
    refused: Counter[str]
    refusals: dict[str, EyasError] = field(default_factory=dict)

    def next(self) -> PeerRoute:
        """The next route that opens, to be proven. Raises the reasons if none is left."""
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
        """Raises ConfigError if the backend moves whole pages only, and our pages differ in their heads."""
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
        """Records that the proof page arrived by `route`."""
        pages = self.pages
        if pages.proven is None:
            _log.info("%s KV of worker %s comes by %s", pages.group, pages.worker, route.backend.name)
        pages.prove(route, self.refusals)

    def refuse(self, name: str, error: EyasError) -> None:
        """Records and logs that this backend cannot reach the peer's pages; another will be tried."""
        self.refusals[name] = error
        if not isinstance(error, ConfigError):
            self.refused[name] += 1
        level = logging.INFO if isinstance(error, ConfigError) else logging.WARNING
        text = "%s KV of worker %s cannot come by %s: %s"
        _log.log(level, text, self.pages.group, self.pages.worker, name, error.message)

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
