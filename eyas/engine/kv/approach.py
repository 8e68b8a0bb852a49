"""Finds the route of one pull: its copies wait until a route is proven, and then use it.

The proof is a copy of the owner's proof page into a page that was lent to the pull, so it is cancelled and
awaited like the other copies. `kv_transfer.peers` lists the possible routes.
"""

from __future__ import annotations

from collections.abc import Iterator

from eyas.common.errors import Cancelled, EyasError
from eyas.common.types import RankPages
from kv_transfer.backends.base import CopyJob, CopyResult
from kv_transfer.copier import PageCopier
from kv_transfer.peers import PeerPages, PeerRoute, PeerRoutes


class RouteTrial:
    """Tries the routes of pull `number` to one rank of the owner.

    `proofs`: copy numbers that the pull does not use itself. Every requested copy is reported once, in the
    return value of a method.
    """

    def __init__(
        self, number: int, proofs: Iterator[int], pages: PeerPages, routes: PeerRoutes, copier: PageCopier
    ) -> None:
        self._number = number
        self._proofs = proofs
        self._pages = pages
        self._routes = routes
        self._copier = copier
        self._route = routes.known(pages)
        self._search = routes.search(pages)
        self._trying: PeerRoute | None = None
        self._waiting: list[CopyJob] = []  # until a route is proven
        self._given_up = False

    def copy(self, job: CopyJob) -> list[CopyResult]:
        """Begins `job`, now or as soon as a route is proven. Returns copies that failed without beginning."""
        self._given_up = False
        if self._route is not None:
            self._copier.submit(self._route, job)
            return []
        self._waiting.append(job)
        return [] if self._trying else self._prove()

    def stop(self) -> None:
        """Ends running copies early, because the pull returns its pages."""
        if not self._given_up:
            self._given_up = True
            self._copier.cancel(self._number)

    def stopped(self, result: CopyResult) -> list[CopyResult]:
        """Handles one result of the copier. Returns the results of the pull's own copies that ended."""
        if result.job.proof is not None:
            return self._judge(result)
        if result.error is not None and not isinstance(result.error, Cancelled):
            self._pages.doubt()
            if result.path:
                self._routes.refused[result.path] += 1
        return [result]

    def _prove(self) -> list[CopyResult]:
        """Tries the next route; if there is none, fails the waiting copies."""
        try:
            self._trying = self._search.next()
        except EyasError as error:
            return self._drop(error)
        pool, page = self._pages.pool, self._pages.info.geometry.pages
        into = self._waiting[0].dst_pages[:1]
        proof = CopyJob(self._number, next(self._proofs), RankPages(pool.rank, (page,)), into, pool.checksum)
        self._copier.submit(self._trying, proof)
        return []

    def _judge(self, result: CopyResult) -> list[CopyResult]:
        tried, self._trying = self._trying, None
        assert tried is not None
        if result.error is None:
            self._route = tried
            self._search.prove(tried)
        elif isinstance(result.error, Cancelled):
            self._search = self._routes.search(self._pages)  # it proved nothing, for or against
        else:
            self._search.refuse(tried.backend.name, result.error)
        if self._given_up:
            return self._drop(Cancelled("the pull was given up"))
        if self._route is None:
            return self._prove()
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            self._copier.submit(self._route, job)
        return []

    def _drop(self, error: EyasError) -> list[CopyResult]:
        waiting, self._waiting = self._waiting, []
        return [CopyResult(job, "", 0, 0.0, error) for job in waiting]
