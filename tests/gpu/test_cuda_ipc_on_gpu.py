"""The CUDA driver's calls behind `cuda_ipc`: pages between processes, and between GPUs where there are two.

With one GPU both processes share it, and nothing is timed.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest
import torch

from eyas.engine.kv.pool import bytes_of
from kv_transfer.gpu.cuda import CudaDriver
from kv_transfer.gpu.driver import CopyBlock, DeviceAllocation, GpuMemory
from kv_transfer.gpu.handover import DescriptorGiver, TakenDescriptor, take, wait_for_end

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PAGE = 2 * 2**20
PAGES = 2048
OURS = torch.cuda.device_count() - 1 if torch.cuda.is_available() else 0
FASTEST = 0.85
"""Of one peer copy of 1 GiB: what scattered pages must reach."""


def own(path: str, pipe: Connection) -> None:
    """The owner's process, on GPU 0: every word of a page is the page's number."""
    torch.cuda.set_device(0)
    pool = DeviceAllocation.new(CudaDriver(0), PAGES * PAGE)
    words = bytes_of(pool.memory, "cuda:0").view(torch.int32).view(PAGES, -1)
    words.copy_(torch.arange(PAGES, dtype=torch.int32, device="cuda:0")[:, None].expand_as(words))
    torch.cuda.synchronize()
    giver = DescriptorGiver(Path(path), pool.memory.size, pool.export)
    pipe.send("ready")
    pipe.recv()
    giver.close()


@contextmanager
def owner(folder: Path) -> Iterator[tuple[SpawnProcess, TakenDescriptor, GpuMemory, CudaDriver]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    path = str(folder / "giver")
    process = context.Process(target=own, args=(path, theirs))
    process.start()
    torch.cuda.set_device(OURS)
    driver = CudaDriver(OURS)
    try:
        assert ours.poll(60) and ours.recv() == "ready"
        taken = take(path)
        memory = driver.map(taken.descriptor, taken.size)
        os.close(taken.descriptor)
        yield process, taken, memory, driver
        driver.unmap(memory)
    finally:
        process.kill()
        process.join()


@contextmanager
def pool(driver: CudaDriver, pages: int) -> Iterator[tuple[GpuMemory, torch.Tensor]]:
    mine = DeviceAllocation.new(driver, pages * PAGE)
    yield mine.memory, bytes_of(mine.memory, f"cuda:{OURS}")[: pages * PAGE].view(torch.int32).view(pages, -1)
    torch.cuda.synchronize(OURS)
    mine.free()


def scattered(memory: GpuMemory, mine: GpuMemory, count: int) -> tuple[list[CopyBlock], list[int], list[int]]:
    rng = random.Random(count)
    src, dst = rng.sample(range(PAGES), count), rng.sample(range(1024), count)
    pairs = zip(src, dst, strict=True)
    return [CopyBlock(memory.address + s * PAGE, mine.address + d * PAGE, PAGE) for s, d in pairs], src, dst


def test_scattered_pages_arrive(tmp_path: Path) -> None:
    with owner(tmp_path) as (_, _, memory, driver), pool(driver, 1024) as (mine, words):
        words.fill_(-1)
        torch.cuda.synchronize()
        blocks, src, dst = scattered(memory, mine, 700)  # more than one batch per stream
        driver.copy(blocks)
        wanted = torch.full((1024,), -1, dtype=torch.int32, device=words.device)
        wanted[dst] = torch.tensor(src, dtype=torch.int32, device=words.device)
        assert bool((words == wanted[:, None]).all())
        assert driver.read(mine.address + dst[5] * PAGE, PAGE) == src[5].to_bytes(4, "little") * (PAGE // 4)


def test_rows_of_unequal_pages_arrive(tmp_path: Path) -> None:
    """Pages of half the width: the rows of two owners' pages make one of ours."""
    with owner(tmp_path) as (_, _, memory, driver), pool(driver, 8) as (mine, words):
        width, rows = 1024, 1024
        for half in range(2):
            at = mine.address + 3 * PAGE + half * width
            driver.copy([CopyBlock(memory.address + (7 + half) * PAGE, at, width, rows, width, 2 * width)])
        page = words[3].view(rows, 2, width // 4)
        assert bool((page[:, 0] == 7).all()) and bool((page[:, 1] == 8).all())


def test_a_killed_owner_s_memory_stays_until_it_is_unmapped(tmp_path: Path) -> None:
    with owner(tmp_path) as (process, taken, memory, driver), pool(driver, 1024) as (mine, words):
        blocks, src, dst = scattered(memory, mine, 512)
        os.kill(process.pid or 0, signal.SIGSTOP)
        driver.copy(blocks)  # a stopped owner does not matter
        process.kill()
        began = time.monotonic()
        wait_for_end(taken.giver)
        assert time.monotonic() - began < 1.0
        process.join()
        words.fill_(-1)
        torch.cuda.synchronize()
        driver.copy(blocks)
        assert words[dst[0], 0] == src[0]
        held = torch.cuda.mem_get_info(0)[0]
        extra = driver.allocate(PAGE)  # the context lives
        driver.unmap(extra)
    free = torch.cuda.mem_get_info(0)[0]
    assert free - held > 0.9 * PAGES * PAGE


@pytest.mark.skipif(OURS == 0, reason="needs two GPUs")
def test_scattered_pages_come_as_fast_as_the_link(tmp_path: Path) -> None:
    with owner(tmp_path) as (_, _, memory, driver), pool(driver, 1024) as (mine, _):
        theirs = torch.empty(2**30, dtype=torch.uint8, device="cuda:0")
        ours = torch.empty(2**30, dtype=torch.uint8, device=f"cuda:{OURS}")
        peer = 2**30 / seconds(lambda: ours.copy_(theirs))
        for count in (64, 192, 512):
            blocks, _, _ = scattered(memory, mine, count)
            rate = count * PAGE / seconds(lambda blocks=blocks: driver.copy(blocks))
            print(f"{count} pages: {rate / 1e9:.0f} GB/s, one peer copy: {peer / 1e9:.0f} GB/s")
        assert rate > FASTEST * peer


def seconds(do: Callable[[], object]) -> float:
    found = []
    for _ in range(7):
        torch.cuda.synchronize(OURS)
        began = time.perf_counter()
        do()
        torch.cuda.synchronize(OURS)
        found.append(time.perf_counter() - began)
    return statistics.median(found)
