"""This gateway's work under way on each worker: newer than what the worker last said of itself.

It adds and subtracts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eyas.common.types import WorkerInfo


@dataclass(frozen=True)
class UnderWay:
    """The load of a worker: sequences that decode there or will, and tokens of their prompts; `prompts` that
    it computes for others; `queued`: prompt tokens that it was sent and has not finished.
    """

    sequences: int = 0
    context: int = 0
    prompts: int = 0
    queued: int = 0

    @property
    def total(self) -> int:
        """Sequences and prompts: what the worker counts as running or waiting."""
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
        """The worker's load when `info` was first seen: to be called soon after each report."""
        seen = self._reports.get(info.worker)
        if seen is None or seen[0] is not info:
            seen = self._reports[info.worker] = (info, self.now(info.worker))
        return seen[1]

    def add(self, worker: str, part: UnderWay, sign: int = 1) -> None:
        """Adds a part of a request; takes it away if `sign` is -1."""
        self._now[worker] = self.now(worker).plus(part, sign)

    def forget(self, worker: str) -> None:
        """Drops a worker that is gone for good."""
        self._now.pop(worker, None)
        self._reports.pop(worker, None)


class LegLoad:
    """The load of one leg on its worker, until `close`. `change`: adds (1) or takes away (-1)."""

    def __init__(self, change: Callable[[UnderWay, int], None], part: UnderWay) -> None:
        self._change = change
        self._part = part
        change(part, 1)

    def computed(self) -> None:
        """Notes that its prompt is computed. Idempotent."""
        if self._part.queued:
            done = UnderWay(queued=self._part.queued)
            self._part = self._part.plus(done, -1)
            self._change(done, -1)

    def close(self) -> None:
        """Takes its load away. Idempotent."""
        part, self._part = self._part, UnderWay()
        self._change(part, -1)
