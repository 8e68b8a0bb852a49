"""Threads that run copies for the engine's loop and report each once."""

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
"""Called by any thread when a copy has stopped, so that the engine's loop need not poll."""


def silent() -> None:
    """The `Ring` of copies whose owner polls."""


class CopyBell:
    """An eventfd that wakes the engine's loop: `descriptor` is readable from the first `ring` until
    `quiet`.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Closed once no thread can ring it, and not at exit, when threads may still run.
        weakref.finalize(self, os.close, self.descriptor).atexit = False

    def ring(self) -> None:
        """Signals that a copy has stopped. Any thread may call it."""
        os.eventfd_write(self.descriptor, 1)

    def quiet(self) -> None:
        """Clears the signal, before the stopped copies are handled."""
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
    """`count` daemon threads that run jobs; one thread runs them in order. No call but `close` blocks.

    With two threads a job begins while another ends, so that a GPU that copies for them is never idle. Each
    queued job owns pages, so the queue is never longer than the number of pages.
    """

    def __init__(self, name: str, ring: Ring = silent, count: int = 1) -> None:
        self._name = name
        self._ring = ring
        self._jobs: queue.SimpleQueue[tuple[Job, Callable[[], int]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[CopyDone[Job]] = queue.SimpleQueue()
        self._pending: set[Job] = set()  # not yet reported
        self._cancelled: set[Job] = set()  # cancelled
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"copy-{name}", daemon=True) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, do: Callable[[], int]) -> None:
        """Queues a job; exactly one `CopyDone` follows. `do` returns the bytes that it moved, or raises."""
        self._pending.add(job)
        self._jobs.put((job, do))

    def cancel(self, job: Job) -> None:
        """Cancels a queued job; a running one runs to its end. Does nothing for other jobs."""
        if job in self._pending:
            self._cancelled.add(job)

    def finished(self) -> list[CopyDone[Job]]:
        """The jobs that stopped since the last call."""
        done = [self._done.get() for _ in range(self._done.qsize())]
        for copy in done:
            self._pending.discard(copy.job)
            self._cancelled.discard(copy.job)
        return done

    def close(self, deadline: float) -> bool:
        """Cancels queued jobs and stops; False if a job still runs at `deadline` (monotonic seconds)."""
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
            del queued  # and the memory that the job references

    def _do(self, job: Job, do: Callable[[], int]) -> CopyDone[Job]:
        started = time.monotonic()
        moved, error = 0, None
        try:
            if self._closing:
                raise Cancelled("the worker is stopping")
            if job in self._cancelled:
                raise Cancelled("the copy was given up")
            moved = do()
        except EyasError as known:
            error = known
        except Exception as defect:  # the thread must survive: pages are freed by results
            error = TransferFailed(f"copying by {self._name} failed: {defect!r}")
        return CopyDone(job, moved, time.monotonic() - started, error)
