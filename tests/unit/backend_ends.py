"""Both ends of each transfer backend, and jobs between them."""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from fake_nixl import FakeNixl

from eyas.common.errors import Cancelled, EyasError, TransferFailed
from eyas.common.types import RankPages
from kv_transfer.area import PoolArea, create_file
from kv_transfer.backends.base import BackendSite, CopyJob, CopyResult, PeerSource, TransferBackend
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.backends.rdma import RdmaBackend
from kv_transfer.backends.stream import PageWriter, chunks
from kv_transfer.backends.table import BACKENDS, backend
from kv_transfer.copy_threads import CopyDone
from kv_transfer.nics import RdmaCard
from tests.unit.fake_gpu import OnFakeGpu, adopted

PAGES, PAGE = 32, 2048
POOL_DIR = "/dev/shm"
DOCS = Path(__file__).parents[2] / "docs" / "adding-a-transfer-backend.md"


def new_area() -> PoolArea:
    path = Path(POOL_DIR) / f"eyas-test-{uuid.uuid4().hex}"
    return PoolArea.new(memoryview(create_file(path, (PAGES + 1) * PAGE)), PAGE, str(path))


@dataclass
class ThreadWire:
    """Two fronts and a wire in one: the bytes of a job come in chunks of half a page, from a thread."""

    area: PoolArea
    peers: dict[int, PoolArea]  # by pull
    running: dict[tuple[int, int], threading.Event] = field(default_factory=dict)
    over: list[CopyDone[CopyJob]] = field(default_factory=list)
    pause_s: float = 0.0
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4))

    def fetch(self, job: CopyJob) -> None:
        self.running[job.name] = threading.Event()
        self.pool.submit(self._fetch, job, self.running[job.name])

    def stop(self, job: CopyJob) -> None:
        self.running[job.name].set()

    def stopped(self) -> list[CopyDone[CopyJob]]:
        return [self.over.pop(0) for _ in range(len(self.over))]

    def _fetch(self, job: CopyJob, stop: threading.Event) -> None:
        error: EyasError | None = None
        writer = PageWriter(self.area.pages, job.dst_pages)
        try:
            if not Path(self.peers[job.pull].path).exists():
                raise TransferFailed("the owner is gone")
            for chunk in chunks(self.peers[job.pull].pages, job.source.pages):
                if stop.wait(self.pause_s) if self.pause_s else stop.is_set():
                    raise Cancelled("the pull was given up")
                writer.write(chunk)
            writer.finish()
        except EyasError as known:
            error = known
        self.over.append(CopyDone(job, 0 if error else writer.bytes, 0.0, error))


@dataclass
class Ends:
    """An owner's area full of random bytes, and a puller's backend of which every page is zero."""

    name: str
    owner: PoolArea = field(default_factory=new_area)
    mine: PoolArea = field(default_factory=new_area)
    wire: ThreadWire = field(init=False)
    owners: TransferBackend = field(init=False)
    backend: TransferBackend = field(init=False)

    def __post_init__(self) -> None:
        self.wire = ThreadWire(self.mine, {1: self.owner})
        make = MAKERS[self.name]
        self.owners = make(BackendSite(self.owner, POOL_DIR, self.wire))
        self.backend = make(BackendSite(self.mine, POOL_DIR, self.wire))
        rng = np.random.default_rng(len(self.name))
        self.owner.pages[:] = rng.integers(0, 256, self.owner.pages.shape, np.uint8)
        self.mine.pages[:] = 0

    def open(self) -> PeerSource:
        export = self.owners.export()
        assert export is not None
        return self.backend.open(export)

    def copy(self, *jobs: CopyJob) -> list[CopyResult]:
        source = self.open()
        for job in jobs:
            self.backend.start(source, job)
        return wait_for(self.backend.poll, len(jobs))

    def close(self) -> None:
        for end in (self.owners, self.backend):
            assert end.close(time.monotonic() + 5.0)
        self.wire.pool.shutdown()
        for area in (self.owner, self.mine):
            Path(area.path).unlink(missing_ok=True)


def documented() -> Callable[[BackendSite], TransferBackend]:
    """The backend that the guide shows."""
    (code,) = re.findall(r'```python\n(""".*?)```', DOCS.read_text(), re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(code, str(DOCS), "exec"), found)
    return found["PreadBackend"]


AGENTS = FakeNixl()
CARD = RdmaCard("mlx5_0", 1e6)  # that is so slow that nothing is slower


def by_card(site: BackendSite) -> RdmaBackend:
    """The backend of a site's area, whose file is the memory of a fake GPU near a card."""
    site = BackendSite(site.area, site.pool_dir, site.wire, (adopted(site),), cards=(CARD,))
    return RdmaBackend(site, lambda: AGENTS)


MAKERS: dict[str, Callable[[BackendSite], TransferBackend]] = {
    **{name: backend(name) for name in BACKENDS if name != "rdma_slots"},  # no areas: see test_rank_parts
    "cuda_ipc": OnFakeGpu,
    "rdma": by_card,
    "nixl": lambda site: NixlBackend(site, lambda: AGENTS),
    "pread": documented(),
}


def job(src: tuple[int, ...], dst: tuple[int, ...], number: int = 0, proof: int | None = None) -> CopyJob:
    return CopyJob(1, number, RankPages(0, src), dst, proof)


def wait_for(poll: Callable[[], list[CopyResult]], count: int) -> list[CopyResult]:
    deadline, results = time.monotonic() + 20.0, []
    while len(results) < count:
        assert time.monotonic() < deadline, f"{len(results)} of {count} jobs reported"
        results += poll()
        time.sleep(0.001)
    time.sleep(0.01)
    assert poll() == [], "a job was reported twice"
    return results
