"""How fast pages go between groups of ranks, by their slots: `python -m tests.gpu.time_rank_parts`.

Two processes, one GPU each; all ranks of a group are pools of its GPU, so what is compared is the same link
with whole pages (1 to 1), and with heads that are gathered and scattered (2 to 1, 1 to 2). Fronts are left
out: a pipe carries what they would. Every byte that came is compared. Each step says when it was done.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Container
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from eyas.common.types import PageShare, RankPages
from eyas.common.wire.pool import PoolInfo, RankPool
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.kv.rank_pools import FollowerPool
from eyas.engine.kv.slots import SlotAllocator
from eyas.engine.kv.staging import PageStaging, StagingInlet
from eyas.engine.loading.travel import STAGED_BYTES
from kv_transfer.area import DeviceArea
from kv_transfer.backends.base import BackendSite, CopyJob
from kv_transfer.backends.table import backend
from kv_transfer.copier import PageCopier
from kv_transfer.copy_threads import CopyDone
from kv_transfer.gpu.cuda import CudaDriver
from kv_transfer.layout import RankPools, window_pages
from kv_transfer.peers import PeerRoute

PAIRS = ((1, 1), (2, 1), (1, 2))
WAIT_S = 60.0
LOOK_S = 2e-5


@dataclass(frozen=True)
class Sizes:
    """Of a model's pages."""

    pages: int
    form: KvFormat
    dtype: torch.dtype = torch.bfloat16


def contents(sizes: Sizes, device: str) -> torch.Tensor:
    """Bytes of all pages, the same in both processes: uint8 [pages, rows, heads, bytes of a head]."""
    shape = PoolShape(sizes.form, sizes.pages, 16, sizes.dtype, device)
    noise = torch.Generator(device=device).manual_seed(5)
    size = (sizes.pages, shape.geometry.page_rows, sizes.form.kv_heads, shape.geometry.head_bytes)
    return torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=noise)


class Group:
    """Pools of some ranks on one device, and slots beside them."""

    def __init__(self, sizes: Sizes, device: str, ranks: int, by: str, wire: Any) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="eyas-parts-", dir="/dev/shm")
        self.shape = PoolShape(sizes.form.of_rank(ranks), sizes.pages, 16, sizes.dtype, device)
        self.pool = KvPool(self.shape)
        self.ranks = [self.pool.pages, *(torch.zeros_like(self.pool.pages) for _ in range(1, ranks))]
        slots = max(3 * window_pages(self.shape.page_bytes), STAGED_BYTES // self.shape.page_bytes)
        path = Path(self.folder.name, "staging")
        self.staging = PageStaging(self.pool, path, slots, self.ranks[1:])
        self.slots = SlotAllocator(range(slots))
        others = (DeviceArea(pages.data_ptr(), self.shape.geometry) for pages in self.ranks[1:])
        areas = (self.pool.device_area(), *others)
        own = self.staging.make_device_slots() if by == "rdma_slots" else ()
        self.backend = backend(by)(BackendSite(self.staging.area, self.folder.name, wire, areas, own))

    def heads(self, rank: int) -> torch.Tensor:
        """A rank's pages, uint8 [pages, rows, heads, bytes of a head]."""
        geometry, pages = self.shape.geometry, self.ranks[rank][: self.shape.pages].view(torch.uint8)
        return pages.view(-1, geometry.page_rows, geometry.kv_heads, geometry.head_bytes)

    def info(self) -> PoolInfo:
        exports = [self.backend.export(rank) or {} for rank in range(len(self.ranks))]
        ranks = tuple(RankPool(rank, 0, {"way": export}) for rank, export in enumerate(exports))
        return PoolInfo(1, "hash", self.shape.geometry, ranks)

    def close(self) -> None:
        assert self.backend.close(time.monotonic() + 5.0)
        self.pool.close()
        self.folder.cleanup()


def own(sizes: Sizes, device: str, by: str, pipe: Connection) -> None:
    """The owner's process: a group for every number of ranks that it is given, until the pipe is closed."""
    whole = contents(sizes, device)
    if device != "cpu":
        hand_over(sizes, device, pipe, whole)
    with contextlib.suppress(EOFError):
        while True:
            group = Group(sizes, device, pipe.recv(), by, None)
            each = sizes.form.kv_heads // len(group.ranks)
            for rank in range(len(group.ranks)):
                group.heads(rank).copy_(whole[:, :, rank * each : (rank + 1) * each])
            pipe.send(group.info())
            stage(group, pipe)
            group.close()


def hand_over(sizes: Sizes, device: str, pipe: Connection, whole: torch.Tensor) -> None:
    """A pool that the puller maps, as rank 0 does those of other ranks, until it says that it is done."""
    with tempfile.TemporaryDirectory(prefix="eyas-rank-", dir="/dev/shm") as folder:
        pool = KvPool(PoolShape(sizes.form, sizes.pages, 16, sizes.dtype, device))
        pool.pages[: sizes.pages].view(torch.uint8).copy_(whole.flatten(1))
        pool.hand_over(Path(folder, "giver"))
        pipe.send(Path(folder, "giver"))
        pipe.recv()
        pool.close()


def stage(group: Group, pipe: Connection) -> None:
    """Stages what is asked for until the puller is done."""
    slots: dict[tuple[int, int], list[int]] = {}
    waiting: list[CopyJob] = []
    while True:
        if pipe.poll(LOOK_S):
            what, job = pipe.recv()
            if what == "done":
                return
            if what == "stage":
                waiting.append(job)
            else:
                group.slots.give(slots.pop(job.name, ()))
                waiting = [other for other in waiting if other.name != job.name]
                pipe.send(("held", job, ()))
        while waiting:
            job = waiting[0]
            taken = group.slots.take(group.staging.slots_for(job.count, job.part.source))
            if taken is None:
                break
            slots[waiting.pop(0).name] = taken

            def staged(error: Any, job: CopyJob = job, taken: list[int] = taken) -> None:
                pipe.send(("staged", job, tuple(taken)))

            group.staging.copy_out(job.source.pages, taken, staged, job.part.source)
        group.staging.poll()


class PipeWire:
    """The puller's end of the pipe, as a front."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._staged: list[tuple[CopyJob, tuple[int, ...]]] = []
        self._over: list[CopyDone[CopyJob]] = []

    def stage(self, job: CopyJob) -> None:
        self._pipe.send(("stage", job))

    def read(self, job: CopyJob) -> None:
        self._pipe.send(("read", job))

    def stop(self, job: CopyJob) -> None:
        """Its error is told when the slots are back."""
        self.read(job)

    def staged(self, mine: Container[Any]) -> list[tuple[CopyJob, tuple[int, ...]]]:
        while self._pipe.poll():
            what, job, slots = self._pipe.recv()
            if what == "staged":
                self._staged.append((job, slots))
            else:
                self._over.append(CopyDone(job, 0, 0.0, None))
        staged, self._staged = self._staged, []
        return staged

    def let_go(self, mine: Container[Any]) -> list[CopyDone[CopyJob]]:
        over, self._over = self._over, []
        return over


@dataclass(frozen=True)
class Puller:
    """This process. `whole`: what the owner has."""

    sizes: Sizes
    device: str
    by: str
    pipe: Connection
    whole: torch.Tensor
    began: float

    @classmethod
    def started(cls, sizes: Sizes, devices: tuple[str, str], by: str) -> Puller:
        """Starts the owner, too."""
        began, context = time.monotonic(), multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        context.Process(target=own, args=(sizes, devices[0], by, theirs), daemon=True).start()
        theirs.close()
        puller = cls(sizes, devices[1], by, pipe, contents(sizes, devices[1]), began)
        puller.say("the puller has its contents")
        return puller

    def say(self, text: str) -> None:
        """A step that is done."""
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    def map_rank(self, giver: Path) -> bool:
        """Whether another process's pool on the other GPU is read here, and through staging, as it is."""
        shape = PoolShape(self.sizes.form, self.sizes.pages, 16, self.sizes.dtype, "cuda:0")
        other = FollowerPool.at(giver, shape.geometry, partial(CudaDriver, 0))
        pages = other.pages(shape, "cuda:0")
        same = bool((pages[: self.sizes.pages].view(torch.uint8) == self.whole.flatten(1).to("cuda:0")).all())
        with tempfile.TemporaryDirectory(prefix="eyas-rank-", dir="/dev/shm") as folder:
            own = KvPool(dataclasses.replace(shape, device="cuda:1"))
            staging = PageStaging(own, Path(folder, "staging"), 4, [pages])
            over: list[Any] = []
            staging.copy_out((7, 3, 4), (2, 0, 1), over.append, PageShare(1, 2, 2))
            while not over:
                staging.poll()
            width = shape.geometry.part_bytes(2)
            parts = torch.from_numpy(staging.area.pages[[2, 0, 1], :width].copy())
            same &= torch.equal(parts, self.whole[[7, 3, 4], :, 2:4].flatten(1).cpu())
            del pages
            own.close()
        other.close()
        self.say(f"a pool of another process and GPU, mapped and staged: {'right' if same else 'WRONG'}")
        return same and over == [None]

    def routes(self, group: Group, info: PoolInfo) -> list[PeerRoute]:
        """To each rank of the owner."""
        ours = RankPools(group.shape.geometry, len(group.ranks), divides=True)
        sources = [group.backend.open(rank.exports["way"]) for rank in info.ranks]
        return [
            PeerRoute(group.backend, source, ours.parts(info, rank, source.on_device))
            for rank, source in enumerate(sources)
        ]

    def timed(self, there: int, here: int, times: int) -> bool:
        """Says the GB/s of a prompt of all pages, and returns whether every byte is right."""
        self.pipe.send(there)
        group = Group(self.sizes, self.device, here, self.by, PipeWire(self.pipe))
        assert self.pipe.poll(WAIT_S), "the owner said nothing"
        routes = self.routes(group, self.pipe.recv())
        self.say(f"{there} to {here}: both have their slots")
        inlet = StagingInlet(group.staging, group.slots)
        copier = PageCopier({self.by: group.backend}, window_pages(group.shape.page_bytes), inlet)
        pages = tuple(range(self.sizes.pages))
        turned = pages[::-1]  # pages of a busy pool do not lie in a row
        seconds = []
        for number in range(times + 1):
            jobs = [CopyJob(1, number * there + i, RankPages(i, pages), turned) for i in range(there)]
            seconds.append(pulled(copier, list(zip(routes, jobs, strict=True))))
            if number == 0:
                self.say(f"{there} to {here}: the first prompt, {seconds[0]:.2f} s")
        each = self.sizes.form.kv_heads // here
        whole = self.whole.flip(0)
        right = all(
            torch.equal(group.heads(rank), whole[:, :, rank * each : (rank + 1) * each])
            for rank in range(here)
        )
        self.pipe.send(("done", None))
        group.close()
        size = self.sizes.pages * group.shape.page_bytes * here / 1e9
        rates = {"GB/s": size / statistics.median(seconds[1:]), "best": size / min(seconds[1:])}
        shown = {name: round(rate, 1) for name, rate in rates.items()}
        self.say(json.dumps({"by": self.by, "there": there, "here": here, **shown, "right": right}))
        return right


def pulled(copier: PageCopier, jobs: list[tuple[PeerRoute, CopyJob]]) -> float:
    """Seconds until all have come."""
    began, left = time.perf_counter(), len(jobs)
    for route, job in jobs:
        copier.submit(route, job)
    while left:
        results = copier.finished()
        for result in results:
            if result.error is not None:
                raise result.error
        left -= len(results)
        time.sleep(LOOK_S)  # the threads that copy need the interpreter
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, nargs=2, default=[0, 1], help="of owner and puller (0 1)")
    parser.add_argument("--by", nargs="+", default=["rdma_slots"], help="backends (rdma_slots)")
    parser.add_argument("--pages", type=int, default=512, help="of 2 MiB each, of all ranks together (512)")
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--limit", type=float, default=38.0, help="seconds, then it says where it is (38)")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.limit, exit=True)
    sizes = Sizes(args.pages, KvFormat(32, 8, 128))
    devices = tuple(f"cuda:{gpu}" for gpu in args.gpus) if args.device == "cuda" else ("cpu", "cpu")
    wrong = 0
    for by in args.by:
        puller = Puller.started(sizes, devices, by)
        if args.device == "cuda":
            try:
                giver = puller.pipe.recv()
                wrong += args.gpus == [0, 1] and not puller.map_rank(giver)
            except Exception:  # the timings can be made all the same
                traceback.print_exc(file=sys.stdout)
                wrong += 1
            puller.pipe.send("done")
        wrong += sum(not puller.timed(there, here, args.times) for there, here in PAIRS)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
