"""The owner and the puller of pages that are staged in shared memory."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from eyas.common.errors import TransferFailed
from eyas.common.types import RankPages
from kv_transfer.area import DeviceArea, PoolArea, create_file
from kv_transfer.backends.base import BackendSite, CopyJob, CopyResult, PeerSource
from kv_transfer.backends.shm import ShmBackend
from kv_transfer.copier import PageCopier
from kv_transfer.copy_threads import CopyDone
from kv_transfer.gpu.driver import DeviceAllocation
from kv_transfer.peers import PeerRoute
from tests.unit.fake_gpu import GEOMETRY, FakeDriver

COUNT, PAGE = GEOMETRY.pages, GEOMETRY.page_bytes
FOLDER, SLOTS, WINDOW = "/dev/shm", 12, 4


@dataclass
class Owner:
    """An owner's engine and both fronts: pages of `pool` are copied to slots when they are asked for."""

    pool: np.ndarray
    most: int = 0  # windows at once
    area: PoolArea = field(init=False)
    held: dict[tuple[int, int], tuple[CopyJob, tuple[int, ...]]] = field(default_factory=dict)
    told: list[tuple[CopyJob, tuple[int, ...]]] = field(default_factory=list)
    over: list[CopyDone[CopyJob]] = field(default_factory=list)

    def __post_init__(self) -> None:
        path = Path(FOLDER) / f"eyas-test-{uuid.uuid4().hex}"
        memory = np.frombuffer(create_file(path, SLOTS * PAGE), np.uint8)
        self.area = PoolArea(memory.reshape(SLOTS, PAGE), str(path))
        self.free = list(range(SLOTS))
        self.backend = ShmBackend(BackendSite(self.area, FOLDER, self, (DeviceArea(0, GEOMETRY),)))  # type: ignore[arg-type]

    def stage(self, job: CopyJob) -> None:
        slots = tuple(self.free.pop() for _ in job.source.pages)
        self.area.pages[list(slots)] = self.pool[list(job.source.pages)]
        self.held[job.name] = job, slots
        self.most = max(self.most, len(self.held))
        self.told.append(self.held[job.name])

    def read(self, job: CopyJob) -> None:
        self._end(job, None)

    def stop(self, job: CopyJob) -> None:
        self._end(job, TransferFailed("stopped"))

    def staged(self, mine: Container[tuple[int, int]]) -> list[tuple[CopyJob, tuple[int, ...]]]:
        told, self.told = self.told, []
        return told

    def let_go(self, mine: Container[tuple[int, int]]) -> list[CopyDone[CopyJob]]:
        over, self.over = self.over, []
        return over

    def _end(self, job: CopyJob, error: TransferFailed | None) -> None:
        _, slots = self.held.pop(job.name)
        self.area.pages[list(slots)] = 0xEE  # somebody else's now
        self.free += slots
        self.over.append(CopyDone(job, 0, 0.0, error))


@dataclass
class Puller:
    """A pool on a fake GPU, without slots of its own: nothing may land there."""

    owner: Owner
    driver: FakeDriver = field(default_factory=FakeDriver)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.memory = DeviceAllocation.new(self.driver, GEOMETRY.pool_bytes + PAGE)
        device = DeviceArea(self.memory.memory.address, GEOMETRY, self.memory)
        nowhere = PoolArea(np.zeros((1, PAGE), np.uint8))
        self.backend = ShmBackend(BackendSite(nowhere, FOLDER, self.owner, (device,)))  # type: ignore[arg-type]
        self.copier = PageCopier({"shm": self.backend}, WINDOW)

    def open(self) -> PeerSource:
        export = self.owner.backend.export()
        assert export is not None
        return self.backend.open(export)

    def copy(
        self, source: PeerSource, src: tuple[int, ...], dst: tuple[int, ...], proof: int | None = None
    ) -> CopyResult:
        job = CopyJob(1, next(self.numbers), RankPages(0, src), dst, proof)
        self.copier.submit(PeerRoute(self.backend, source), job)
        deadline = time.monotonic() + 10.0
        while not (results := self.copier.finished()):
            assert time.monotonic() < deadline
        return results[0]

    def pages(self) -> np.ndarray:
        data = self.driver.read(self.memory.memory.address, GEOMETRY.pool_bytes + PAGE)
        return np.frombuffer(data, np.uint8).reshape(-1, PAGE)


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner(np.random.default_rng(3).integers(0, 256, (COUNT + 1, PAGE), np.uint8))
    yield made
    Path(made.area.path).unlink(missing_ok=True)
