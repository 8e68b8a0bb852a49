"""One thread that copies: takes jobs from the engine's loop, does them in order, reports each once."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from eyas.common.errors import Cancelled, EyasError, TransferFailed

Job = TypeVar("Job", bound=Hashable)
Then: TypeAlias = Callable[[EyasError | None], None]
"""The callback of a copy: called once it has stopped, with its error if it failed."""


@dataclass(frozen=True)
class CopyDone(Generic[Job]):
    """A job that has stopped, whatever `error` says. `seconds`: how long it ran."""

    job: Job
    bytes: int
    seconds: float
    error: EyasError | None


class CopyThread(Generic[Job]):
    """One daemon thread. No call blocks, but `close`.

    Every job waiting here owns pages of its own, so there are never more of them than pages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Job, Callable[[], int]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[CopyDone[Job]] = queue.SimpleQueue()
        self._left: set[Job] = set()  # those that were not reported
        self._unwanted: set[Job] = set()  # some of these
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"copy-{name}", daemon=True)
        self._thread.start()

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
        self._jobs.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (queued := self._jobs.get()) is not None:
            self._done.put(self._do(*queued))
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
