"""`rdma` between two GPUs of a host without network cards: NIXL then takes NVLink, if the memory lets it.

    python -m tests.gpu.time_rdma --out FILE

Pools of 2 GiB in pages of 2 MiB, in cudaMalloc memory, which UCX of the wheel reaches by cuda_ipc; the
backend is the one that cards serve, by its threads, queues and READs. 1 GiB is read: pages in one run, in
runs of eight, and scattered; each beside a bare loop of the library's calls over the same pages, in the same
process. Then the pool of a worker is tried, of cuMemCreate: what UCX does not reach is refused by its rate.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.bench.output import append_line
from eyas.common.types import RankPages
from eyas.common.wire.pool import PoolGeometry
from kv_transfer.area import DeviceArea, PoolArea
from kv_transfer.backends.base import BackendSite, CopyJob, CopyResult, PeerSource
from kv_transfer.backends.nixl_agent import NixlPeer
from kv_transfer.backends.rdma import RdmaBackend
from kv_transfer.gpu.cuda import CudaDriver
from kv_transfer.gpu.driver import DeviceAllocation, GpuMemory
from kv_transfer.nics import RdmaCard

PAGES, READ = 1024, 512
GEOMETRY = PoolGeometry(pages=PAGES - 1, page_size=16, layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")
PAGE = GEOMETRY.page_bytes
COPY_S, TIMES = 20.0, 4
CARD = RdmaCard("none", 50e9)  # it stands for the floor alone


def main() -> int:
    """The command line; 1 if some figure is missing."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="for JSON lines")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs,))
    owner.start()
    try:
        return measure(ours, args.out)
    finally:
        owner.kill()
        owner.join()


class Pool:
    """A pool on GPU `number`, of cudaMalloc or of the driver's memory, page p full of p % 251."""

    def __init__(self, number: int, mapped: bool) -> None:
        torch.cuda.set_device(number)
        driver = CudaDriver(number)
        if mapped:
            allocation = DeviceAllocation.new(driver, PAGES * PAGE)
        else:
            self.memory = torch.empty(PAGES * PAGE, dtype=torch.uint8, device=f"cuda:{number}")
            allocation = DeviceAllocation(driver, GpuMemory(self.memory.data_ptr(), PAGES * PAGE))
            self.memory.view(PAGES, PAGE)[:] = (torch.arange(PAGES, device=self.memory.device) % 251)[:, None]
            torch.cuda.synchronize()
        self.area = DeviceArea(allocation.memory.address, GEOMETRY, allocation)
        nowhere = PoolArea(np.empty((1, PAGE), np.uint8))
        site = BackendSite(nowhere, "", None, (self.area,), cards=(CARD,))  # type: ignore[arg-type]
        self.backend = RdmaBackend(site)
        self.backend._cards = ()  # the library takes whatever it finds


def own(pipe: Connection) -> None:
    """The owner's process, on GPU 0."""
    pools = [Pool(0, mapped) for mapped in (False, True)]
    pipe.send([pool.backend.export() for pool in pools])
    pipe.recv()


def measure(pipe: Connection, out: Path) -> int:
    """Reads from GPU 1."""
    pool = Pool(1, mapped=False)
    plain, mapped = pipe.recv()
    source, failed = pool.backend.open(plain), 0
    rng = np.random.default_rng(0)
    blocks = [np.concatenate([8 * b + np.arange(8) for b in rng.permutation(127)[:64]]) for _ in range(2)]
    picks = {
        "one run": (np.arange(READ),) * 2,
        "runs of 8": tuple(blocks),
        "scattered": tuple(rng.permutation(PAGES - 1)[:READ] for _ in range(2)),
    }
    for name, (src, dst) in picks.items():
        results = [copy(pool, source, src, dst) for _ in range(TIMES)]
        right = bool((pool.memory.view(PAGES, PAGE)[dst.tolist(), 7].cpu() == torch.tensor(src % 251)).all())
        best = max(result.bytes / result.seconds / 1e9 if result.ok else 0.0 for result in results)
        bare = bare_loop(pool, source, src, dst)
        say(out, what=name, GBs=round(best, 1), bare=round(bare, 1), part=round(best / bare, 3), right=right)
        failed += not (right and all(result.ok for result in results))
    refused = copy(pool, pool.backend.open(mapped), np.arange(READ), np.arange(READ))
    say(out, what="pool of cuMemCreate", refused=refused.error.message if refused.error else "")
    return int(failed > 0)


def copy(pool: Pool, source: PeerSource, src: np.ndarray, dst: np.ndarray) -> CopyResult:
    """One job."""
    pages = RankPages(0, tuple(src.tolist()))
    pool.backend.start(source, CopyJob(1, time.monotonic_ns(), pages, tuple(dst.tolist())))
    deadline = time.monotonic() + COPY_S
    while time.monotonic() < deadline:
        for result in pool.backend.poll():
            return result
        time.sleep(1e-4)
    raise TimeoutError("a copy did not end")


def bare_loop(pool: Pool, source: PeerSource, src: np.ndarray, dst: np.ndarray) -> float:
    """GB/s of one READ of all pages by the library's calls alone: the best of some."""
    assert isinstance(source, NixlPeer)
    found: list[float] = []

    def read(reads: Any) -> None:
        agent, link = reads._own(), reads._links[source.remote.agent]
        blocks = link.blocks(source.remote.memory, PAGE)
        for _ in range(TIMES):
            began = time.perf_counter()
            handle = agent.read(blocks, _numbers(src), _numbers(dst))
            while agent.fate(handle)[0].value == "running":
                pass
            found.append(len(src) * PAGE / (time.perf_counter() - began) / 1e9)
            agent.release(handle)

    pool.backend._tell(read)
    deadline = time.monotonic() + COPY_S
    while len(found) < TIMES and time.monotonic() < deadline:
        time.sleep(0.01)
    return max(found, default=float("nan"))


def _numbers(pages: np.ndarray) -> tuple[int, ...]:
    return tuple(pages.tolist())


def say(out: Path, **fields: Any) -> None:
    """A line in the file, and on the screen."""
    append_line(out, fields)
    print(fields, flush=True)


if __name__ == "__main__":
    sys.exit(main())
