"""Measures the link to a peer's pages by copies of its proof page into spare pages of ours.

A probe uses the route of requests' pages, and proves one if none is known, as a pull would. It fails if it
does not end in time; its pages are returned when the last copy into them has stopped.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from eyas.common.errors import EyasError, Overloaded, TransferFailed
from eyas.common.types import RankPages
from eyas.common.wire.links import PageLink
from eyas.engine.ipc.messages import LinkProbed, ProbeLink, TransferTotals
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.kv.approach import RouteTrial
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.prefix_cache import PrefixCache
from kv_transfer.backends.base import CopyJob, CopyResult
from kv_transfer.copier import PageCopier
from kv_transfer.layout import PROBE_WINDOWS, window_pages
from kv_transfer.peers import KvPeers, PeerPages, PeerRoutes

SINGLES = 5  # copies of one page
BATCH_S = 0.1  # the expected time of a copy of many pages, which sets their number
BATCHES = 16  # copies of many pages
MEASURE_S = 0.5  # no copy begins later than this after the end of the first one
LIMIT_S = 5.0  # for the whole probe, including the setup of a route
_POOL_PART = 8  # a probe takes at most 1 / _POOL_PART of the pool


@dataclass
class _RunningProbe:
    """A running probe, which owns `pages` until `over`. One copy runs at a time."""

    call: int
    theirs: PeerPages
    approach: RouteTrial
    pool: PagePool
    pages: list[int]
    began: float
    path: str = ""
    first: float | None = None  # when the first copy ended
    singles: list[float] = field(default_factory=list)  # seconds
    bytes: int = 0  # of copies of many pages
    seconds: float = 0.0
    most: int = 1  # pages that a copy should move within BATCH_S
    error: EyasError | None = None
    over: bool = False
    reported: bool = False
    copies: int = 0

    def next(self, now: float) -> None:
        """Begins the next copy, or ends the probe."""
        overdue = self.first is not None and now > self.first + MEASURE_S
        if self.error is not None or overdue or self.copies == SINGLES + BATCHES:
            self.over = True
            return
        pages = tuple(self.pages[: self._count()])
        proof = (self.theirs.info.geometry.pages,) * len(pages)
        copy = CopyJob(-self.call, self.copies, RankPages(self.theirs.rank, proof), pages)
        self.copies += 1
        self.take(self.approach.copy(copy), now)

    def take(self, stopped: list[CopyResult], now: float) -> None:
        """Handles the results of the copy, if it has ended, and begins the next."""
        for result in stopped:
            if result.error is not None:
                self.error = self.error or result.error
            elif len(self.singles) < SINGLES:
                self.first = self.first or now
                self.path = result.path
                self.singles.append(result.seconds)
                self.most = max(1, int(BATCH_S / max(statistics.median(self.singles), 1e-9)))
            else:
                self.bytes += result.bytes
                self.seconds += result.seconds
                self.most *= 2 if result.seconds < BATCH_S / 2 else 1
            self.next(now)

    def sweep(self, now: float) -> None:
        """Enforces the deadline."""
        if self.error is None and now > self.began + LIMIT_S:
            self.error = TransferFailed(f"its copies have not ended within {LIMIT_S:g} s")
            self.approach.stop()

    def link(self, passed_over: dict[str, str], moved: TransferTotals) -> PageLink:
        """The link as measured."""
        return PageLink(
            rank=self.theirs.rank,
            path=self.path,
            passed_over=passed_over,
            latency_s=statistics.median(self.singles) if self.singles else 0.0,
            bytes_per_s=self.bytes / self.seconds if self.seconds else 0.0,
            pulls=moved.pulls,
            pulled_bytes=moved.bytes,
            problem=self.error.message if self.error else "",
        )

    def _count(self) -> int:
        """The number of pages of the next copy."""
        return 1 if len(self.singles) < SINGLES else self.most


@dataclass
class LinkProber:
    """Runs the probes of one group of pages, one at a time. `pulled`: bytes moved by pulls, by owner."""

    copier: PageCopier
    routes: PeerRoutes
    peers: KvPeers
    outbox: EventOutbox
    pulled: Mapping[str, TransferTotals]
    _probe: _RunningProbe | None = None

    @property
    def active(self) -> bool:
        """True if copies of a probe may run."""
        return self._probe is not None

    def begin(self, command: ProbeLink, pool: PagePool, cache: PrefixCache | None, now: float) -> None:
        """Begins a probe; one `LinkProbed` follows. May evict pages of `cache` to get pages of `pool`."""
        peer = self.peers.meet(command.worker, command.group, command.pool)
        theirs = peer.pages(command.group, command.rank)
        most = PROBE_WINDOWS * window_pages(command.pool.geometry.page_bytes)
        pages = [] if self.active else spare(pool, cache, most)
        if not pages:
            error = "another link is being measured" if self.active else "no pages are free to copy into"
            self.refuse(command, Overloaded(error))
            return
        approach = RouteTrial(-command.call, itertools.count(-1, -1), theirs, self.routes, self.copier)
        self._probe = _RunningProbe(command.call, theirs, approach, pool, pages, now)
        self._probe.next(now)
        self._settle()

    def copied(self, result: CopyResult, now: float) -> None:
        """Handles a stopped copy of the probe."""
        assert self._probe is not None, "a probe is not over while a copy of it runs"
        self._probe.take(self._probe.approach.stopped(result), now)
        self._settle()

    def poll(self, now: float) -> None:
        """Ends a probe at its deadline; called once per iteration."""
        if self._probe is not None:
            self._probe.sweep(now)
            self._settle()

    def _settle(self) -> None:
        """Reports the result once it is decided; returns the pages once no copy runs."""
        probe = self._probe
        assert probe is not None
        if (probe.over or probe.error is not None) and not probe.reported:
            probe.reported = True
            moved = self.pulled.get(probe.theirs.worker, TransferTotals())
            self.outbox.add(LinkProbed(probe.call, probe.link(self.routes.passed_over(probe.theirs), moved)))
        if probe.over:
            probe.pool.drop(probe.pages)
            self._probe = None

    def refuse(self, command: ProbeLink, error: EyasError) -> None:
        """Answers a probe with `error` as the link's problem."""
        self.outbox.add(LinkProbed(command.call, PageLink(command.rank, problem=error.message)))


def spare(pool: PagePool, cache: PrefixCache | None, count: int) -> list[int]:
    """Takes at most `count` pages, and at most half of the free ones, so that a request gets some too."""
    count = max(1, min(count, pool.num_pages // _POOL_PART))
    if cache is not None and pool.free < 2 * count:
        cache.evict(2 * count - pool.free)
    return pool.take(min(count, pool.settled // 2), settled=True)
