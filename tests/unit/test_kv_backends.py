"""Bytes really move: local and shm copies, the copy thread, and the whole protocol between two processes."""

from __future__ import annotations

import hashlib
import mmap
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from eyas.common.errors import ConfigError, TransferFailed
from eyas.common.types import Shard
from kv_transfer.backends.base import Backend, Copy, Pages, page_view
from kv_transfer.backends.local import LocalBackend
from kv_transfer.backends.shm import ShmBackend
from kv_transfer.copier import Copier
from kv_transfer.layout import Geometry

GEOMETRY = Geometry(pages=32, page_size=4, layers=2, kv_heads=2, head_dim=16, dtype="float32")
PAGE = GEOMETRY.page_bytes
POOL_DIR = "/dev/shm"

# The peer: creates a pool file, fills it from a seed, says so, and waits to be told to end.
OWNER_PROCESS = """
import mmap, os, sys
import numpy as np
path, size, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
os.ftruncate(fd, size)
pool = np.frombuffer(mmap.mmap(fd, size), np.uint8)
pool[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
print("filled", flush=True)
sys.stdin.readline()
os.unlink(path)
"""


def empty_pool() -> Pages:
    return page_view(memoryview(bytearray(GEOMETRY.pool_bytes)), GEOMETRY)


def random_pages(seed: int, pages: int = GEOMETRY.pages) -> Pages:
    return np.random.default_rng(seed).integers(0, 256, (pages, PAGE), np.uint8)


def job(pool: str, src: tuple[int, ...], dst: tuple[int, ...], number: int = 0) -> Copy:
    return Copy(1, number, Shard(0, pool, src), dst)


def wait_for(copier: Copier, count: int) -> list:
    deadline, results = time.monotonic() + 10.0, []
    while len(results) < count:
        assert time.monotonic() < deadline, f"{len(results)} of {count} jobs reported"
        results += copier.finished()
        time.sleep(0.001)
    return results


@pytest.fixture
def pool_file() -> Iterator[str]:
    path = f"{POOL_DIR}/eyas-test-{uuid.uuid4().hex}"
    yield path
    Path(path).unlink(missing_ok=True)


# --- copies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "src, dst",
    [
        ((), ()),
        ((31,), (0,)),
        ((3, 4, 5, 6), (10, 11, 12, 13)),
        ((3, 4, 5, 9, 10, 2), (7, 8, 20, 21, 22, 23)),
        ((5, 4, 3), (1, 2, 3)),
        ((0, 2, 4, 5), (31, 30, 29, 28)),
    ],
)
def test_exactly_the_named_pages_are_written(src, dst):
    source, destination = random_pages(1), empty_pool()
    moved = LocalBackend(destination, {"pool": source}).copy(job("pool", src, dst))
    expected = np.zeros_like(destination)
    expected[list(dst)] = source[list(src)]
    np.testing.assert_array_equal(destination, expected)
    assert moved == len(src) * PAGE


@pytest.mark.parametrize("page", [-1, 32])
def test_pages_outside_the_peers_pool_are_refused(page):
    backend = LocalBackend(empty_pool(), {"pool": random_pages(1)})
    with pytest.raises(TransferFailed, match="pages that the pool pool does not have"):
        backend.copy(job("pool", (0, page), (0, 1)))


def test_an_unknown_local_pool_is_an_error():
    with pytest.raises(TransferFailed, match="not in this process"):
        LocalBackend(empty_pool(), {}).copy(job("elsewhere", (0,), (0,)))


def test_a_pool_smaller_than_its_geometry_is_refused():
    with pytest.raises(ConfigError, match="its geometry needs"):
        page_view(memoryview(bytearray(GEOMETRY.pool_bytes - 1)), GEOMETRY)


# --- shm --------------------------------------------------------------------------------------------


def test_two_processes_share_pages_and_a_dead_peer_is_noticed(pool_file):
    command = [sys.executable, "-c", OWNER_PROCESS, pool_file, str(GEOMETRY.pool_bytes), "5"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout.readline() == "filled\n"
        destination = empty_pool()
        backend = ShmBackend(destination, POOL_DIR)
        src, dst = tuple(range(31, -1, -1)), tuple(range(32))
        assert backend.copy(job(pool_file, src, dst)) == GEOMETRY.pool_bytes
        flat = np.random.default_rng(5).integers(0, 256, GEOMETRY.pool_bytes, np.uint8)
        truth = flat.reshape(-1, PAGE)[::-1]
        assert hashlib.sha256(destination.tobytes()).digest() == hashlib.sha256(truth.tobytes()).digest()
        peer.communicate("end\n", timeout=10)
    with pytest.raises(TransferFailed, match="No such file"):
        backend.copy(job(pool_file, (0,), (0,)))


def test_a_restarted_peer_is_mapped_anew(pool_file):
    destination = empty_pool()
    backend = ShmBackend(destination, POOL_DIR)
    for seed, pages in [(1, 32), (2, 40)]:
        Path(pool_file).unlink(missing_ok=True)
        Path(pool_file).write_bytes(random_pages(seed, pages).tobytes())
        backend.copy(job(pool_file, (pages - 1,), (0,)))
        np.testing.assert_array_equal(destination[0], random_pages(seed, pages)[-1])


def test_the_memory_of_a_dead_peer_is_given_back(pool_file):
    backend = ShmBackend(empty_pool(), POOL_DIR)
    Path(pool_file).write_bytes(random_pages(1).tobytes())
    backend.copy(job(pool_file, (0,), (0,)))
    dead, reborn = Path(pool_file), Path(f"{POOL_DIR}/reborn-{uuid.uuid4().hex}")
    try:
        dead.unlink()
        reborn.write_bytes(random_pages(2).tobytes())
        backend.copy(job(str(reborn), (0,), (0,)))
        assert pool_file not in Path("/proc/self/maps").read_text()
    finally:
        reborn.unlink()


@pytest.mark.parametrize("size", [0, PAGE - 1, PAGE + 1])
def test_a_file_that_is_no_pool_of_such_pages_is_refused(pool_file, size):
    Path(pool_file).write_bytes(bytes(size))
    with pytest.raises(TransferFailed, match=f"not a pool of pages of {PAGE} bytes"):
        ShmBackend(empty_pool(), POOL_DIR).copy(job(pool_file, (0,), (0,)))


def test_a_peer_cannot_name_other_files(pool_file, tmp_path):
    outside = tmp_path / "secret"
    outside.write_bytes(bytes(PAGE))
    os.symlink(outside, pool_file)
    backend = ShmBackend(empty_pool(), POOL_DIR)
    for path in (str(outside), f"{POOL_DIR}/../..{outside}", pool_file):
        with pytest.raises(TransferFailed, match="is not in|cannot be opened"):
            backend.copy(job(path, (0,), (0,)))


def test_a_peers_pool_is_mapped_read_only(pool_file):
    Path(pool_file).write_bytes(bytes(PAGE))
    backend = ShmBackend(empty_pool(), POOL_DIR)
    assert not backend._source(pool_file).flags.writeable


# --- the copy thread ----------------------------------------------------------------------------------


class SlowBackend(Backend):
    """Takes `seconds` a job; page 13 is a defect."""

    name = "slow"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.closed = False

    def copy(self, job: Copy) -> int:
        time.sleep(self.seconds)
        if 13 in job.source.pages:
            raise ZeroDivisionError("unlucky")
        return len(job.dst_pages)

    def close(self) -> None:
        self.closed = True


def test_every_job_is_reported_once_in_order_with_its_path():
    copier = Copier(SlowBackend(0.002), pool_pages=32)
    jobs = [job("pool", (i,), (i,), number=i) for i in range(10)]
    for each in jobs:
        copier.submit(each)
    results = wait_for(copier, 10)
    assert [result.job for result in results] == jobs
    assert all(r.ok and r.path == "slow" and r.bytes == 1 and r.seconds >= 0.002 for r in results)
    assert copier.finished() == []
    assert copier.close(time.monotonic() + 5.0)


def test_a_defect_fails_its_job_and_not_the_thread():
    copier = Copier(SlowBackend(0.0), pool_pages=32)
    copier.submit(job("pool", (13,), (0,)))
    copier.submit(job("pool", (14,), (1,)))
    bad, good = wait_for(copier, 2)
    assert not bad.ok and "ZeroDivisionError" in bad.error.message and bad.error.code == "transfer_failed"
    assert good.ok
    copier.close(time.monotonic() + 5.0)


def test_closing_reports_what_waited_and_says_whether_it_stopped():
    backend = SlowBackend(0.2)
    copier = Copier(backend, pool_pages=32)
    for i in range(3):
        copier.submit(job("pool", (i,), (i,), number=i))
    time.sleep(0.05)
    assert not copier.close(time.monotonic()), "the first job still runs"
    results = wait_for(copier, 3)
    assert [r.error.code if r.error else "ok" for r in results] == ["ok", "cancelled", "cancelled"]
    copier._thread.join(5.0)
    assert backend.closed


def test_a_full_pool_of_single_page_jobs_fits_the_queue():
    copier = Copier(SlowBackend(0.001), pool_pages=32)
    for i in range(32):
        copier.submit(job("pool", (i % 8,), (i,), number=i))
    copier.close(time.monotonic() + 5.0)
    assert len(wait_for(copier, 32)) == 32


@pytest.fixture
def big_copier(pool_file) -> Iterator[tuple[Copier, Pages]]:
    """Zeros in a pool file of 1024 pages of 64 KiB, and a copier into a warm destination of its size."""
    geometry = Geometry(pages=1024, page_size=16, layers=8, kv_heads=2, head_dim=32, dtype="float32")
    Path(pool_file).write_bytes(bytes(geometry.pool_bytes))
    destination = page_view(memoryview(mmap.mmap(-1, geometry.pool_bytes)), geometry)
    destination[:] = 1
    copier = Copier(ShmBackend(destination, POOL_DIR), geometry.pages)
    yield copier, destination
    assert copier.close(time.monotonic() + 10.0)


def test_the_loop_runs_on_while_bytes_move(pool_file, big_copier):
    copier, destination = big_copier
    everything = tuple(range(1024))
    copier.submit(job(pool_file, everything * 8, everything * 8))
    turns, results = 0, []
    while not results:
        time.sleep(0.0002)
        results = copier.finished()
        turns += 1
    assert results[0].ok and not destination.any()
    assert turns > 10, "a copy that held the GIL would give the loop a handful of turns"


def test_the_speed_of_shm_beside_memcpy(pool_file, big_copier, capsys):
    """The figures are printed, not judged: they depend on the machine's other work."""
    copier, destination = big_copier
    everything = tuple(range(1024))
    scattered = tuple(np.random.default_rng(0).permutation(1024).tolist())
    speed = {}
    for name, pages in [("first touch", everything), ("one run", everything), ("scattered", scattered)]:
        copier.submit(job(pool_file, pages, everything))
        (result,) = wait_for(copier, 1)
        assert result.bytes == destination.nbytes
        speed[name] = result.bytes / result.seconds / 1e9
    source = np.full(destination.nbytes, 2, np.uint8)
    started = time.monotonic()
    destination.reshape(-1)[:] = source
    speed["memcpy"] = destination.nbytes / (time.monotonic() - started) / 1e9
    with capsys.disabled():
        print("\nshm copy, GB/s:", ", ".join(f"{name} {rate:.1f}" for name, rate in speed.items()))
