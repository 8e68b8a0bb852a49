"""A pool that is in no file, staging beside it, and its thread by hand."""

from __future__ import annotations

import time
from pathlib import Path

from eyas.common.errors import TransferFailed
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.kv.staging import PageStaging

PAGE, PAGES, SLOTS = 4, 24, 10
SHAPE = PoolShape(KvFormat(2, 1, 4), pages=PAGES, page_size=PAGE)


class ByHand:
    """The copy thread of a staging, whose jobs are done when the test says so, in order."""

    def __init__(self, staging: PageStaging) -> None:
        staging._threads[0].close(time.monotonic() + 5.0)
        self.jobs: list[tuple[int, object]] = []
        self.out: list[tuple[list[int], tuple[int, ...]]] = []  # pages and slots of the jobs
        self.broken: TransferFailed | None = None
        staging._threads = [self]  # type: ignore[list-item]
        self._staging, self._copy_out = staging, staging.copy_out
        staging.copy_out = self.copy_out  # type: ignore[method-assign]

    def copy_out(self, pages, slots, then, share) -> None:
        self.out.append((pages, slots))
        self._copy_out(pages, slots, then, share)

    def submit(self, job: int, do: object) -> None:
        self.jobs.append((job, do))

    def do_one(self) -> None:
        number, do = self.jobs.pop(0)
        self.out = self.out[1:]
        if self.broken is None:
            do()  # type: ignore[operator]
        self._staging._running.pop(number)(self.broken)

    def finished(self) -> list[object]:
        return []

    def close(self, deadline: float) -> bool:
        return True


def staged(folder: Path) -> tuple[KvPool, PageStaging]:
    """A pool that is in no file, every page full of its own number, and staging beside it."""
    pool = KvPool(SHAPE)
    for page in range(PAGES):
        pool.tensor[page] = page
    return pool, PageStaging(pool, folder / "staging", SLOTS)
