"""All copies of one area by NIXL: when each begins, how many bytes run at a time, and when each has stopped.

A READ cannot be stopped. One that is late, cancelled, or whose job has failed, stays until the library says
that it runs no more, and its job is not reported before that. One thread calls all of this.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from eyas.common.errors import Cancelled, EyasError, TransferFailed
from kv_transfer.backends.base import CopyJob, check_pages
from kv_transfer.backends.nixl_agent import (
    LinkPhase,
    NixlAgent,
    NixlLink,
    NixlPeer,
    ReadFate,
)
from kv_transfer.copy_threads import CopyDone

COPY_S, SLOWEST_BYTES_S = 10.0, 50e6  # a copy may take this long, and the time of its bytes at this rate
REBUILD_AFTER = 3  # links that broke, one after the other, for no reason of the peer's
_log = logging.getLogger("eyas.pulls")


class ReadLimits(NamedTuple):
    """The most bytes of one READ, and of all that run and are not late."""

    one: int
    all: int


HOST = ReadLimits(32 << 20, 128 << 20)
"""A post may block for all of its bytes: with CMA it is the copy."""
DEVICE = ReadLimits(128 << 20, 512 << 20)
"""Posts of a GPU's memory return at once, and 128 MiB are over between two looks."""


@dataclass(eq=False)
class _ReadJob:
    """A job, from the queue until all that it began has stopped. `left`: blocks that no READ has."""

    job: CopyJob
    peer: NixlPeer
    link: NixlLink
    left: deque[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=deque)
    began: float | None = None
    error: EyasError | None = None
    moved: int = 0
    running: dict[int, int] = field(default_factory=dict)  # bytes by READ

    @property
    def width(self) -> int:
        """Bytes that come of each page."""
        return self.job.part.width or self.peer.remote.memory.page_bytes

    @property
    def own(self) -> int:
        """Whose pages of ours it fills."""
        target = self.job.part.target
        return target.rank if target.on_device else 0

    @property
    def ready(self) -> bool:
        """Whether its next READ may begin. Fails one whose link broke."""
        if self.left and self.link.phase is LinkPhase.BROKEN:
            assert self.link.error is not None
            self.fail(self.link.error)
        return bool(self.left) and self.link.phase is LinkPhase.OPEN

    @property
    def over(self) -> bool:
        return not self.running and not self.left

    @property
    def in_flight(self) -> int:
        return 0 if self.error else sum(self.running.values())

    def fail(self, error: EyasError) -> None:
        """Begin no more; what runs must stop by itself."""
        self.left.clear()
        self.error = self.error or error


class NixlReads:
    """`agents` makes an agent, or raises an EyasError. Times are monotonic seconds."""

    def __init__(self, agents: Callable[[], NixlAgent], limits: ReadLimits = HOST) -> None:
        self.limits = limits
        self._agents = agents
        self._agent: NixlAgent | None = None
        self._exported: NixlAgent | None = None  # which peers know, and which therefore stays
        self._links: dict[str, NixlLink] = {}  # by the peer's agent
        self._readings: list[_ReadJob] = []
        self._stopped: list[CopyDone[CopyJob]] = []
        self._faults: int | None = None  # in a row, of an agent that has read something; None: it has not
        self.closing = False

    @property
    def busy(self) -> bool:
        """Whether something runs that `step` must follow."""
        return bool(self._readings) or any(not link.idle for link in self._links.values())

    @property
    def urgent(self) -> bool:
        """Whether a copy waits for what runs; none waits for READs that were given up."""
        greeting = any(link.phase is LinkPhase.GREETING for link in self._links.values())
        return greeting or any(reading.error is None for reading in self._readings)

    def export(self) -> NixlAgent:
        """The agent of this process, for its peers. Raises an EyasError if none can be made."""
        self._exported = self._exported or self._own()
        return self._exported

    def add(self, peer: NixlPeer, job: CopyJob, now: float) -> None:
        """Queue a job. One `CopyDone` follows, by `step`."""
        remote = peer.remote
        try:
            if self.closing:
                raise Cancelled("the worker is stopping")
            check_pages(job, remote.memory.pages)
            link = self._links.get(remote.agent)
            if link is None:
                link = self._links[remote.agent] = NixlLink(self._own(), remote, now)
            elif link.error is not None:
                since = "" if link.idle else "a READ from the peer has not stopped since: "
                raise TransferFailed(f"{since}{link.error}")
        except EyasError as error:
            self._stopped.append(CopyDone(job, 0, 0.0, error))
            return
        link.peers.add(peer)
        reading = _ReadJob(job, peer, link)
        ours = link.agent.own[reading.own].memory
        src, dst = (
            memory.places(pages, reading.width, job.count)
            for memory, pages in ((remote.memory, job.source.pages), (ours, job.dst_pages))
        )
        reading.left.extend(_cut(src, dst, max(1, self.limits.one // reading.width)))
        self._readings.append(reading)

    def cancel(self, job: CopyJob) -> None:
        """Begin no more of it; jobs that are over are none of this."""
        for reading in self._readings:
            if reading.job.name == job.name:
                reading.fail(Cancelled("the copy was given up"))

    def close(self) -> None:
        """Begin nothing more at all."""
        self.closing = True
        stopping = Cancelled("the worker is stopping")
        for reading in self._readings:
            reading.fail(stopping)
        for link in self._links.values():
            link.broke(stopping)

    def step(self, now: float) -> list[CopyDone[CopyJob]]:
        """Follow everything once; gives the jobs that have stopped."""
        for link in self._links.values():
            link.step(now)
        for reading in self._readings:
            self._follow(reading, now)
        for link in self._links.values():
            link.hold()
        self._begin(now)
        self._tidy()
        stopped, self._stopped = self._stopped, []
        for reading in self._readings:
            if reading.over:
                seconds = now - reading.began if reading.began is not None else 0.0
                moved = 0 if reading.error else reading.moved
                stopped.append(CopyDone(reading.job, moved, seconds, reading.error))
        self._readings = [reading for reading in self._readings if not reading.over]
        return stopped

    def _own(self) -> NixlAgent:
        self._agent = self._agent or self._agents()
        return self._agent

    def _follow(self, reading: _ReadJob, now: float) -> None:
        """Polls its READs, and fails it once they take too long."""
        link = reading.link
        for handle, size in list(reading.running.items()):
            fate, why = link.agent.fate(handle)
            if fate is ReadFate.RUNNING:
                continue
            link.agent.release(handle)
            del reading.running[handle]
            link.ended(size, now)
            if fate is ReadFate.DONE:
                reading.moved += size
                self._faults = 0
            else:
                reading.fail(link.stopped(fate, why))
        if reading.began is None or reading.error is not None:
            return
        size = reading.job.count * reading.width
        limit = COPY_S + size / SLOWEST_BYTES_S
        if reading.running and now >= reading.began + limit:
            error = TransferFailed(f"a copy by NIXL took longer than {limit:.0f} s")
            reading.fail(error)
            link.broke(error)

    def _begin(self, now: float) -> None:
        """Begins as many READs as there is room for, of pulls in turn: the one with the fewest bytes on their
        way is next, so a long prompt delays no other by more than a READ.
        """
        flying: Counter[int] = Counter()
        for reading in self._readings:
            flying[reading.job.pull] += reading.in_flight
        while flying.total() < self.limits.all:
            ready = [one for one in self._readings if one.ready]
            if not ready:
                return
            reading = min(ready, key=lambda one: flying[one.job.pull])
            flying[reading.job.pull] += self._read(reading, now)

    def _read(self, reading: _ReadJob, now: float) -> int:
        """Begins its next READ; returns the bytes."""
        link = reading.link
        src, dst = reading.left[0]
        reading.began = reading.began or now
        try:
            blocks = link.blocks(reading.peer.remote.memory, reading.width)
            handle = link.agent.read(blocks, src, dst, reading.own)
        except EyasError as error:
            reading.fail(error)
            link.broke(error, at_fault=True)
            return 0
        reading.left.popleft()
        reading.running[handle] = size = len(src) * reading.width
        link.began(size, now)
        return size

    def _tidy(self) -> None:
        """Close links that broke, so that the next job greets the peer anew, and links that no one keeps."""
        for name, link in list(self._links.items()):
            if link.idle and (link.phase is LinkPhase.BROKEN or not link.peers):
                del self._links[name]
                link.close()
                if self._faults is not None and link.agent is self._agent:
                    self._faults += link.at_fault
        if self._faults is not None and self._faults >= REBUILD_AFTER:
            _log.warning("NIXL failed %d times in a row: its agent is made anew", self._faults)
            self._faults = self._agent = None


def _cut(
    src: tuple[int, ...], dst: tuple[int, ...], count: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts blocks, there and here, into READs of at most `count`."""
    return ((src[i : i + count], dst[i : i + count]) for i in range(0, len(src), count))
