"""Cases of transfer: KV pages from one process's file to another's, and between a GPU's pool and its staging.

Pages are whole pages of the model, one after the other or scattered. A copy by shared memory reads and writes
this machine's memory; one to or from staging crosses to the GPU.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from eyas.bench.kernels.case import Call, KernelCalls, KernelCase, KernelSetting
from eyas.common.errors import EyasError, TransferFailed
from eyas.common.types import RankPages
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.kv.staging import PageStaging
from kv_transfer.area import PoolArea, create_file
from kv_transfer.backends.base import CopyJob, copy_pages
from kv_transfer.backends.shm import map_file
from kv_transfer.host_files import new_path

CALLS = 4
MOST_BYTES = 64 << 20  # of one call; never more than twice the cache, so that tests can be small
COPY_S = 30.0  # for one copy


def cases(setting: KernelSetting) -> Iterator[KernelCase]:
    """Copies by shared memory; on a GPU also out of the pool and into it."""
    for layout, scattered in (("pages in a row", False), ("scattered pages", True)):
        yield KernelCase(f"shm, {layout}", partial(_shm, setting, scattered))
        if setting.device != "cpu":
            yield KernelCase(f"pool to staging, {layout}", partial(_staged, setting, scattered, True))
            yield KernelCase(f"staging to pool, {layout}", partial(_staged, setting, scattered, False))


def _pages(setting: KernelSetting) -> PoolShape:
    """A pool with the pages of all calls."""
    model, config = setting.model, setting.config
    one = PoolShape(model.kv_format, 1, config.page_size, setting.dtype, setting.device)
    each = max(1, min(MOST_BYTES, 2 * setting.cache) // one.page_bytes)
    return PoolShape(model.kv_format, CALLS * each, config.page_size, setting.dtype, setting.device)


def _jobs(pages: int, scattered: bool) -> list[tuple[int, ...]]:
    """The pages that each call copies, to those of the same places in a row."""
    numbers = list(range(pages))
    if scattered:
        random.Random(0).shuffle(numbers)
    each = pages // CALLS
    return [tuple(numbers[i * each : (i + 1) * each]) for i in range(CALLS)]


def _shm(setting: KernelSetting, scattered: bool) -> KernelCalls:
    shape, folder = _pages(setting), Path(setting.config.pool_dir)
    size = (shape.pages + 1) * shape.page_bytes
    paths = [new_path(name, folder) for name in ("source", "target")]
    with ExitStack() as files:
        areas = []
        for path in paths:
            memory = create_file(path, size)
            files.callback(path.unlink, missing_ok=True)
            areas.append(PoolArea.new(memoryview(memory), shape.page_bytes, str(path)))
        peer = map_file(str(paths[0]), shape.page_bytes).pages  # a mapping of its own, as a puller has
        calls: list[Call] = []
        for i, pages in enumerate(_jobs(shape.pages, scattered)):
            job = CopyJob(1, i, RankPages(0, pages), tuple(range(i * len(pages), (i + 1) * len(pages))))
            calls.append(partial(copy_pages, job, peer, areas[1].pages))
        for call in calls:
            call()  # every page of both mappings is there from now on
        open_files = files.pop_all()
    return KernelCalls(calls, 2 * shape.nbytes // CALLS, road="host", clock="host", close=open_files.close)


def _staged(setting: KernelSetting, scattered: bool, out: bool) -> KernelCalls:
    shape = _pages(setting)
    pool = KvPool(shape)
    staging = PageStaging(pool, new_path("staging", Path(setting.config.pool_dir)), shape.pages)
    calls: list[Call] = []
    for i, pages in enumerate(_jobs(shape.pages, scattered)):
        slots = tuple(range(i * len(pages), (i + 1) * len(pages)))
        move: Call = (
            partial(staging.copy_out, pages, slots) if out else partial(staging.copy_in, slots, pages)
        )
        calls.append(partial(_done, staging, move))
    nbytes = shape.nbytes // CALLS
    road = "to host" if out else "to device"
    return KernelCalls(calls, nbytes, road=road, clock="host", close=pool.close)


def _done(staging: PageStaging, move: Callable[..., object]) -> None:
    """Asks for a copy and waits until it has stopped, as the engine's loop learns of it."""
    outcomes: list[EyasError | None] = []
    move(outcomes.append)
    deadline = time.monotonic() + COPY_S
    while not outcomes:
        staging.poll()
        if time.monotonic() > deadline:
            raise TransferFailed(f"a copy of staging did not end within {COPY_S:g} s")
    if outcomes[0] is not None:
        raise outcomes[0]
