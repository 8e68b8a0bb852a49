"""Chooses the backend that moves a peer's pages: the best that both ends have, proven by a copy first.

A proof is a copy like any other, of the peer's proof page. Who makes it, and into which page, is the
caller's business; so is what it means for a request that no way leads to its pages.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from eyas.common.errors import ConfigError, EyasError, TransferFailed
from kv_transfer.backends.base import TransferBackend
from kv_transfer.backends.table import AUTO, BACKENDS, missing
from kv_transfer.peers import PeerPages, PeerRoute

_log = logging.getLogger("eyas.pulls")


class PeerRoutes:
    """The backends that may be taken to the pages of one group. `backends`: by name, the best first.
    `transfer`: auto, or the one that may be taken.
    """

    def __init__(self, backends: Mapping[str, TransferBackend], transfer: str) -> None:
        self._backends = [b for name, b in backends.items() if transfer in (AUTO, name)]
        self._transfer = transfer

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
        return RouteSearch(pages, list(self._backends), self._transfer)

    def _obstacle(self, name: str, refusals: Mapping[str, EyasError]) -> str:
        if name in refusals:
            return refusals[name].message
        return missing(name) or f"transfer is {self._transfer}, which allows no other way"


@dataclass
class RouteSearch:
    """The ways to one rank's pages, from the best on."""

    pages: PeerPages
    left: list[TransferBackend]
    transfer: str
    refusals: dict[str, EyasError] = field(default_factory=dict)

    def next(self) -> PeerRoute:
        """The next way that opens, to be proven. Raises what stands in the way if none is left."""
        exports = self.pages.pool.exports
        while self.left:
            backend = self.left.pop(0)
            try:
                if backend.name not in exports:
                    raise ConfigError(f"worker {self.pages.worker} does not offer its KV by {backend.name}")
                return PeerRoute(backend, backend.open(exports[backend.name]))
            except EyasError as error:
                self.refuse(backend.name, error)
        raise self._verdict()

    def prove(self, route: PeerRoute) -> None:
        """The proof page came this way."""
        pages = self.pages
        if pages.proven is None:
            _log.info("%s KV of worker %s comes by %s", pages.group, pages.worker, route.backend.name)
        pages.prove(route, self.refusals)

    def refuse(self, way: str, error: EyasError) -> None:
        """Logs that this way does not lead to the peer's pages: another one will be taken."""
        self.refusals[way] = error
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
