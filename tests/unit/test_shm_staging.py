"""`shm` out of the staging of a GPU's pool: by our GPU straight into its pool, else through slots of ours."""

from __future__ import annotations

import mmap
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from eyas.common.errors import TransferFailed
from eyas.common.types import RankPages
from kv_transfer import windows
from kv_transfer.area import PoolArea
from kv_transfer.backends import shm
from kv_transfer.backends.base import BackendSite, CopyJob
from kv_transfer.backends.shm import ShmBackend, piece_pages
from kv_transfer.copier import PageCopier
from kv_transfer.gpu.driver import CopyBlock, DriverError
from kv_transfer.layout import WINDOW_BYTES
from kv_transfer.peers import PeerRoute
from tests.unit.fake_gpu import FakeDriver
from tests.unit.shm_ends import COUNT, FOLDER, PAGE, SLOTS, WINDOW, Owner, Puller, owner

__all__ = ["owner"]  # a fixture


@pytest.fixture(autouse=True)
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "AT_ONCE", 3)


def test_windows_go_from_the_owners_slots_into_our_pool(owner: Owner) -> None:
    puller, order = Puller(owner), np.random.default_rng(1).permutation(COUNT)
    source = puller.open()
    assert source.is_staging and source.direct
    result = puller.copy(source, tuple(order[:30].tolist()), tuple(order[10:40].tolist()))
    assert (result.error, result.bytes, result.path) == (None, 30 * PAGE, "shm")
    np.testing.assert_array_equal(puller.pages()[order[10:40]], owner.pool[order[:30]])
    assert owner.most == 3 and len(owner.free) == SLOTS
    assert list(puller.driver.registered.values()) == [SLOTS * PAGE]
    assert puller.backend.close(time.monotonic() + 5.0) and puller.driver.registered == {}


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_proof_is_judged_in_our_pool(owner: Owner, wrong: int) -> None:
    puller, truth = Puller(owner), zlib.crc32(owner.pool[COUNT].tobytes())
    assert puller.copy(puller.open(), (COUNT,), (7,), truth ^ wrong).ok == (not wrong)
    np.testing.assert_array_equal(puller.pages()[7], owner.pool[COUNT])


def test_a_proof_that_cannot_be_read_back_proves_nothing(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(driver: FakeDriver, address: int, size: int) -> bytes:
        raise DriverError("an illegal address")

    puller = Puller(owner)
    monkeypatch.setattr(FakeDriver, "read", refuse)
    result = puller.copy(puller.open(), (COUNT,), (7,), 1)
    assert isinstance(result.error, TransferFailed) and "illegal address" in result.error.message


def test_a_file_is_locked_once_and_let_go_when_its_owner_is_replaced(owner: Owner) -> None:
    puller = Puller(owner)
    for _ in range(2):
        assert puller.copy(puller.open(), (1,), (2,)).ok
    assert len(puller.driver.registered) == 1
    (first,) = puller.driver.registered
    Path(owner.area.path).unlink()
    gone = puller.open
    with pytest.raises(Exception, match="is not a file in"):
        gone()
    again = Owner(owner.pool)
    puller.owner = again
    puller.backend._staged._wire = again  # type: ignore[assignment]
    assert puller.copy(puller.open(), (3,), (4,)).ok
    assert len(puller.driver.registered) == 1 and first not in puller.driver.registered
    Path(again.area.path).unlink()


def test_only_what_is_read_is_locked_piece_by_piece(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver launches nothing while it locks, so it gets a window at a time; no copy spans two."""
    monkeypatch.setattr(shm, "piece_pages", lambda page_bytes: 2)
    puller, blocks = Puller(owner), []
    copy = puller.driver.copy

    def watched(some: list[CopyBlock]) -> None:
        blocks.extend(some)
        copy(some)

    puller.driver.copy = watched  # type: ignore[method-assign]
    owner.free = [0, 9, 8, 5, 4, 3]  # taken from the end
    result = puller.copy(puller.open(), (10, 11, 12), (5, 6, 7))
    np.testing.assert_array_equal(puller.pages()[5:8], owner.pool[10:13])
    assert result.ok and sorted(block.width // PAGE for block in blocks) == [1, 2]
    assert list(puller.driver.registered.values()) == [2 * PAGE] * 2, "slots 3 to 5 are of two pieces"
    assert puller.backend.close(time.monotonic() + 5.0) and puller.driver.registered == {}


@pytest.mark.parametrize("page", [2 << 20, 33792, 4608, 512, 80 << 20])
def test_pieces_end_where_the_machines_pages_do(page: int) -> None:
    pieces = piece_pages(page)
    assert pieces * page % mmap.PAGESIZE == 0
    assert WINDOW_BYTES - page < pieces * page < WINDOW_BYTES + mmap.PAGESIZE * page or pieces == 1


@pytest.mark.parametrize("ended", [True, False])
def test_a_file_that_a_copy_reads_stays_locked_though_its_owner_is_gone(owner: Owner, ended: bool) -> None:
    puller, go, here = Puller(owner), threading.Event(), threading.Event()
    copy, first = puller.driver.copy, puller.open()

    def slow(some: list[CopyBlock]) -> None:
        here.set()
        assert go.wait(10.0)
        copy(some)

    puller.driver.copy = slow  # type: ignore[method-assign]
    reads = puller.backend._pool
    assert reads is not None and isinstance(first, shm.MappedArea)
    thread = threading.Thread(target=reads.copy, args=(first, CopyJob(1, 0, RankPages(0, (1,)), (2,))))
    thread.start()
    assert here.wait(10.0)
    (locked,) = puller.driver.registered
    if ended:
        go.set()
        thread.join()
    Path(owner.area.path).unlink()
    again = Owner(owner.pool)
    with reads._locked(shm.map_file(again.area.path, PAGE, writable=True), (0,)):
        assert (locked in puller.driver.registered) != ended
    go.set()
    thread.join()
    Path(again.area.path).unlink()


def test_a_driver_that_locks_nothing_refuses_the_way(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(driver: FakeDriver, address: int, size: int) -> int:
        raise DriverError("out of memory")

    monkeypatch.setattr(FakeDriver, "register", refuse)
    result = Puller(owner).copy(Puller(owner).open(), (1,), (2,))
    assert isinstance(result.error, TransferFailed) and "out of memory" in result.error.message
    assert len(owner.free) == SLOTS


def test_a_pool_that_no_driver_copies_into_takes_slots(owner: Owner) -> None:
    """As a CPU's, or plain memory: the bytes come into the site's area."""
    area = PoolArea(np.zeros((COUNT, PAGE), np.uint8))
    backend = ShmBackend(BackendSite(area, FOLDER, owner))  # type: ignore[arg-type]
    source = backend.open(owner.backend.export() or {})
    assert source.is_staging and not source.direct
    copier = PageCopier({"shm": backend}, WINDOW)
    copier.submit(PeerRoute(backend, source), CopyJob(1, 0, RankPages(0, tuple(range(9))), tuple(range(9))))
    deadline = time.monotonic() + 10.0
    while not (results := copier.finished()):
        assert time.monotonic() < deadline
    assert results[0].ok and (area.pages[:9] == owner.pool[:9]).all()
