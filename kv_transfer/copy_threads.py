"""Threads that copy: they take jobs from the engine's loop, and report each once."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from eyas.common.errors import Cancelled, EyasError, TransferFailed

Job = TypeVar("Job", bound=Hashable)
Then: TypeAlias = Callable[[EyasError | None], None]
"""The callback of a copy: called once it has stopped, with its error if it failed."""


Ring: TypeAlias = Callable[[], None]
"""Called by any thread when a copy has stopped, so that nobody needs to look for it all the time."""


def silent() -> None:
    """The `Ring` of copies whose owner looks by itself."""


class CopyBell:
    """`descriptor` can be read from the first `ring` on, until `quiet`."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)  # once no thread can ring it

    def ring(self) -> None:
        """Says that a copy has stopped. Any thread may call it."""
        os.eventfd_write(self.descriptor, 1)

    def quiet(self) -> None:
        """What was rung for is looked after now."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)


@dataclass(frozen=True)
class CopyDone(Generic[Job]):
    """A job that has stopped, whatever `error` says. `seconds`: how long it ran."""

    job: Job
    bytes: int
    seconds: float
    error: EyasError | None


class CopyThreads(Generic[Job]):
    """Daemon threads, one that does jobs in order unless `count` says more. No call blocks, but `close`.

    With two of them a job begins while another ends, so a GPU that copies for them is never idle between two.
    Every job waiting here owns pages of its own, so there are never more of them than pages.
    """

    def __init__(self, name: str, ring: Ring = silent, count: int = 1) -> None:
        self._name = name
        self._ring = ring
        self._jobs: queue.SimpleQueue[tuple[Job, Callable[[], int]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[CopyDone[Job]] = queue.SimpleQueue()
        self._left: set[Job] = set()  # those that were not reported
        self._unwanted: set[Job] = set()  # some of these
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"copy-{name}", daemon=True) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, do: Callable[[], int]) -> None:
        """Queue a job; exactly one `CopyDone` follows. `do` gives the bytes that it moved, or raises."""
        self._left.add(job)
        self._jobs.put((job, do))

    def cancel(self, job: Job) -> None:
        """A job that waits will not begin; one that runs, runs to its end. Others are no-ops."""
        if job in self._left:
            self._unwanted.add(job)

    def finished(self) -> list[CopyDone[Job]]:
        """The jobs that stopped since the last call."""
        done = [self._done.get() for _ in range(self._done.qsize())]
        for one in done:
            self._left.discard(one.job)
            self._unwanted.discard(one.job)
        return done

    def close(self, deadline: float) -> bool:
        """Report waiting jobs as cancelled and end; False if one still runs at `deadline` (monotonic)."""
        self._closing = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (queued := self._jobs.get()) is not None:
            self._done.put(self._do(*queued))
            self._ring()
            del queued  # with the memory that the job holds

    def _do(self, job: Job, do: Callable[[], int]) -> CopyDone[Job]:
        started = time.monotonic()
        moved, error = 0, None
        try:
            if self._closing:
                raise Cancelled("the worker is stopping")
            if job in self._unwanted:
                raise Cancelled("the copy was given up")
            moved = do()
        except EyasError as known:
            error = known
        except Exception as defect:  # the thread must outlive it: other jobs wait, pages hang on results
            error = TransferFailed(f"copying by {self._name} failed: {defect!r}")
        return CopyDone(job, moved, time.monotonic() - started, error)
