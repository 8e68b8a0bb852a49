"""Copies that the front makes for the engine: messages instead of calls."""

from __future__ import annotations

from collections.abc import Container

from eyas.engine.ipc.messages import CopyPages, CopyRead, CopyStaged, CopyStopped, StageCopy, StopCopy
from eyas.engine.ipc.outbox import EventOutbox
from kv_transfer.backends.base import CopyJob
from kv_transfer.copy_threads import CopyDone


class FrontWire:
    """A `kv_transfer.backends.base.TransferWire`. `receive` takes the front's answers."""

    def __init__(self, outbox: EventOutbox) -> None:
        self._outbox = outbox
        self._fetching: dict[tuple[int, int], CopyJob] = {}
        self._staging: dict[tuple[int, int], CopyJob] = {}
        self._stopped: list[CopyDone[CopyJob]] = []
        self._staged: list[tuple[CopyJob, tuple[int, ...]]] = []
        self._let_go: list[CopyDone[CopyJob]] = []

    def fetch(self, job: CopyJob) -> None:
        """Asks the front for the bytes of a job; `stopped` gives its one result."""
        self._fetching[job.name] = job
        proof, part = job.proof is not None, job.part
        copy = CopyPages(*job.name, job.source.pages, job.dst_pages, proof, part.source, part.width)
        self._outbox.add(copy)

    def stage(self, job: CopyJob) -> None:
        """Asks the front to have a job's pages staged; `let_go` gives its one result."""
        self._staging[job.name] = job
        proof = job.proof is not None
        self._outbox.add(StageCopy(*job.name, job.source.pages, proof, job.part.source))

    def read(self, job: CopyJob) -> None:
        """Says that the slots of a job have been read."""
        if job.name in self._staging:
            self._outbox.add(CopyRead(*job.name))

    def stop(self, job: CopyJob) -> None:
        """Asks the front to end the job, if it still runs."""
        if job.name in self._fetching or job.name in self._staging:
            self._outbox.add(StopCopy(*job.name))

    def stopped(self) -> list[CopyDone[CopyJob]]:
        """The jobs that were fetched, and stopped since the last call."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def staged(self, mine: Container[tuple[int, int]]) -> list[tuple[CopyJob, tuple[int, ...]]]:
        """The jobs of these names whose pages were staged since the last call, and their slots."""
        matching = [one for one in self._staged if one[0].name in mine]
        self._staged = [one for one in self._staged if one[0].name not in mine]
        return matching

    def let_go(self, mine: Container[tuple[int, int]]) -> list[CopyDone[CopyJob]]:
        """The jobs of these names whose slots the owner has let go of since the last call."""
        matching = [done for done in self._let_go if done.job.name in mine]
        self._let_go = [done for done in self._let_go if done.job.name not in mine]
        return matching

    def receive(self, command: CopyStaged | CopyStopped) -> None:
        """Unknown ones are no-ops."""
        name = command.pull, command.number
        if isinstance(command, CopyStaged):
            if name in self._staging:
                self._staged.append((self._staging[name], command.slots))
            return
        error = None if command.failure is None else command.failure.error()
        for running, over in ((self._fetching, self._stopped), (self._staging, self._let_go)):
            if (job := running.pop(name, None)) is not None:
                over.append(CopyDone(job, command.bytes, command.seconds, error))
