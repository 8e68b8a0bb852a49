"""The laws of backends: the same for every one of them, the documented example among them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from eyas.common.errors import Cancelled, ConfigError, TransferFailed
from eyas.common.types import RankPages
from eyas.common.wire.pool import PoolGeometry
from kv_transfer.area import DeviceArea, PoolArea
from kv_transfer.backends import nixl_agent
from kv_transfer.backends.base import BackendSite, CopyJob
from kv_transfer.backends.shm import ShmBackend
from kv_transfer.backends.stream import StreamBackend
from kv_transfer.backends.table import BACKENDS
from kv_transfer.copier import PageCopier
from kv_transfer.peers import PeerRoute
from tests.unit.backend_ends import MAKERS, PAGE, PAGES, POOL_DIR, Ends, ThreadWire, job, wait_for


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "PROBE_BYTES", 64 * PAGE)
    monkeypatch.setattr(nixl_agent, "JUDGED_BYTES", 64 * PAGE)


@pytest.fixture(params=MAKERS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(request.param)
    yield made
    made.close()


# --- bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "src, dst",
    [
        ((31,), (0,)),
        ((3, 4, 5, 6), (10, 11, 12, 13)),
        ((3, 4, 5, 9, 10, 2), (7, 8, 20, 21, 22, 23)),
        ((5, 4, 3), (1, 2, 3)),
        ((0, 2, 4, 5), (31, 30, 29, 28)),
        ((PAGES,), (6,)),
    ],
)
def test_exactly_the_named_pages_are_written(ends: Ends, src: tuple[int, ...], dst: tuple[int, ...]) -> None:
    (result,) = ends.copy(job(src, dst))
    expected = np.zeros_like(ends.mine.pages)
    expected[list(dst)] = ends.owner.pages[list(src)]
    np.testing.assert_array_equal(ends.mine.pages, expected)
    assert (result.error, result.path, result.bytes) == (None, ends.backend.name, len(src) * PAGE)


@pytest.mark.parametrize("page", [-1, PAGES + 1, 10**6])
def test_pages_outside_the_peers_area_are_refused(ends: Ends, page: int) -> None:
    (result,) = ends.copy(job((page,), (1,)))
    assert isinstance(result.error, TransferFailed)
    assert not ends.mine.pages[[0, *range(2, PAGES)]].any()


def test_many_jobs_at_once_are_each_reported_once(ends: Ends) -> None:
    jobs = [job((i,), (PAGES - 1 - i,), number=i) for i in range(PAGES)]
    results = ends.copy(*jobs)
    assert {result.job.number for result in results} == set(range(PAGES))
    np.testing.assert_array_equal(ends.mine.pages[:PAGES], ends.owner.pages[:PAGES][::-1])


# --- ends -------------------------------------------------------------------------------------------


def test_cancelled_means_stopped(ends: Ends) -> None:
    """Whatever was told of a cancelled copy, it writes no more; and every one is told."""
    ends.wire.pause_s = 0.002
    source, jobs = ends.open(), [job(tuple(range(PAGES)), tuple(range(PAGES)), number=i) for i in range(16)]
    for each in jobs:
        ends.backend.start(source, each)
    for each in jobs:
        ends.backend.cancel(each)
    results = wait_for(ends.backend.poll, len(jobs))
    ends.mine.pages[:] = 7
    time.sleep(0.05)
    assert (ends.mine.pages == 7).all()
    assert any(isinstance(result.error, Cancelled) for result in results), "nothing was cancelled"
    assert all(result.ok or isinstance(result.error, Cancelled) for result in results)


def test_a_cancelled_job_that_is_over_is_nothing(ends: Ends) -> None:
    source, done = ends.open(), job((1,), (1,))
    ends.backend.start(source, done)
    wait_for(ends.backend.poll, 1)
    if ends.name != "grpc":  # (its wire is asked for jobs that run only)
        ends.backend.cancel(done)
    ends.backend.start(source, job((2,), (2,), number=1))
    assert wait_for(ends.backend.poll, 1)[0].ok


def test_a_dead_peer_ends_a_copy_or_is_not_opened(ends: Ends) -> None:
    source = ends.open()
    ends.owners.close(time.monotonic() + 5.0)
    Path(ends.owner.path).unlink()
    if ends.name in ("cuda_ipc", "shm", "tcp", "grpc"):
        ends.backend.start(source, job((1,), (1,)))
        assert isinstance(wait_for(ends.backend.poll, 1)[0].error, TransferFailed)
    if ends.name != "grpc":  # nothing but the wire finds that out
        with pytest.raises(ConfigError, match="is not"):
            ends.backend.open(ends.owners.export() if ends.name == "shm" else {"path": b"", "key": b""})


def test_closing_reports_what_waited(ends: Ends) -> None:
    source = ends.open()
    for i in range(8):
        ends.backend.start(source, job(tuple(range(PAGES)), tuple(range(PAGES)), number=i))
    assert ends.backend.close(time.monotonic() + 10.0)
    assert all(r.ok or isinstance(r.error, Cancelled) for r in wait_for(ends.backend.poll, 8))


# --- proofs, and several at once --------------------------------------------------------------------


def test_a_proof_is_the_bytes_of_the_proof_page(ends: Ends) -> None:
    copier, truth = PageCopier({ends.name: ends.backend}, window=4), ends.owner.checksum(PAGES)
    for number, proof in enumerate((truth, truth ^ 1)):
        copier.submit(PeerRoute(ends.backend, ends.open()), job((PAGES,), (3,), number, proof))
    good, bad = sorted(wait_for(copier.finished, 2), key=lambda result: result.job.number)
    assert good.ok
    assert isinstance(bad.error, TransferFailed)
    assert bad.error.message == f"{ends.backend.name} brought other bytes than the owner has"


def test_the_checksum_is_that_of_the_page_which_came(ends: Ends) -> None:
    source, proof = ends.open(), job((7,), (3,), proof=1)
    ends.backend.start(source, proof)
    assert wait_for(ends.backend.poll, 1)[0].ok
    other = job((8,), (4,), number=1, proof=1)
    ends.backend.start(source, other)
    assert wait_for(ends.backend.poll, 1)[0].ok
    assert [ends.backend.checksum(one) for one in (proof, other)] == [ends.owner.checksum(n) for n in (7, 8)]


@pytest.mark.parametrize(
    "name", [name for name in MAKERS if name not in ("cuda_ipc", "shm", "rdma", "nixl", "tcp")]
)
def test_staging_beside_a_device_is_told_to_nobody(name: str) -> None:
    """Its slots are no pages of the pool: only what asks the owner first leads to those."""
    ends = Ends(name)
    geometry = PoolGeometry(pages=PAGES, page_size=8, layers=1, kv_heads=2, head_dim=16, dtype="float32")
    assert geometry.page_bytes == PAGE
    site = BackendSite(ends.owner, POOL_DIR, ends.wire, (DeviceArea(address=1, geometry=geometry),))
    beside = MAKERS[name](site)
    assert beside.export() == ({} if name == "grpc" else None)
    assert beside.close(time.monotonic() + 5.0)
    ends.close()


def test_two_backends_in_use_at_once() -> None:
    """One engine pulls from a neighbour by shm and from afar by grpc, into one area."""
    with contextlib.ExitStack() as stack:
        near, far = Ends("shm"), Ends("grpc")
        for made in (near, far):
            stack.callback(made.close)
        near.mine.pages[:] = 0
        wire = ThreadWire(near.mine, {2: far.owner})
        stack.callback(wire.pool.shutdown)
        afar = StreamBackend(BackendSite(near.mine, POOL_DIR, wire))
        copier = PageCopier({"shm": near.backend, "grpc": afar}, window=4)
        ways = {1: PeerRoute(near.backend, near.open()), 2: PeerRoute(afar, afar.open({}))}
        for page in range(PAGES):
            pull = 1 + page % 2
            copier.submit(ways[pull], CopyJob(pull, page, RankPages(0, (page,)), (page,)))
        copier.cancel(3)
        results = wait_for(copier.finished, PAGES)
        assert all(r.ok and r.path == ("shm", "grpc")[r.job.pull - 1] for r in results)
        for page in range(PAGES):
            truth = (near, far)[page % 2].owner.pages[page]
            np.testing.assert_array_equal(near.mine.pages[page], truth)


def test_a_cancelled_pull_ends_its_own_copies_only() -> None:
    with contextlib.ExitStack() as stack:
        ends = Ends("grpc")
        stack.callback(ends.close)
        ends.wire.peers[2], ends.wire.pause_s = ends.owner, 0.05
        copier = PageCopier({"grpc": ends.backend}, window=4)
        route = PeerRoute(ends.backend, ends.open())
        for pull in (1, 2):
            copier.submit(route, dataclasses.replace(job((1, 2, 3), (4, 5, 6)), pull=pull))
        copier.cancel(1)
        results = {result.job.pull: result for result in wait_for(copier.finished, 2)}
        assert isinstance(results[1].error, Cancelled) and results[2].ok


def test_the_table_and_the_names_agree() -> None:
    assert list(BACKENDS) == ["cuda_ipc", "shm", "rdma", "rdma_slots", "nixl", "tcp", "grpc"]
    for name in MAKERS:
        ends = Ends(name)
        assert ends.backend.name == name
        ends.close()


def test_an_area_without_a_proof_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds no pages of 10 and a proof"):
        PoolArea.new(memoryview(bytearray(25)), 10)


def test_shm_needs_the_very_file(tmp_path: Path) -> None:
    """Another host's file of this name is another file; and so is one that came after."""
    ends = Ends("shm")
    export = ends.owners.export()
    assert export is not None and isinstance(ends.backend, ShmBackend)
    Path(ends.owner.path).rename(ends.owner.path + "x")
    Path(ends.owner.path).write_bytes(bytes((PAGES + 1) * PAGE))
    with pytest.raises(ConfigError, match="is not a file in"):
        ends.backend.open(export)
    Path(ends.owner.path + "x").unlink()
    ends.close()
