"""`cuda_ipc` over a GPU made of files: real sockets, descriptors and processes, the same lifetime of memory.

The CUDA driver's own calls are tried where there are GPUs: tests/gpu/test_cuda_ipc_on_gpu.py.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as replace_geometry

from eyas.common.errors import ConfigError, TransferFailed
from eyas.common.types import RankPages
from eyas.common.wire.pool import Export
from kv_transfer.backends.base import CopyJob, CopyResult
from kv_transfer.gpu import handover
from kv_transfer.gpu.driver import DriverError
from tests.unit.closed_after import closed_after
from tests.unit.fake_gpu import COUNT, END_S, GEOMETRY, PAGE, FakeDriver, FakePool, copied, job, opened

closing = closed_after(FakePool, FakePool.close)


def contents(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (COUNT + 1, PAGE), np.uint8)


def own(folder: str, pipe: Connection) -> None:
    """The owner's process: a pool with known contents, until it is told to leave."""
    pool = FakePool(folder)
    pool.fill(contents())
    pipe.send(pool.backend.export())
    pipe.recv()
    pool.giver.close()
    pipe.send("closed")
    pipe.recv()


@contextmanager
def owner(folder: Path) -> Iterator[tuple[SpawnProcess, Export, Connection]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=own, args=(str(folder), theirs))
    process.start()
    try:
        assert ours.poll(60)
        yield process, ours.recv(), ours
    finally:
        process.kill()
        process.join()


def until(condition: object) -> None:
    end = time.monotonic() + END_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.005)


def test_pages_come_from_another_process(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    pool, before = FakePool(str(tmp_path)), contents(2)
    pool.fill(before)
    src, dst = rng.permutation(COUNT)[:25], rng.permutation(COUNT)[:25]
    with owner(tmp_path) as (_, export, _):
        source = opened(pool, export)
        result = copied(pool, source, job(*zip(src.tolist(), dst.tolist(), strict=True)))
        assert (result.error, result.bytes, result.path) == (None, 25 * PAGE, "cuda_ipc")
        wanted = before.copy()
        wanted[dst] = contents()[src]
        assert (pool.pages() == wanted).all()
        assert pool.backend.close(time.monotonic() + END_S)
    assert pool.driver.mappings == 1  # its own pool


def test_a_proof_is_what_lies_in_our_own_pool(tmp_path: Path) -> None:
    pool, other = FakePool(str(tmp_path)), FakePool(str(tmp_path))
    other.fill(contents())
    source, proof = opened(pool, other.backend.export() or {}), replace(job((COUNT, 7)), proof=1)
    assert copied(pool, source, proof).ok
    assert pool.backend.checksum(proof) == zlib.crc32(contents()[COUNT].tobytes())
    pool.fill(contents(2))
    assert pool.backend.read_back(source, proof) == zlib.crc32(contents(2)[7].tobytes())


@pytest.mark.parametrize("heads", [GEOMETRY.kv_heads, GEOMETRY.kv_heads // 2])
def test_a_copy_that_does_not_arrive_proves_nothing(tmp_path: Path, heads: int) -> None:
    """Nor does one of some heads only, although the peer's page is read rightly."""

    class Lost(FakeDriver):
        def copy(self, blocks: object) -> None:
            pass

    folder, geometry = str(tmp_path), replace_geometry(GEOMETRY, kv_heads=heads)
    owner_, truth = FakePool(folder), zlib.crc32(contents()[COUNT].tobytes())
    owner_.fill(contents())
    for driver, same in ((FakeDriver, True), (Lost, False)):
        ranks = [driver() for _ in range(GEOMETRY.kv_heads // heads)]
        puller, proof = FakePool(folder, *ranks, geometry=geometry), replace(job((COUNT, 7)), proof=truth)
        assert copied(puller, opened(puller, owner_.backend.export() or {}), proof).ok
        assert (puller.backend.checksum(proof) == truth) == same


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (2, 2), (4, 2), (2, 8), (1, 1)])
def test_every_rank_gets_its_heads_from_those_that_have_them(tmp_path: Path, theirs: int, ours: int) -> None:
    """Against the whole pool as one array [page, row, head, byte]."""
    heads, rng = GEOMETRY.kv_heads, np.random.default_rng(theirs * 10 + ours)
    whole = rng.integers(0, 256, (COUNT + 1, GEOMETRY.page_rows, heads, 16), np.uint8)

    def pool(ranks: int) -> FakePool:
        geometry = replace_geometry(GEOMETRY, kv_heads=heads // ranks)
        return FakePool(str(tmp_path), *(FakeDriver() for _ in range(ranks)), geometry=geometry)

    owner_, puller = pool(theirs), pool(ours)
    for rank, part in enumerate(np.split(whole, theirs, axis=2)):
        owner_.fill(np.ascontiguousarray(part).reshape(COUNT + 1, -1), rank)
    src, dst = rng.permutation(COUNT)[:9], rng.permutation(COUNT)[:9]
    moved = 0
    for rank in range(theirs):
        source, page = opened(puller, owner_.backend.export(rank) or {}), int(dst[0])
        proof = CopyJob(1, -1 - rank, RankPages(rank, (COUNT,)), (page,), proof=1)
        assert copied(puller, source, proof).ok
        truth = zlib.crc32(owner_.pages(rank)[COUNT].tobytes())
        assert puller.backend.checksum(proof) == truth
        pages = RankPages(rank, tuple(src.tolist()))
        result = copied(puller, source, CopyJob(1, rank, pages, tuple(dst.tolist())))
        assert result.ok
        moved += result.bytes
    assert moved == 9 * GEOMETRY.page_bytes
    for rank, part in enumerate(np.split(whole, ours, axis=2)):
        assert (puller.pages(rank)[dst] == part[src].reshape(9, -1)).all()
        untouched = np.setdiff1d(np.arange(COUNT), dst)
        assert (puller.pages(rank)[untouched] == 0).all()
    assert puller.backend.close(time.monotonic() + END_S)
    assert all(driver.mappings == 1 for driver in puller.drivers)


def test_a_killed_owner_s_memory_is_let_go_at_once(tmp_path: Path) -> None:
    pool = FakePool(str(tmp_path))
    with owner(tmp_path) as (process, export, _):
        source = opened(pool, export)
        assert copied(pool, source, job((3, 4))).ok
        assert pool.driver.mappings == 2 and source.current
        process.kill()
        until(lambda: pool.driver.mappings == 1)
        assert not source.current
        error = copied(pool, source, job((3, 4))).error
        assert isinstance(error, TransferFailed) and "is gone" in error.message
        assert pool.backend.close(time.monotonic() + END_S)


def test_an_owner_that_leaves_is_let_go_too(tmp_path: Path) -> None:
    pool = FakePool(str(tmp_path))
    with owner(tmp_path) as (_, export, pipe):
        source = opened(pool, export)
        assert copied(pool, source, job((3, 4))).ok
        pipe.send("leave")
        assert pipe.recv() == "closed"
        until(lambda: pool.driver.mappings == 1)
        assert not Path(export["path"].decode()).exists()
        with pytest.raises(ConfigError):
            pool.backend.open(export)


def test_a_copy_that_runs_when_the_owner_dies_ends_well(tmp_path: Path) -> None:
    class Slow(FakeDriver):
        def copy(self, blocks: object) -> None:
            time.sleep(0.3)
            super().copy(blocks)  # type: ignore[arg-type]

    pool = FakePool(str(tmp_path), Slow())
    with owner(tmp_path) as (process, export, _):
        source = opened(pool, export)
        assert copied(pool, source, job((0, 0))).ok
        pool.backend.start(source, job((5, 6)))
        time.sleep(0.1)
        process.kill()
        results: list[CopyResult] = []
        until(lambda: results.extend(pool.backend.poll()) or results)
        assert results[0].ok and (pool.pages()[6] == contents()[5]).all()
        until(lambda: pool.driver.mappings == 1)


def test_a_stopped_owner_costs_time_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "TAKE_S", 0.2)
    pool = FakePool(str(tmp_path))
    with owner(tmp_path) as (process, export, _):
        os.kill(process.pid or 0, signal.SIGSTOP)
        until(lambda: "T (stopped)" in Path(f"/proc/{process.pid}/status").read_text())
        error = copied(pool, opened(pool, export), job((3, 4))).error
        assert isinstance(error, TransferFailed) and "gives no memory" in error.message
        monkeypatch.undo()
        os.kill(process.pid or 0, signal.SIGCONT)
        assert copied(pool, opened(pool, export), job((3, 4))).ok


def test_descriptors_and_threads_do_not_add_up(tmp_path: Path) -> None:
    pool = FakePool(str(tmp_path))
    with owner(tmp_path) as (process, export, _):
        counts = []
        for _ in range(4):
            source = opened(pool, export)
            assert copied(pool, source, job((3, 4))).ok
            for view in source.views:
                view.peer.close()
            counts.append(len(os.listdir("/proc/self/fd")))
        assert counts[0] == counts[-1]
        theirs = len(os.listdir(f"/proc/{process.pid}/fd"))
        opened(pool, export)
        for _ in range(3):
            handover.take(export["path"].decode()).giver.close()
        assert len(os.listdir(f"/proc/{process.pid}/fd")) <= theirs + 1  # the last one is not yet missed


def test_a_pool_is_mapped_once_however_often_it_is_opened(tmp_path: Path) -> None:
    """Every pull that finds no proven way opens it: each mapping would cost a thread, a descriptor and
    addresses until the owner's end.
    """
    pool, other = FakePool(str(tmp_path)), FakePool(str(tmp_path))
    export = other.backend.export() or {}
    before = threading.active_count()
    for _ in range(5):
        assert copied(pool, opened(pool, export), job((3, 4))).ok
    assert pool.driver.mappings == 2 and threading.active_count() == before + 1
    other.giver.close()
    until(lambda: pool.driver.mappings == 1)
    again = FakePool(str(tmp_path))
    assert copied(pool, opened(pool, again.backend.export() or {}), job((3, 4))).ok


def test_a_proof_is_of_every_rank_that_takes_part_of_a_page(tmp_path: Path) -> None:
    class Blind(FakeDriver):
        def read(self, address: int, size: int) -> bytes:
            return bytes(size)

    folder, half = str(tmp_path), replace_geometry(GEOMETRY, kv_heads=GEOMETRY.kv_heads // 2)
    owner_, truth = FakePool(folder), zlib.crc32(contents()[COUNT].tobytes())
    owner_.fill(contents())
    proof = CopyJob(1, -1, RankPages(0, (COUNT,)), (7,), proof=truth)
    for second, same in ((FakeDriver, True), (Blind, False)):
        puller = FakePool(folder, FakeDriver(), second(), geometry=half)
        source = opened(puller, owner_.backend.export() or {})
        assert copied(puller, source, proof).ok
        assert (puller.backend.checksum(proof) == truth) == same


def test_an_owner_that_cannot_export_says_so_at_once(tmp_path: Path) -> None:
    tries = iter((DriverError("out of handles"), OSError("no descriptor")))

    def export() -> int:
        raise next(tries)

    giver = handover.DescriptorGiver(tmp_path / "giver", 8, export)
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(TransferFailed, match="closed the connection"):
            handover.take(str(tmp_path / "giver"))
        assert time.monotonic() - began < handover.TAKE_S / 2
    giver.close()


def test_an_owner_without_descriptors_gives_its_memory_later(tmp_path: Path) -> None:
    class Full(socket.socket):
        full = True

        def accept(self) -> tuple[socket.socket, object]:
            found = super().accept()
            if Full.full:
                Full.full = False
                found[0].close()
                raise OSError(errno.EMFILE, "Too many open files")
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handover.socket, "socket", Full)
        pool = FakePool(str(tmp_path))
    path = (pool.backend.export() or {})["path"].decode()
    with pytest.raises(TransferFailed):
        handover.take(path)
    taken = handover.take(path)
    os.close(taken.descriptor)
    taken.giver.close()
    pool.giver.close()


def test_only_our_own_user_is_given_memory(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    tmp_path.chmod(0o755)
    pool = FakePool(str(tmp_path))
    export = pool.backend.export()
    assert export is not None
    path = export["path"].decode()
    assert os.stat(path).st_mode & 0o777 == 0o600
    os.chmod(path, 0o666)  # even if somebody opened it
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peer.connect(path)
            os._exit(0 if peer.recv(8) == b"" else 1)
        except PermissionError:
            os._exit(0)  # a folder above keeps others out
    assert os.waitpid(child, 0)[1] == 0
    pool.giver.close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heads": b"x"}, "which is no number"),
        ({"rank": b"9"}, "needs nothing"),
        ({"gpu": b"gpu-z"}, "does not see"),
        ({"path": b"/etc/passwd"}, "is not a file in"),
        ({"identity": b"another"}, "is not a file in"),
        ({"path": b""}, "is not a file in"),
        ({"path": b"a\0b"}, "is not a file in"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, change: Export, says: str) -> None:
    pool = FakePool(str(tmp_path))
    export = FakePool(str(tmp_path)).backend.export()
    assert export is not None
    assert pool.backend.open(export) is not None
    with pytest.raises(ConfigError, match=says):
        pool.backend.open({**export, **change})


def test_a_handle_cannot_name_pages_beyond_the_pool(tmp_path: Path) -> None:
    pool, other = FakePool(str(tmp_path)), FakePool(str(tmp_path))
    source = opened(pool, other.backend.export() or {})
    error = copied(pool, source, job((COUNT + 1, 0))).error
    assert isinstance(error, TransferFailed) and "does not have" in error.message
    assert pool.backend.close(time.monotonic() + END_S) and other.backend.close(time.monotonic() + END_S)


def test_what_the_driver_refuses_is_told(tmp_path: Path) -> None:
    class Broken(FakeDriver):
        def map(self, descriptor: int, size: int) -> object:  # type: ignore[override]
            if self.mappings:
                raise DriverError("cuMemImportFromShareableHandle: out of memory (CUDA error 2)")
            return super().map(descriptor, size)

    pool, other = FakePool(str(tmp_path), Broken()), FakePool(str(tmp_path))
    error = copied(pool, opened(pool, other.backend.export() or {}), job((0, 0))).error
    assert isinstance(error, TransferFailed) and "out of memory" in error.message
