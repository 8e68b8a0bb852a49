"""Copies into a device's pool: they land in staging slots and go on from there, and only then count.

It knows slots and jobs. What a backend does until the bytes are in a slot is the `Copier`'s business.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from functools import partial

from eyas.common.errors import Cancelled, EyasError
from eyas.engine.kv.slots import Slots
from eyas.engine.kv.staging import Staging
from kv_transfer.backends.base import Backend, Copy, CopyResult
from kv_transfer.copier import Copier
from kv_transfer.route import Route


class StagedCopier(Copier):
    """A `Copier` whose jobs name pages of the device's pool. A job waits, in order, until it has slots."""

    def __init__(self, backends: Mapping[str, Backend], staging: Staging, slots: Slots) -> None:
        super().__init__(staging.area, backends)
        self._staging = staging
        self._slots = slots
        self._waiting: deque[tuple[Route, Copy]] = deque()
        self._landing: dict[tuple[int, int], tuple[Copy, list[int]]] = {}
        self._over: list[CopyResult] = []

    def submit(self, route: Route, job: Copy) -> None:
        self._waiting.append((route, job))
        self._begin()

    def cancel(self, pull: int) -> None:
        unbegun = [job for _, job in self._waiting if job.pull == pull]
        self._waiting = deque((route, job) for route, job in self._waiting if job.pull != pull)
        self._over += [CopyResult(job, "", 0, 0.0, Cancelled("the copy was given up")) for job in unbegun]
        super().cancel(pull)

    def finished(self) -> list[CopyResult]:
        for result in super().finished():
            job, slots = self._landing[result.job.name]
            if result.ok and job.proof is None:
                self._staging.copy_in(slots, job.dst_pages, partial(self._landed, result))
            else:
                self._landed(result, result.error)  # (a proof has proven all by being in its slot)
        self._staging.poll()
        self._begin()
        over, self._over = self._over, []
        return over

    def _begin(self) -> None:
        while self._waiting:
            route, job = self._waiting[0]
            slots = self._slots.take(len(job.dst_pages))
            if slots is None:
                return
            self._waiting.popleft()
            self._landing[job.name] = job, slots
            super().submit(route, dataclasses.replace(job, dst_pages=tuple(slots)))

    def _landed(self, result: CopyResult, error: EyasError | None) -> None:
        job, slots = self._landing.pop(result.job.name)
        self._slots.give(slots)
        self._over.append(dataclasses.replace(result, job=job, error=error))
