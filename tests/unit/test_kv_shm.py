"""Files of shared memory: what is mapped and what is not, and how fast bytes come from there."""

from __future__ import annotations

import hashlib
import os
import select
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from eyas.common.errors import ConfigError, TransferFailed
from eyas.common.types import RankPages
from eyas.common.wire.pool import Export
from kv_transfer.area import Pages, PoolArea
from kv_transfer.backends.base import BackendSite, CopyJob, CopyResult
from kv_transfer.backends.shm import MappedArea, ShmBackend
from kv_transfer.copier import PageCopier
from kv_transfer.copy_threads import CopyBell, CopyThreads
from kv_transfer.host_files import HostFile, file_identity
from kv_transfer.peers import PeerRoute
from tests.unit.closed_after import closed_after

PAGES, PAGE = 32, 2048
POOL_DIR = "/dev/shm"

closing = closed_after(ShmBackend, lambda backend: backend.close(time.monotonic() + 5.0))

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


def puller(pages: int = PAGES, page_bytes: int = PAGE) -> tuple[ShmBackend, Pages]:
    area = PoolArea(np.zeros((pages + 1, page_bytes), np.uint8))
    return ShmBackend(BackendSite(area, POOL_DIR, wire=None)), area.pages  # type: ignore[arg-type]


def export(path: str) -> Export:
    return HostFile.at(path).export()


def random_pages(seed: int, pages: int = PAGES) -> Pages:
    return np.random.default_rng(seed).integers(0, 256, (pages, PAGE), np.uint8)


def job(src: tuple[int, ...], dst: tuple[int, ...], number: int = 0) -> CopyJob:
    return CopyJob(1, number, RankPages(0, src), dst)


@pytest.fixture
def pool_file() -> Iterator[str]:
    path = f"{POOL_DIR}/eyas-test-{uuid.uuid4().hex}"
    yield path
    Path(path).unlink(missing_ok=True)


def test_two_processes_share_pages_and_a_dead_peer_is_noticed(pool_file: str) -> None:
    size = PAGES * PAGE
    command = [sys.executable, "-c", OWNER_PROCESS, pool_file, str(size), "5"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdin and peer.stdout
        assert peer.stdout.readline() == "filled\n"
        backend, destination = puller()
        source = backend.open(export(pool_file))
        assert backend.copy(source, job(tuple(range(31, -1, -1)), tuple(range(32)))) == size
        truth = np.random.default_rng(5).integers(0, 256, size, np.uint8).reshape(-1, PAGE)[::-1]
        ours = hashlib.sha256(destination[:PAGES].tobytes()).digest()
        assert ours == hashlib.sha256(truth.tobytes()).digest()
        assert source.current
        peer.communicate("end\n", timeout=10)
    assert not source.current
    with pytest.raises(TransferFailed, match="is gone"):
        backend.copy(source, job((0,), (0,)))


def test_a_restarted_peer_is_another_source(pool_file: str) -> None:
    backend, destination = puller()
    for seed, pages in [(1, 32), (2, 40)]:
        Path(pool_file).unlink(missing_ok=True)
        Path(pool_file).write_bytes(random_pages(seed, pages).tobytes())
        backend.copy(backend.open(export(pool_file)), job((pages - 1,), (0,)))
        np.testing.assert_array_equal(destination[0], random_pages(seed, pages)[-1])


def test_a_source_that_nobody_keeps_is_unmapped(pool_file: str) -> None:
    backend, _ = puller()
    Path(pool_file).write_bytes(random_pages(1).tobytes())
    source = backend.open(export(pool_file))
    backend.start(source, job((0,), (0,)))
    while not backend.poll():
        time.sleep(0.001)
    assert pool_file in Path("/proc/self/maps").read_text()
    del source
    deadline = time.monotonic() + 5.0
    while pool_file in Path("/proc/self/maps").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("size", [0, PAGE - 1, PAGE + 1])
def test_a_file_that_is_no_pool_of_such_pages_is_refused(pool_file: str, size: int) -> None:
    Path(pool_file).write_bytes(bytes(size))
    with pytest.raises(ConfigError, match=f"not a pool of pages of {PAGE} bytes"):
        puller()[0].open(export(pool_file))


def test_a_peer_cannot_name_other_files(pool_file: str, tmp_path: Path) -> None:
    outside = tmp_path / "secret"
    outside.write_bytes(bytes(PAGE))
    os.symlink(outside, pool_file)
    for path in (str(outside), f"{POOL_DIR}/../..{outside}", pool_file, "", "/dev/shm/no\0name"):
        with pytest.raises(ConfigError, match="is not a file in|cannot be opened"):
            puller()[0].open(export(path))
    for wrong in ({}, {"path": pool_file.encode()}, {"identity": b"x"}, {"path": b"\xff", "identity": b""}):
        with pytest.raises(ConfigError, match="is not a file in"):
            puller()[0].open(wrong)


def test_identities_are_of_one_file(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for path in (here, there):
        path.write_bytes(b"1")
    same = file_identity(str(here))
    assert same and same == file_identity(str(here)) != file_identity(str(there))
    assert file_identity(str(tmp_path / "gone")) == file_identity(str(tmp_path / "no\0name")) == ""


def test_a_peers_pool_is_mapped_read_only(pool_file: str) -> None:
    Path(pool_file).write_bytes(bytes(PAGE))
    source = puller()[0].open(export(pool_file))
    assert isinstance(source, MappedArea) and not source.pages.flags.writeable


# --- the copy thread ----------------------------------------------------------------------------------


def test_a_defect_fails_its_job_and_not_the_thread() -> None:
    thread: CopyThreads[int] = CopyThreads("test")
    thread.submit(1, lambda: 1 // 0)
    thread.submit(2, lambda: 5)
    done = []
    while len(done) < 2:
        done += thread.finished()
    bad, good = done
    assert bad.error is not None and bad.error.code == "transfer_failed"
    assert "ZeroDivisionError" in bad.error.message
    assert (good.job, good.bytes, good.error) == (2, 5, None)
    assert thread.close(time.monotonic() + 5.0)


def test_a_job_is_cancelled_while_it_waits_and_never_before_or_after() -> None:
    thread: CopyThreads[int] = CopyThreads("test")
    go, done = threading.Event(), []
    thread.cancel(1)
    thread.submit(0, lambda: go.wait(10) or 0)
    thread.submit(1, lambda: 5)
    thread.submit(2, lambda: 5)
    thread.cancel(2)
    go.set()
    while len(done) < 3:
        done += thread.finished()
    assert [one.error.code if one.error else "ok" for one in done] == ["ok", "ok", "cancelled"]
    thread.cancel(1)
    thread.submit(1, lambda: 6)
    while not (again := thread.finished()):
        pass
    assert again[0].bytes == 6, "what was over was cancelled"
    assert thread.close(time.monotonic() + 5.0)


def test_closing_says_whether_it_stopped() -> None:
    thread: CopyThreads[int] = CopyThreads("test")
    for number in range(3):
        thread.submit(number, lambda: time.sleep(0.2) or 0)
    time.sleep(0.05)
    assert not thread.close(time.monotonic()), "the first job still runs"
    thread._threads[0].join(5.0)
    assert [d.error.code if d.error else "ok" for d in thread.finished()] == ["ok", "cancelled", "cancelled"]


def test_a_bell_rings_when_a_copy_has_stopped() -> None:
    bell = CopyBell()
    thread: CopyThreads[int] = CopyThreads("test", bell.ring)
    assert select.select([bell.descriptor], [], [], 0.0)[0] == [], "nothing has stopped"
    thread.submit(1, lambda: 5)
    assert select.select([bell.descriptor], [], [], 10.0)[0] == [bell.descriptor]
    assert [one.job for one in thread.finished()] == [1], "it rang before its result was there"
    bell.quiet()
    bell.quiet()
    assert select.select([bell.descriptor], [], [], 0.0)[0] == []
    assert thread.close(time.monotonic() + 5.0)


@pytest.mark.parametrize("count", [1, 2])
def test_two_threads_begin_a_job_while_another_ends(count: int) -> None:
    threads: CopyThreads[int] = CopyThreads("test", count=count)
    ended = threading.Event()
    threads.submit(0, lambda: ended.wait(0.2) or 0)
    threads.submit(1, lambda: ended.set() or 1)  # type: ignore[func-returns-value]
    threads.submit(2, lambda: 1 // 0)
    done = []
    while len(done) < 3:
        done += threads.finished()
    assert {one.job: one.bytes for one in done} == {0: int(count == 2), 1: 1, 2: 0}
    assert threads.close(time.monotonic() + 5.0)


def big(pool_file: str) -> tuple[PageCopier, Pages, PeerRoute]:
    """Zeros in a pool file of 1024 pages of 64 KiB, and a copier into a warm destination of its size."""
    Path(pool_file).write_bytes(bytes(1024 * 65536))
    backend, pages = puller(1024, 65536)
    pages[:] = 1
    return PageCopier({"shm": backend}, window=4), pages, PeerRoute(backend, backend.open(export(pool_file)))


def wait(copier: PageCopier) -> CopyResult:
    while not (results := copier.finished()):
        time.sleep(0.0002)
    (result,) = results
    return result


def test_the_loop_runs_on_while_bytes_move(pool_file: str) -> None:
    copier, destination, route = big(pool_file)
    everything = tuple(range(1024))
    copier.submit(route, job(everything * 8, everything * 8))
    turns, results = 0, []
    while not results:
        time.sleep(0.0002)
        results = copier.finished()
        turns += 1
    assert results[0].ok and not destination[:-1].any()
    assert turns > 10, "a copy that held the GIL would give the loop a handful of turns"
    assert copier.close(time.monotonic() + 10.0)


def test_the_speed_of_shm_beside_memcpy(pool_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures are printed, not judged: they depend on the machine's other work."""
    copier, destination, route = big(pool_file)
    everything = tuple(range(1024))
    scattered = tuple(np.random.default_rng(0).permutation(1024).tolist())
    speed = {}
    for name, pages in [("first touch", everything), ("one run", everything), ("scattered", scattered)]:
        copier.submit(route, job(pages, everything))
        result = wait(copier)
        assert result.bytes == 1024 * 65536
        speed[name] = result.bytes / result.seconds / 1e9
    source = np.full(destination.nbytes, 2, np.uint8)
    started = time.monotonic()
    destination.reshape(-1)[:] = source
    speed["memcpy"] = destination.nbytes / (time.monotonic() - started) / 1e9
    with capsys.disabled():
        print("\nshm copy, GB/s:", ", ".join(f"{name} {rate:.1f}" for name, rate in speed.items()))
    assert copier.close(time.monotonic() + 10.0)
