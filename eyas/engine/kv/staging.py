"""Host memory beside a device's pool, in a file that other processes map: pages pass through it.

Its thread copies between the two, on a stream of its own, and waits for the copies itself: the step loop
never does. Whose pages they are, and which slots are free, is the business of its callers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eyas.engine.kv.pinned import copying_on, pin, unpin
from eyas.engine.kv.pool import KvPool
from eyas.engine.kv.slots import SlotAllocator
from kv_transfer.area import PoolArea, create_file
from kv_transfer.backends.base import runs
from kv_transfer.copy_thread import CopyThread, Then

STOP_S = 5.0  # the end waits this long for a copy that still runs


class PageStaging:
    """`slots` places for pages of `pool`, page-locked where that is a GPU's. Closed by its pool.

    `area`: the slots.

    Raises ConfigError if the file system cannot hold it, or the driver cannot lock it.
    """

    def __init__(self, pool: KvPool, path: Path, slots: int) -> None:
        shape = pool.shape
        self._path = path
        self._file = create_file(path, slots * shape.page_bytes)
        slots_bytes = np.frombuffer(memoryview(self._file), np.uint8)
        self.area = PoolArea(slots_bytes.reshape(slots, shape.page_bytes), str(path))
        self._host = torch.frombuffer(self._file, dtype=shape.dtype).view(slots, -1)
        self._device = pool.pages
        self._stream: torch.cuda.Stream | None = None
        if self._device.is_cuda:
            pin(self._host)
            self._stream = torch.cuda.Stream(self._device.device)
        self._thread: CopyThread[int] = CopyThread("staging")
        self._numbers = itertools.count()
        self._running: dict[int, Then] = {}
        pool.attached.append(self)

    def copy_out(self, pages: Sequence[int], slots: Sequence[int], then: Then) -> None:
        """Pages of the pool, or its proof page, to slots. What counts is past its device event."""
        self._submit(lambda: self._copy(self._device, pages, self._host, slots), then)

    def copy_in(self, slots: Sequence[int], pages: Sequence[int], then: Then) -> None:
        """Slots to pages of the pool."""
        self._submit(lambda: self._copy(self._host, slots, self._device, pages), then)

    def poll(self) -> None:
        """Tell of the copies that stopped, in the order in which they were asked for."""
        for done in self._thread.finished():
            self._running.pop(done.job)(done.error)

    @property
    def copying(self) -> bool:
        """True while there is a copy that `poll` has not reported."""
        return bool(self._running)

    def stop(self, deadline: float) -> bool:
        """Ends the thread; False if it still copies at `deadline` (monotonic seconds)."""
        return self._thread.close(deadline)

    def close(self) -> None:
        """Ends the thread and removes the file; the memory goes with the last view of it."""
        if self.stop(time.monotonic() + STOP_S):
            if self._stream is not None:
                unpin(self._host)
            self._host = self._device = torch.empty(0)
        self._path.unlink(missing_ok=True)

    def _submit(self, do: Callable[[], int], then: Then) -> None:
        number = next(self._numbers)
        self._running[number] = then
        self._thread.submit(number, do)

    @torch.inference_mode()
    def _copy(
        self, source: torch.Tensor, src: Sequence[int], target: torch.Tensor, dst: Sequence[int]
    ) -> int:
        """The bytes moved; when it returns they are there. On the thread."""
        with copying_on(self._stream):
            for first, to, count in runs(tuple(src), tuple(dst)):
                target[to : to + count].copy_(source[first : first + count], non_blocking=True)
        return len(src) * source.shape[1] * source.itemsize


@dataclass(frozen=True)
class StagingInlet:
    """The entry of pages, a `kv_transfer.windows.LandingSlots`: some of a staging's slots."""

    staging: PageStaging
    slots: SlotAllocator

    def take(self, count: int) -> list[int] | None:
        """Takes `count` slots; None: not now."""
        return self.slots.take(count)

    def give(self, slots: Sequence[int]) -> None:
        """Takes slots back, in which nothing is copied any more."""
        self.slots.give(slots)

    def copy_in(self, slots: Sequence[int], pages: Sequence[int], then: Then) -> None:
        """Copies slots to pages of the pool; `poll` calls `then` when that has stopped."""
        self.staging.copy_in(slots, pages, then)

    def poll(self) -> None:
        """Tells of the copies that have stopped."""
        self.staging.poll()

    def stop(self, deadline: float) -> bool:
        """Ends the copies; False if one still runs at `deadline` (monotonic seconds)."""
        return self.staging.stop(deadline)
