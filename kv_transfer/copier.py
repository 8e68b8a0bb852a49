"""The copies that run: each is given to the backend of its route, and reported once when it has stopped.

Pages that pass through staging come in windows (`kv_transfer.windows`), all others whole. Where the pool is a
device's and the way does not lead into it, a window lands in slots, and counts once it is in the pool.
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
    """A window on its way. `pages`: the job's that it has, of our pool; `copy`: what its backend has."""

    of: WindowedJob
    pages: tuple[int, ...]
    copy: CopyJob
    slots: tuple[int, ...]


class PageCopier:
    """Copies by `backends`, into the memory that they were made for. No call blocks, but `close`.

    `window`: the most pages that pass through staging together. `landing`: our own, beside a device's pool.
    """

    def __init__(
        self, backends: Mapping[str, TransferBackend], window: int, landing: LandingSlots | None = None
    ) -> None:
        self._backends = backends
        self._window = window
        self._landing = landing
        self._jobs: list[WindowedJob] = []
        self._turns = PullTurns()
        self._quota = SlotQuota()  # of the slots to land in, by worker
        self._numbers = itertools.count()  # of windows
        self._windows: dict[int, _RunningWindow] = {}  # by number
        self._over: list[CopyResult] = []

    def submit(self, route: PeerRoute, job: CopyJob) -> None:
        """Begin a copy; exactly one `CopyResult` follows."""
        lands = self._landing is not None and not route.source.direct
        whole = not lands and not route.source.is_staging
        windows = deque([job] if whole else cut(route, job, self._window))
        going = WindowedJob(route, job, windows, lands, time.monotonic())
        self._jobs.append(going)
        if lands:
            self._turns.add(going)
            self._check_room(going)
        if not going.left:  # of replicas, those of another rank come here
            self._settle(going)
        self._begin()

    def cancel(self, pull: int) -> None:
        """End the copies of a pull early; each is reported when it has stopped."""
        for going in [going for going in self._jobs if going.job.pull == pull]:
            if going.left:
                going.error = Cancelled("the copy was given up")
            self._settle(going)
        for window in [window for window in self._windows.values() if window.copy.pull == pull]:
            window.of.route.backend.cancel(window.copy)
        self._begin()

    def finished(self) -> list[CopyResult]:
        """The copies that stopped since the last call."""
        for result in [result for backend in self._backends.values() for result in backend.poll()]:
            window = self._windows[result.job.number]
            result = self._judged(window, result)
            then = partial(self._stopped, result)
            if self._landing is not None and result.ok and window.slots and window.copy.proof is None:
                self._landing.copy_in(window.slots, window.pages, then, window.copy.part.target)
            else:
                then(result.error)  # (a proof has proven all by being in its slot)
        if self._landing is not None:
            self._landing.poll()
        self._count_crossed()
        self._begin()
        over, self._over = self._over, []
        return over

    def close(self, deadline: float) -> bool:
        """End all backends; False if one still copies at `deadline` (monotonic seconds).

        After False the memory that they copy into must stay mapped.
        """
        ended = [backend.close(deadline) for backend in self._backends.values()]
        return all([*ended, self._landing is None or self._landing.stop(deadline)])

    def _check_room(self, going: WindowedJob) -> None:
        assert self._landing is not None
        if going.left and going.slots > self._landing.total:
            text = f"{going.count} pages cannot land here together, in {self._landing.total} slots"
            going.error = TransferFailed(text)

    def _begin(self) -> None:
        """Begins all windows for which there is room."""
        for going in self._jobs:
            while not going.lands and going.ready:
                self._start(going, ())
        while self._landing is not None and (turn := self._turns.next(self._allowed)) is not None:
            slots = self._landing.take(turn.slots)
            if slots is None:
                return
            self._quota.taken(turn.route.worker, len(slots))
            self._start(turn, tuple(slots))
            self._turns.taken(turn)

    def _allowed(self, going: WindowedJob) -> bool:
        """A peer that hangs holds slots until its copies are given up, and never all."""
        assert self._landing is not None
        return self._quota.allows(going.route.worker, going.slots, self._landing.free)

    def _count_crossed(self) -> None:
        crossed = {name for backend in self._backends.values() for name in backend.crossed}
        for going in self._jobs:
            going.crossed = 0
        for window in self._windows.values():
            window.of.crossed += window.copy.name in crossed

    def _start(self, going: WindowedJob, slots: tuple[int, ...]) -> None:
        """Begins the next window: into `slots`, or without any into the memory of the backend."""
        window, number = going.next(), next(self._numbers)
        places = slots or window.dst_pages
        copy = dataclasses.replace(window, number=number, dst_pages=places, parts=len(window.dst_pages))
        self._windows[number] = _RunningWindow(going, window.dst_pages, copy, slots)
        going.route.backend.start(going.route.source, copy)

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

    def _settle(self, going: WindowedJob) -> None:
        """Reports a job of which nothing runs and nothing is left."""
        if not going.left and not going.running:
            self._jobs.remove(going)
            if going.lands:
                self._turns.drop(going)
            if going.pieces and going.error is None:
                going.error = self._judged_pieces(going)
            self._over.append(going.result(time.monotonic()))

    def _judged(self, window: _RunningWindow, result: CopyResult) -> CopyResult:
        """A proof that came, but with other bytes, proves nothing. One in slots is judged whole."""
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

    def _judged_pieces(self, going: WindowedJob) -> EyasError | None:
        """Why the pieces of a proof page prove nothing; None: together they are the page."""
        assert self._landing is not None
        if zlib.crc32(self._landing.joined(going.pieces)) == going.job.proof:
            return None
        return TransferFailed(f"{going.route.backend.name} brought other bytes than the owner has")
