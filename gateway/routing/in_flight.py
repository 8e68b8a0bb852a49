"""Counts this gateway's own load on each worker, which is newer than the last report of the worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eyas.common.types import WorkerInfo


@dataclass(frozen=True)
class UnderWay:
    """The load of a worker. `sequences`: those that decode there or will; `context`: the tokens of their
    prompts; `prompts`: those that it computes for other workers; `queued`: prompt tokens that it has not
    finished.
    """

    sequences: int = 0
    context: int = 0
    prompts: int = 0
    queued: int = 0

    @property
    def total(self) -> int:
        """Sequences and prompts, which the worker counts as running or waiting."""
        return self.sequences + self.prompts

    def plus(self, other: UnderWay, sign: int = 1) -> UnderWay:
        """The sum; the difference if `sign` is -1."""
        return UnderWay(
            self.sequences + sign * other.sequences,
            self.context + sign * other.context,
            self.prompts + sign * other.prompts,
            self.queued + sign * other.queued,
        )


class InFlightLedger:
    """The loads of workers: now, and at each worker's last report."""

    def __init__(self) -> None:
        self._now: dict[str, UnderWay] = {}
        self._reports: dict[str, tuple[WorkerInfo, UnderWay]] = {}

    def now(self, worker: str) -> UnderWay:
        """The load of the worker now."""
        return self._now.get(worker, UnderWay())

    def at_report(self, info: WorkerInfo) -> UnderWay:
        """The worker's load when `info` was first passed; to be called soon after each report."""
        seen = self._reports.get(info.worker)
        if seen is None or seen[0] is not info:
            seen = self._reports[info.worker] = (info, self.now(info.worker))
        return seen[1]

    def add(self, worker: str, part: UnderWay, sign: int = 1) -> None:
        """Adds a part of a request to the load; subtracts it if `sign` is -1."""
        self._now[worker] = self.now(worker).plus(part, sign)

    def forget(self, worker: str) -> None:
        """Drops a worker that has left."""
        self._now.pop(worker, None)
        self._reports.pop(worker, None)


class LegLoad:
    """The load of one leg on its worker, until `close`. `change` adds (1) or subtracts (-1) a load."""

    def __init__(self, change: Callable[[UnderWay, int], None], part: UnderWay) -> None:
        self._change = change
        self._part = part
        change(part, 1)

    def computed(self) -> None:
        """Subtracts the queued tokens once the prompt is computed. Idempotent."""
        if self._part.queued:
            done = UnderWay(queued=self._part.queued)
            self._part = self._part.plus(done, -1)
            self._change(done, -1)

    def close(self) -> None:
        """Subtracts the rest of the load. Idempotent."""
        part, self._part = self._part, UnderWay()
        self._change(part, -1)
