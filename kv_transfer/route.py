"""Which backend moves a peer's pages: the best that both ends have, proven by a copy before it counts.

A proof is a copy like any other, of the peer's proof page. Who makes it, and into which page, is the
caller's business; so is what it means for a request that no way leads to its pages.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from eyas.common.errors import ConfigError, EyasError, TransferFailed
from eyas.common.pool import PoolInfo, RankPool
from eyas.common.types import KvKind
from kv_transfer.backends.base import Backend, Source
from kv_transfer.backends.table import AUTO, BACKENDS, missing

_log = logging.getLogger("eyas.pulls")


@dataclass(frozen=True)
class Route:
    """One backend's way to one peer's area."""

    backend: Backend
    source: Source


@dataclass(frozen=True)
class Peer:
    """The pages of one rank of one worker, as its handshake described them."""

    worker: str
    group: KvKind
    rank: int
    info: PoolInfo

    @property
    def name(self) -> tuple[str, KvKind, int]:
        """Without the epoch: a worker that restarts keeps it."""
        return self.worker, self.group, self.rank

    @property
    def pool(self) -> RankPool:
        """Raises TransferFailed for a rank that the handshake did not describe."""
        for pool in self.info.ranks:
            if pool.rank == self.rank:
                return pool
        raise TransferFailed(f"worker {self.worker} described no {self.group} pages of rank {self.rank}")


@dataclass(frozen=True)
class _Proven:
    """A way to one incarnation of a peer, and what stood in the way of those tried before it."""

    epoch: int
    route: Route
    refusals: Mapping[str, EyasError]


class Routes:
    """The proven way to each peer. `backends`: by name, the best first. `transfer`: auto, or the one that may
    be taken.
    """

    def __init__(self, backends: Mapping[str, Backend], transfer: str) -> None:
        self._backends = [b for name, b in backends.items() if transfer in (AUTO, name)]
        self._transfer = transfer
        self._proven: dict[tuple[str, KvKind, int], _Proven] = {}  # by peer

    def known(self, peer: Peer) -> Route | None:
        """The proven way to this incarnation of the peer."""
        proven = self._proven.get(peer.name)
        return proven.route if proven is not None and proven.epoch == peer.info.epoch else None

    def passed_over(self, peer: Peer) -> dict[str, str]:
        """Why each way that is better than the proven one was not taken, by name, the best first."""
        proven = self._proven.get(peer.name)
        if proven is None:
            return {}
        taken = proven.route.backend.name
        better = itertools.takewhile(lambda name: name != taken, BACKENDS)
        return {name: self._obstacle(name, proven.refusals) for name in better}

    def search(self, peer: Peer) -> Search:
        """A new search for a way to `peer`, through all backends that may be taken."""
        return Search(peer, list(self._backends), self._transfer)

    def prove(self, peer: Peer, route: Route, refusals: Mapping[str, EyasError]) -> None:
        """The peer's proof page came this way, after others were refused.

        What is left of peers that are gone is let go.
        """
        if self.known(peer) is None:
            _log.info("%s KV of worker %s comes by %s", peer.group, peer.worker, route.backend.name)
        self._proven = {name: p for name, p in self._proven.items() if p.route.source.current}
        self._proven[peer.name] = _Proven(peer.info.epoch, route, dict(refusals))

    def forget(self, peer: Peer) -> None:
        """A copy failed: the next pull proves a way anew."""
        self._proven.pop(peer.name, None)

    def _obstacle(self, name: str, refusals: Mapping[str, EyasError]) -> str:
        if name in refusals:
            return refusals[name].message
        return missing(name) or f"transfer is {self._transfer}, which allows no other way"


@dataclass
class Search:
    """The ways to one peer, from the best on."""

    peer: Peer
    left: list[Backend]
    transfer: str
    refusals: dict[str, EyasError] = field(default_factory=dict)

    def next(self) -> Route:
        """The next way that opens, to be proven. Raises what stands in the way if none is left."""
        exports = self.peer.pool.exports
        while self.left:
            backend = self.left.pop(0)
            try:
                if backend.name not in exports:
                    raise ConfigError(f"worker {self.peer.worker} does not offer its KV by {backend.name}")
                return Route(backend, backend.open(exports[backend.name]))
            except EyasError as error:
                self.refuse(backend.name, error)
        raise self._verdict()

    def refuse(self, way: str, error: EyasError) -> None:
        """This way does not lead to the peer's pages: said aloud, for another one will be taken."""
        self.refusals[way] = error
        level = logging.INFO if isinstance(error, ConfigError) else logging.WARNING
        text = "%s KV of worker %s cannot come by %s: %s"
        _log.log(level, text, self.peer.group, self.peer.worker, way, error.message)

    def _verdict(self) -> EyasError:
        if self.transfer == AUTO:
            reasons = "; ".join(f"by {way}: {error.message}" for way, error in self.refusals.items())
            return TransferFailed(f"no way leads to the pages of worker {self.peer.worker}: {reasons}")
        if not self.refusals:
            return ConfigError(f"this worker has no way named {self.transfer}", param="transfer")
        (error,) = self.refusals.values()
        if not isinstance(error, ConfigError):
            return error
        only = f"{error.message}, and transfer is {self.transfer}, which allows no other way"
        return ConfigError(only, param="transfer")
