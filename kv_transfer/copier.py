"""The copy thread: takes jobs from the engine's loop, lets a backend move their bytes, reports each once.

It knows jobs and a backend; not why a job exists, nor whether its result still matters to anyone.
"""

from __future__ import annotations

import queue
import threading
import time

from eyas.common.errors import Cancelled, EyasError, TransferFailed
from kv_transfer.backends.base import Backend, Copy, CopyResult


class Copier:
    """One daemon thread around one backend. `submit` and `finished` never block.

    Every queued job owns a destination page of its own, so a queue of `pool_pages` places never fills.
    """

    def __init__(self, backend: Backend, pool_pages: int) -> None:
        self._backend = backend
        self._jobs: queue.Queue[Copy | None] = queue.Queue(pool_pages + 1)  # one more for the end mark
        self._results: queue.SimpleQueue[CopyResult] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"copier-{backend.name}", daemon=True)
        self._thread.start()

    def submit(self, job: Copy) -> None:
        """Queue a job; exactly one `CopyResult` follows. Jobs are done in order."""
        self._jobs.put_nowait(job)

    def finished(self) -> list[CopyResult]:
        """The jobs that stopped since the last call."""
        return [self._results.get() for _ in range(self._results.qsize())]

    def close(self, deadline: float) -> bool:
        """Report waiting jobs as cancelled and end the thread; False if it still copies at `deadline`.

        `deadline` is monotonic seconds. After False the destination must stay mapped.
        """
        self._closing = True
        self._jobs.put_nowait(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._results.put(self._do(job))
        self._backend.close()

    def _do(self, job: Copy) -> CopyResult:
        started = time.monotonic()
        moved, error = 0, None
        try:
            if self._closing:
                raise Cancelled("The worker is stopping.")
            moved = self._backend.copy(job)
        except EyasError as known:
            error = known
        except Exception as defect:  # the thread must outlive it: other jobs wait, pages hang on results
            error = TransferFailed(f"Copying over {self._backend.name} failed: {defect!r}.")
        return CopyResult(job, self._backend.name, moved, time.monotonic() - started, error)
