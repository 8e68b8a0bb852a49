"""Copies that the front makes, asked for by the engine: messages instead of calls.

It knows the messages; which backend asks, and what for, it does not.
"""

from __future__ import annotations

from eyas.common.errors import from_code
from eyas.engine.ipc.messages import CopyPages, CopyStopped, StopCopy
from eyas.engine.ipc.outbox import Outbox
from kv_transfer.backends.base import Copy
from kv_transfer.copy_thread import Done


class FrontWire:
    """A `kv_transfer.backends.base.Wire`. `told` takes the front's answers."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._running: dict[tuple[int, int], Copy] = {}
        self._stopped: list[Done[Copy]] = []

    def fetch(self, job: Copy) -> None:
        """Asks the front for the bytes of a job; `stopped` gives its one result."""
        self._running[job.name] = job
        self._outbox.add(CopyPages(*job.name, job.source.pages, job.dst_pages, proof=job.proof is not None))

    def stop(self, job: Copy) -> None:
        """Asks the front to end the job, if it still runs."""
        if job.name in self._running:
            self._outbox.add(StopCopy(*job.name))

    def stopped(self) -> list[Done[Copy]]:
        """The jobs that stopped since the last call."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def told(self, command: CopyStopped) -> None:
        """Unknown ones are no-ops."""
        job = self._running.pop((command.pull, command.number), None)
        if job is not None:
            failure = command.failure
            error = None if failure is None else from_code(failure.code, failure.message)
            self._stopped.append(Done(job, command.bytes, command.seconds, error))
