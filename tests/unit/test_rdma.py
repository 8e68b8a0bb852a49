"""`rdma`: what it offers, what it refuses by name, and that no answer depends on how fast a card is."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from fake_nixl import FakeNixl, nixlBackendError
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.common.errors import ConfigError, TransferFailed
from eyas.common.types import RankPages
from eyas.common.wire.pool import Export
from kv_transfer import nics
from kv_transfer.area import DeviceArea, PoolArea
from kv_transfer.backends import nixl_agent, nixl_reads, rdma
from kv_transfer.backends.base import BackendSite, CopyJob, CopyResult, runs
from kv_transfer.backends.nixl_agent import NixlAgent, NixlPeer, OwnPages, RemotePages
from kv_transfer.backends.nixl_reads import NixlReads
from kv_transfer.backends.rdma import RdmaBackend, least_rate
from kv_transfer.gpu.driver import DeviceAllocation, DriverError
from kv_transfer.nics import RdmaCard
from tests.unit.fake_gpu import GEOMETRY, FakeDriver

COUNT, PAGE = GEOMETRY.pages, GEOMETRY.page_bytes
CARD = RdmaCard("mlx5_3", 50e9)
NOWHERE = PoolArea(np.empty((1, PAGE), np.uint8))


class Gpu:
    """A pool on a fake GPU, and the backend over it."""

    def __init__(self, nixl: FakeNixl, *cards: RdmaCard, capable: bool = True, ordinal: int = 0) -> None:
        self.driver = FakeDriver()
        self.driver.capable, self.driver.ordinal = capable, ordinal
        self.memory = DeviceAllocation.new(self.driver, GEOMETRY.pool_bytes + PAGE)
        self.area = DeviceArea(self.memory.memory.address, GEOMETRY, self.memory)
        site = BackendSite(NOWHERE, "", None, (self.area,), cards=cards or None)  # type: ignore[arg-type]
        self.backend = RdmaBackend(site, lambda: nixl)

    @property
    def pages(self) -> np.ndarray:
        data = self.driver.read(self.area.address, GEOMETRY.pool_bytes + PAGE)
        return np.frombuffer(data, np.uint8).reshape(-1, PAGE)

    def fill(self, seed: int) -> np.ndarray:
        bytes_ = np.random.default_rng(seed).integers(0, 256, (COUNT + 1, PAGE), np.uint8)
        ctypes.memmove(self.area.address, bytes_.tobytes(), bytes_.nbytes)
        return bytes_

    def copy(self, export: Export | None, *pairs: tuple[int, int], proof: int | None = None) -> CopyResult:
        src, dst = zip(*pairs, strict=True)
        self.backend.start(self.backend.open(export or {}), CopyJob(1, 0, RankPages(0, src), dst, proof))
        deadline = time.monotonic() + 10.0
        while not (results := self.backend.poll()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return results[0]


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> FakeNixl:
    monkeypatch.setattr(nixl_agent, "JUDGED_BYTES", 8 * PAGE)
    monkeypatch.setattr(rdma, "SLOW", 1.0)
    monkeypatch.setattr(rdma, "ALLOWED_PART", 0.0)
    return FakeNixl()


def test_pages_go_from_pool_to_pool_by_the_card_near_each(nixl: FakeNixl) -> None:
    owner, puller = Gpu(nixl, CARD, ordinal=3), Gpu(nixl, RdmaCard("mlx5_5", 25e9), RdmaCard("mlx5_6", 25e9))
    truth, before = owner.fill(1), puller.fill(2)
    export = owner.backend.export()
    assert export is not None and export["rate"] == b"50000000000" and "staged" not in export
    result = puller.copy(export, (3, 9), (4, 10), (COUNT, 7))
    assert (result.error, result.path, result.bytes) == (None, "rdma", 3 * PAGE)
    wanted = before.copy()
    wanted[[9, 10, 7]] = truth[[3, 4, COUNT]]
    np.testing.assert_array_equal(puller.pages, wanted)
    theirs, ours = nixl.agents.values()
    assert theirs.options["device_list"] == "mlx5_3" and ours.options["device_list"] == "mlx5_5, mlx5_6"
    assert [(kind, end - start, at) for kind, start, end, at in theirs.ranges] == [
        ("VRAM", (COUNT + 1) * PAGE, 3),
        ("VRAM", PAGE, 3),
    ], "the pool once, and a page for probes"
    source = puller.backend.open(export)
    assert source.direct and not source.is_staging
    for gpu in (owner, puller):
        assert gpu.backend.close(time.monotonic() + 5.0) and gpu.driver.mappings == 1


def test_a_thread_that_its_gpu_does_not_take_ends_copies_by_name(
    nixl: FakeNixl, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And offers nothing; the thread lives on."""
    owner, puller = Gpu(nixl, CARD), Gpu(nixl, CARD)
    export = owner.backend.export()

    def fails() -> contextlib.AbstractContextManager[None]:
        raise DriverError("cuCtxPushCurrent: no context")

    monkeypatch.setattr(puller.driver, "bound", fails)
    assert puller.backend.export() is None and "cannot be on the GPU" in caplog.text
    error = puller.copy(export, (3, 9)).error
    assert error is not None and "cannot be on the GPU: cuCtxPushCurrent" in error.message
    assert puller.backend.close(time.monotonic() + 5.0)


def test_a_proof_is_what_lies_in_our_own_pool(nixl: FakeNixl) -> None:
    owner, puller = Gpu(nixl, CARD), Gpu(nixl, CARD)
    truth = owner.fill(1)
    proof = CopyJob(1, 0, RankPages(0, (COUNT,)), (5,), 1)
    assert puller.copy(owner.backend.export(), (COUNT, 5), proof=1).ok
    assert puller.backend.checksum(proof) == zlib.crc32(truth[COUNT].tobytes())


@pytest.mark.parametrize("why", ["no card", "not for cards", "two ranks", "plain memory"])
def test_without_a_card_or_memory_for_one_nothing_is_offered(
    nixl: FakeNixl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    monkeypatch.setattr(nics, "near", lambda gpu: [])
    gpu = Gpu(nixl, *([] if why == "no card" else [CARD]), capable=why != "not for cards")
    devices = {"two ranks": (gpu.area,) * 2, "plain memory": (DeviceArea(1, GEOMETRY),)}.get(why, (gpu.area,))
    cards = () if why == "no card" else (CARD,)
    backend = RdmaBackend(BackendSite(NOWHERE, "", None, devices, cards=cards), lambda: nixl)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        assert backend.export() is None
    said = {"no card": "no RDMA card of this host is up", "not for cards": "lets no network card read"}
    assert said.get(why, "not one GPU's") in caplog.text
    with pytest.raises(ConfigError, match=said.get(why, "not one GPU's")):
        backend.open({})
    assert nixl.agents == {} and backend.close(time.monotonic())


def test_the_cards_are_those_near_the_gpu_unless_others_are_named(
    nixl: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(nics, "near", lambda gpu: seen.append(gpu) or [RdmaCard("near", 1e9)])
    Gpu(nixl).backend.export()
    Gpu(nixl, CARD).backend.export()
    assert [agent.options["device_list"] for agent in nixl.agents.values()] == ["near", "mlx5_3"]
    assert seen == [FakeDriver().pci_address]


@pytest.mark.parametrize("field", ["rate", "agent", "memory"])
def test_an_export_of_something_else_is_refused(nixl: FakeNixl, field: str) -> None:
    export = dict(Gpu(nixl, CARD).backend.export() or {})
    for wrong in ({field: b"-1"}, {field: b""}):
        if field != "agent":
            with pytest.raises(ConfigError, match="what the peer exports"):
                Gpu(nixl, CARD).backend.open({**export, **wrong})
    del export[field]
    with pytest.raises(ConfigError, match="what the peer exports"):
        Gpu(nixl, CARD).backend.open(export)


# --- how fast a link is ------------------------------------------------------------------------------


def test_the_floor_is_a_part_of_the_slower_card_and_what_tcp_never_gives_where_cards_are_fast() -> None:
    assert least_rate(50e9) == 3.125e9 and least_rate(12.5e9) == 1.5e9 and least_rate(3.125e9) == 3.125e9 / 4
    assert least_rate(0.0) == 1.5e9, "a card that does not tell its rate"


FLOOR = 3.125e9


@dataclass
class Link:
    """READs of one peer at a rate that the test turns; `now` goes on as bytes come."""

    nixl: FakeNixl = field(default_factory=lambda: FakeNixl(hold=True))
    rate: float = 45e9
    now: float = 100.0
    seen: int = 0

    def __post_init__(self) -> None:
        areas = [PoolArea(np.zeros((COUNT + 1, PAGE), np.uint8)) for _ in range(2)]
        areas[1].pages[:] = np.random.default_rng(1).integers(0, 256, areas[1].pages.shape, np.uint8)
        self.mine, self.owner = areas
        agent = NixlAgent(self.nixl, [OwnPages.in_host(self.owner)])
        self.remote = RemotePages(agent.name, agent.metadata(), agent.own[0].memory, FLOOR)
        self.reads = NixlReads(lambda: NixlAgent(self.nixl, [OwnPages.in_host(self.mine)]))
        self.peer = NixlPeer(self.remote, direct=True)

    def copy(self, *pages: int) -> CopyResult:
        self.reads.add(self.peer, CopyJob(1, 0, RankPages(0, pages), pages), self.now)
        for _ in range(100):
            for done in self.reads.step(self.now):
                return CopyResult(done.job, "rdma", done.bytes, done.seconds, done.error)
            for read in self.nixl.running:
                self.now += sum(size for *_, size in read.pairs) / self.rate
                read.land()
        raise AssertionError("the copy did not stop")

    def right(self, *pages: int) -> bool:
        return bool((self.mine.pages[list(pages)] == self.owner.pages[list(pages)]).all())


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setattr(nixl_agent, "JUDGED_BYTES", 16 * PAGE)
    monkeypatch.setattr(nixl_agent, "LONG_BYTES", 8 * PAGE)
    made = Link()
    yield made
    assert made.nixl.wrong == []


LONG = tuple(range(24))


def test_a_library_that_fell_back_to_tcp_is_named_and_reads_nothing(link: Link) -> None:
    link.rate = 0.3e9
    result = link.copy(*LONG)
    assert isinstance(result.error, TransferFailed) and result.bytes == 0
    assert "READs come at 0.30 GB/s, where 3.12 are the least that RDMA gives" in result.error.message
    assert len(link.nixl.reads) == 1 + nixl_agent.PROBES and not link.mine.pages.any()
    link.rate = 40e9
    link.copy(1)  # (what is told of the broken link ends it)
    assert link.copy(*LONG).ok and link.right(*LONG), "it is tried again, and is well again"


def test_one_slow_probe_is_an_accident(link: Link) -> None:
    rates = iter([0.1e9, 0.1e9, 40e9, 40e9])
    link.rate = next(rates)
    link.reads.add(link.peer, CopyJob(1, 0, RankPages(0, LONG), LONG), link.now)
    over: list[object] = []
    for _ in range(50):
        over += link.reads.step(link.now)
        for read in link.nixl.running:
            link.now += sum(size for *_, size in read.pairs) / link.rate
            link.rate = next(rates, 40e9)
            read.land()
    (done,) = over
    assert done.error is None and link.right(*LONG)  # type: ignore[attr-defined]


def test_a_link_at_a_hundredth_of_its_rate_loses_time_and_no_answer(
    link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    assert link.copy(0).ok
    link.rate = 0.5e9
    result = link.copy(*LONG)
    assert result.ok and result.bytes == len(LONG) * PAGE and link.right(*LONG)
    assert "READs come at 0.50 GB/s" in caplog.text
    refused = link.copy(*LONG)
    assert refused.error is not None and "the link is ill" in refused.error.message
    link.rate = 45e9
    assert link.copy(*LONG).ok, "and when it is well, it is taken again"


def test_short_reads_are_not_judged(link: Link) -> None:
    """They end sooner than they are looked at, so their rate says nothing."""
    assert link.copy(0).ok
    link.rate = 0.5e9
    for _ in range(9):
        assert link.copy(*range(7)).ok


def test_windows_are_judged_together(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    """As those of `rdma_slots`, none of which has enough bytes by itself."""
    assert link.copy(0).ok
    link.rate = 0.5e9
    assert link.copy(*range(8)).ok and "READs come at" not in caplog.text
    assert link.copy(*range(8)).ok and "READs come at 0.50 GB/s" in caplog.text
    refused = link.copy(*range(8))
    assert refused.error is not None and "the link is ill" in refused.error.message


@pytest.mark.parametrize("rate", [4e9, 2e9])
def test_jobs_that_share_a_link_are_judged_together(
    link: Link, rate: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of two has half of its rate. A rest between them is no time of the link's."""
    assert link.copy(0).ok
    link.now += 60.0
    for _ in range(2):
        for pull in (1, 2):
            link.reads.add(link.peer, CopyJob(pull, 1, RankPages(0, LONG), LONG), link.now)
        assert link.reads.step(link.now) == []
        link.now += 2 * len(LONG) * PAGE / rate
        for read in link.nixl.running:
            read.land()
        assert all(done.error is None for done in link.reads.step(link.now))
        link.now += 60.0
        if rate < FLOOR:
            break
    assert ("READs come at 2.00 GB/s" in caplog.text) == (rate < FLOOR)


def test_pulls_take_turns_by_their_bytes_on_the_way(link: Link) -> None:
    """A short one that comes behind a long one does not wait for its end."""
    assert link.copy(0).ok
    link.reads.limits = nixl_reads.ReadLimits(2 * PAGE, 6 * PAGE)
    link.reads.add(link.peer, CopyJob(1, 1, RankPages(0, LONG), LONG), link.now)
    link.reads.add(link.peer, CopyJob(2, 1, RankPages(0, (30, 31, 32)), (30, 31, 32)), link.now)
    over: list[int] = []
    for _ in range(40):
        over += [done.job.pull for done in link.reads.step(link.now)]
        assert sum(size for read in link.nixl.running for *_, size in read.pairs) < 8 * PAGE
        for read in link.nixl.running[:1]:
            read.land()
    assert over == [2, 1] and link.right(*LONG, 30, 31, 32)


def test_a_card_that_vanishes_ends_the_copy_by_name_and_the_next_one_meets_it_anew(link: Link) -> None:
    assert link.copy(0).ok
    link.reads.add(link.peer, CopyJob(1, 1, RankPages(0, LONG), LONG), link.now)
    assert link.reads.step(link.now) == []
    (read,) = link.nixl.running
    read.status = nixlBackendError("NIXL_ERR_BACKEND: Input/output error")
    (done,) = link.reads.step(link.now)
    assert isinstance(done.error, TransferFailed) and "Input/output error" in done.error.message
    assert done.bytes == 0 and link.copy(*LONG).ok and link.right(*LONG)


# --- pages that follow each other --------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, COUNT - 1), st.integers(0, COUNT - 1)), min_size=1, max_size=40))
def test_runs_cover_every_page_once_in_order_and_none_can_be_longer(pairs: list[tuple[int, int]]) -> None:
    src, dst = (tuple(one) for one in zip(*pairs, strict=True))
    found = list(runs(src, dst))
    assert [(a + i, b + i) for a, b, count in found for i in range(count)] == pairs
    for (a, b, count), (c, d, _) in zip(found, found[1:], strict=False):
        assert (a + count, b + count) != (c, d)
