"""Measures the way from an owner's pages to ours: copies of its proof page, into pages that nothing needs.

A probe takes the way that requests' pages take, and proves one where none is known yet, as the next pull
would. What does not end in time is given up; the pages come back when the last copy into them has stopped.
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
BATCH_S = 0.1  # a copy of many pages has no more than should come in this time
BATCHES = 16  # of those
MEASURE_S = 0.5  # no copy begins later than this after the first one has come
LIMIT_S = 5.0  # to prove a way, which may have to be set up, and to measure it
_POOL_PART = 8  # a probe takes no larger part of the pool than one such


@dataclass
class _RunningProbe:
    """One at work. `pages` are its own until `over`; one copy runs at a time."""

    call: int
    theirs: PeerPages
    approach: RouteTrial
    pool: PagePool
    pages: list[int]
    began: float
    path: str = ""
    first: float | None = None  # when the first copy had come
    singles: list[float] = field(default_factory=list)  # seconds
    bytes: int = 0  # of copies of many pages
    seconds: float = 0.0
    most: int = 1  # pages of a copy that should come within BATCH_S
    error: EyasError | None = None
    over: bool = False
    reported: bool = False
    copies: int = 0

    def next(self, now: float) -> None:
        """Begin the next copy, or be over."""
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
        """Takes the result of the copy; nothing happens while it runs, or its way is being proven."""
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
        """Keep the deadline."""
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
        """Pages of the next copy: all, unless the way is slow."""
        return 1 if len(self.singles) < SINGLES else self.most


@dataclass
class LinkProber:
    """The probes of one group of pages, one at a time. `pulled`: what pulls have moved, by owner."""

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
        """One `LinkProbed` follows. Pages are taken from `pool`, which may cost `cache` its oldest ones."""
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
        """A copy of the probe has stopped, well or not."""
        assert self._probe is not None, "a probe is not over while a copy of it runs"
        self._probe.take(self._probe.approach.stopped(result), now)
        self._settle()

    def poll(self, now: float) -> None:
        """Runs once a loop: ends probes at their deadlines."""
        if self._probe is not None:
            self._probe.sweep(now)
            self._settle()

    def _settle(self) -> None:
        """Tell what came out once that is decided; give the pages back once no copy runs."""
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
        """One `LinkProbed` follows, with `error` as the link's problem."""
        self.outbox.add(LinkProbed(command.call, PageLink(command.rank, problem=error.message)))


def spare(pool: PagePool, cache: PrefixCache | None, count: int) -> list[int]:
    """Takes at most `count` pages, and at most half of the free ones, so that a request gets some too."""
    count = max(1, min(count, pool.num_pages // _POOL_PART))
    if cache is not None and pool.free < 2 * count:
        cache.evict(2 * count - pool.free)
    return pool.take(min(count, pool.settled // 2), settled=True)
