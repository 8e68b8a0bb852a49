"""Runs copies: passes each to the backend of its route, and reports it once when it has stopped.

Jobs whose pages pass through staging are cut into windows (`kv_transfer.windows`). If the pool is in a
device's memory and the backend cannot write to it, a window is copied into staging slots and from there into
the pool.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from eyas.common.errors import Cancelled, EyasError, TransferFailed
from kv_transfer.backends.base import CopyJob, CopyResult, TransferBackend
from kv_transfer.peers import PeerRoute
from kv_transfer.slot_quota import SlotQuota
from kv_transfer.windows import LandingSlots, PullTurns, WindowedJob, cut


@dataclass(frozen=True)
class _RunningWindow:
    """A window in flight. `pages`: its destination pages in our pool; `copy`: the backend's job."""

    of: WindowedJob
    pages: tuple[int, ...]
    copy: CopyJob
    slots: tuple[int, ...]


class PageCopier:
    """Runs copy jobs by `backends`. No call but `close` blocks.

    `window`: the most pages of one staged window. `landing`: our staging slots, if the pool is a device's.
    """

    def __init__(
        self, backends: Mapping[str, TransferBackend], window: int, landing: LandingSlots | None = None
    ) -> None:
        self._backends = backends
        self._window = window
        self._landing = landing
        self._jobs: list[WindowedJob] = []
        self._turns = PullTurns()
        self._quota = SlotQuota()  # landing slots by peer
        self._numbers = itertools.count()  # of windows
        self._windows: dict[int, _RunningWindow] = {}  # by number
        self._results: list[CopyResult] = []

    def submit(self, route: PeerRoute, job: CopyJob) -> None:
        """Begins a job; exactly one `CopyResult` follows."""
        lands = self._landing is not None and not route.source.direct
        whole = not lands and not route.source.is_staging
        windows = deque([job] if whole else cut(route, job, self._window))
        windowed = WindowedJob(route, job, windows, lands, time.monotonic())
        self._jobs.append(windowed)
        if lands:
            self._turns.add(windowed)
            self._check_room(windowed)
        if not windowed.left:  # with replicated heads, another rank may bring all pages
            self._settle(windowed)
        self._begin()

    def cancel(self, pull: int) -> None:
        """Ends the jobs of a pull early; each is reported when it has stopped."""
        for windowed in [windowed for windowed in self._jobs if windowed.job.pull == pull]:
            if windowed.left:
                windowed.error = Cancelled("the copy was given up")
            self._settle(windowed)
        for window in [window for window in self._windows.values() if window.copy.pull == pull]:
            window.of.route.backend.cancel(window.copy)
        self._begin()

    def finished(self) -> list[CopyResult]:
        """The jobs that stopped since the last call."""
        for result in [result for backend in self._backends.values() for result in backend.poll()]:
            window = self._windows[result.job.number]
            result = self._judged(window, result)
            then = partial(self._stopped, result)
            if self._landing is not None and result.ok and window.slots and window.copy.proof is None:
                self._landing.copy_in(window.slots, window.pages, then, window.copy.part.target)
            else:
                then(result.error)  # a proof page is checked in its slot
        if self._landing is not None:
            self._landing.poll()
        self._count_crossed()
        self._begin()
        results, self._results = self._results, []
        return results

    def close(self, deadline: float) -> bool:
        """Stops all backends; False if one still copies at `deadline` (monotonic seconds).

        After False the destination memory must stay mapped.
        """
        ended = [backend.close(deadline) for backend in self._backends.values()]
        return all([*ended, self._landing is None or self._landing.stop(deadline)])

    def _check_room(self, windowed: WindowedJob) -> None:
        assert self._landing is not None
        if windowed.left and windowed.slots > self._landing.total:
            text = f"{windowed.count} pages cannot land here together, in {self._landing.total} slots"
            windowed.error = TransferFailed(text)

    def _begin(self) -> None:
        """Begins all windows that may run now."""
        for windowed in self._jobs:
            while not windowed.lands and windowed.ready:
                self._start(windowed, ())
        while self._landing is not None and (turn := self._turns.next(self._allowed)) is not None:
            slots = self._landing.take(turn.slots)
            if slots is None:
                return
            self._quota.taken(turn.route.worker, len(slots))
            self._start(turn, tuple(slots))
            self._turns.taken(turn)

    def _allowed(self, windowed: WindowedJob) -> bool:
        """Whether a peer may take more slots: one that hangs must not hold all of them."""
        assert self._landing is not None
        return self._quota.allows(windowed.route.worker, windowed.slots, self._landing.free)

    def _count_crossed(self) -> None:
        crossed = {name for backend in self._backends.values() for name in backend.crossed}
        for windowed in self._jobs:
            windowed.crossed = 0
        for window in self._windows.values():
            window.of.crossed += window.copy.name in crossed

    def _start(self, windowed: WindowedJob, slots: tuple[int, ...]) -> None:
        """Begins the next window of a job: into `slots`, or, without slots, into the backend's memory."""
        window, number = windowed.next(), next(self._numbers)
        places = slots or window.dst_pages
        copy = dataclasses.replace(window, number=number, dst_pages=places, parts=len(window.dst_pages))
        self._windows[number] = _RunningWindow(windowed, window.dst_pages, copy, slots)
        windowed.route.backend.start(windowed.route.source, copy)

    def _stopped(self, result: CopyResult, error: EyasError | None) -> None:
        window = self._windows.pop(result.job.number)
        if self._landing is not None:
            if window.copy.proof is not None and window.slots and error is None:
                part = window.copy.part
                window.of.pieces.append((self._landing.piece(window.slots[0], part.target), part.source))
            self._landing.give(window.slots)
            self._quota.given(window.of.route.worker, len(window.slots))
        window.of.stopped(result, error)
        self._settle(window.of)

    def _settle(self, windowed: WindowedJob) -> None:
        """Reports a job that has no window running and none left."""
        if not windowed.left and not windowed.running:
            self._jobs.remove(windowed)
            if windowed.lands:
                self._turns.drop(windowed)
            if windowed.pieces and windowed.error is None:
                windowed.error = self._judged_pieces(windowed)
            self._results.append(windowed.result(time.monotonic()))

    def _judged(self, window: _RunningWindow, result: CopyResult) -> CopyResult:
        """The result of a window; a failure if a proof page arrived with other bytes than its owner has.

        Proofs in slots may be parts of a page, which `_judged_pieces` checks together.
        """
        proof, backend = window.copy.proof, window.of.route.backend
        if proof is None or window.slots or not result.ok:
            return result
        error: EyasError = TransferFailed(f"{result.path} brought other bytes than the owner has")
        try:
            if backend.checksum(window.copy) == proof:
                return result
        except TransferFailed as unread:
            error = unread
        return dataclasses.replace(result, error=error)

    def _judged_pieces(self, windowed: WindowedJob) -> EyasError | None:
        """The error if the parts of a proof page do not make up the page; None if they do."""
        assert self._landing is not None
        if zlib.crc32(self._landing.joined(windowed.pieces)) == windowed.job.proof:
            return None
        return TransferFailed(f"{windowed.route.backend.name} brought other bytes than the owner has")
