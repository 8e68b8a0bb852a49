"""The backend `nixl` with its library, and owners in processes that are stopped, killed and started again."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from eyas.common.errors import TransferFailed
from eyas.common.types import RankPages
from kv_transfer.area import PoolArea
from kv_transfer.backends import nixl_agent, nixl_reads
from kv_transfer.backends.base import BackendSite, CopyJob, CopyResult, PeerSource, runs
from kv_transfer.backends.nixl import NixlBackend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("nixl") is None, reason="nixl is not installed (pip install eyas[nixl])"
    ),
    pytest.mark.filterwarnings("ignore"),
]

ROOT = Path(__file__).resolve().parents[2]
PAGES, PAGE = 64, 2**20
TCP = "tcp"
OWNER = f"""
import os, sys, time
import msgspec
from kv_transfer.area import PoolArea
from kv_transfer.backends.base import BackendSite
from kv_transfer.backends.nixl import NixlBackend

area = PoolArea.new(memoryview(bytearray({(PAGES + 1) * PAGE})), {PAGE})
for page in range({PAGES}):
    area.pages[page] = 1 + (page + int(sys.argv[2])) % 250
backend = NixlBackend(BackendSite(area, "", None))
export = backend.export()
os.write(int(sys.argv[1]), msgspec.msgpack.encode((export, area.checksum({PAGES}))))
os.close(int(sys.argv[1]))
sys.stdin.read()
assert backend.close(time.monotonic() + 5)
"""


@dataclass(frozen=True)
class Owner:
    """Another process, whose page p is full of 1 + (p + seed) % 250."""

    process: subprocess.Popen[bytes]
    export: dict[str, bytes]
    checksum: int
    seed: int

    def tell(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@contextlib.contextmanager
def owner(seed: int = 0) -> Iterator[Owner]:
    read, write = os.pipe()
    command = [sys.executable, "-c", OWNER, str(write), str(seed)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    process = subprocess.Popen(command, pass_fds=[write], stdin=subprocess.PIPE, env=environment)
    os.close(write)
    try:
        with open(read, "rb") as pipe:
            export, checksum = msgspec.msgpack.decode(pipe.read())
        yield Owner(process, export, checksum, seed)
    finally:
        process.kill()
        process.communicate()


@dataclass
class Puller:
    area: PoolArea
    backend: NixlBackend

    def copy(self, source: PeerSource, *pages: int, seconds: float = 30.0) -> CopyResult | None:
        """Page p there to page p here; None if it has not stopped in time."""
        self.backend.start(source, CopyJob(1, 0, RankPages(0, pages), pages))
        return self.result(seconds)

    def result(self, seconds: float) -> CopyResult | None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for result in self.backend.poll():
                return result
            time.sleep(0.001)
        return None

    def holds(self, of: Owner, pages: range) -> bool:
        truth = 1 + (np.arange(PAGES) + of.seed) % 250
        return bool((self.area.pages[pages] == truth[pages, None]).all())


@pytest.fixture(params=["default", TCP])
def puller(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Puller]:
    if request.param == TCP:
        monkeypatch.setenv("UCX_TLS", TCP)
    area = PoolArea.new(memoryview(bytearray((PAGES + 1) * PAGE)), PAGE)
    made = Puller(area, NixlBackend(BackendSite(area, "", None)))  # type: ignore[arg-type]
    yield made
    assert made.backend.close(time.monotonic() + 10.0)


def whole(puller: Puller, source: PeerSource) -> CopyResult:
    result = puller.copy(source, *range(PAGES))
    assert result is not None and result.error is None and result.bytes == PAGES * PAGE
    return result


def test_all_pages_come_and_the_proof_is_the_owners(puller: Puller) -> None:
    with owner(seed=7) as peer:
        source = puller.backend.open(peer.export)
        proof = puller.copy(source, PAGES)
        assert proof is not None and proof.ok and puller.area.checksum(PAGES) == peer.checksum
        seconds = whole(puller, source).seconds
        assert puller.holds(peer, range(PAGES))
        print(f"{PAGES * PAGE / seconds / 1e9:.2f} GB/s")
        outside = puller.copy(source, PAGES + 1)
        assert outside is not None and isinstance(outside.error, TransferFailed)


def test_an_agent_that_waits_takes_no_core(puller: Puller) -> None:
    with owner() as peer:
        whole(puller, puller.backend.open(peer.export))
        process = psutil.Process(peer.process.pid)
        before, mine = sum(process.cpu_times()[:2]), time.process_time()
        time.sleep(1.0)
        assert sum(process.cpu_times()[:2]) - before < 0.2
        assert time.process_time() - mine < 0.2


def test_a_killed_owner_ends_copies_at_once_and_its_successor_is_read(puller: Puller) -> None:
    with owner() as peer:
        source = puller.backend.open(peer.export)
        whole(puller, source)
        peer.tell(signal.SIGKILL)
        peer.process.wait()
        began = time.monotonic()
        result = puller.copy(source, 1)
        assert result is not None and isinstance(result.error, TransferFailed)
        assert time.monotonic() - began < 5.0 and not source.current
    with owner(seed=9) as peer:
        whole(puller, puller.backend.open(peer.export))
        assert puller.holds(peer, range(PAGES))


def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_reads, "COPY_S", 0.5)
    monkeypatch.setattr(nixl_reads, "SLOWEST_BYTES_S", 1e12)
    monkeypatch.setattr(nixl_agent, "GREET_S", 2.0)


@pytest.mark.parametrize("after", [signal.SIGCONT, signal.SIGKILL])
def test_a_read_from_a_stopped_owner_ends_when_it_goes_on_or_dies(
    puller: Puller, monkeypatch: pytest.MonkeyPatch, after: signal.Signals
) -> None:
    """Over TCP the READ hangs, and all of its bytes come later; with a common kernel it needs no owner."""
    with owner() as peer:
        source = puller.backend.open(peer.export)
        whole(puller, source)
        puller.area.pages[:] = 0
        stopped(monkeypatch)
        peer.tell(signal.SIGSTOP)
        result = puller.copy(source, *range(PAGES), seconds=2.0)
        if "UCX_TLS" not in os.environ:
            assert result is not None and result.ok and puller.holds(peer, range(PAGES))
            return
        assert result is None and not puller.area.pages.any()
        assert puller.backend.close(time.monotonic() + 0.2) is False
        peer.tell(after)
        result = puller.result(10.0)
        assert result is not None and not result.ok
        assert puller.holds(peer, range(PAGES)) is (after == signal.SIGCONT)


def test_an_owner_that_is_stopped_before_the_first_copy_costs_no_page(
    puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    with owner() as peer:
        stopped(monkeypatch)
        peer.tell(signal.SIGSTOP)
        result = puller.copy(puller.backend.open(peer.export), *range(PAGES), seconds=4.0)
        assert result is not None
        if not result.ok:
            assert "has not answered" in result.error.message and not puller.area.pages[:PAGES].any()
        else:
            assert "UCX_TLS" not in os.environ
        peer.tell(signal.SIGCONT)


def test_two_pullers_of_one_owner_do_not_disturb_each_other(puller: Puller) -> None:
    make: Callable[[], PoolArea] = lambda: PoolArea.new(memoryview(bytearray((PAGES + 1) * PAGE)), PAGE)  # noqa: E731
    with owner() as peer:
        other = Puller(area := make(), NixlBackend(BackendSite(area, "", None)))  # type: ignore[arg-type]
        mine, theirs = (each.backend.open(peer.export) for each in (puller, other))
        whole(puller, mine)
        whole(other, theirs)
        assert other.backend.close(time.monotonic() + 5.0)
        whole(puller, mine)
        assert puller.holds(peer, range(PAGES)) and other.holds(peer, range(PAGES))


@pytest.mark.parametrize(
    ("src", "dst", "pieces"),
    [
        (range(40), range(3, 43), 1),
        ((*range(8), *range(20, 28)), (*range(30, 38), *range(8)), 2),
        (range(0, 40, 2), range(0, 40, 2), 20),
        (range(10, 0, -1), range(10, 0, -1), 10),
        ((4, 5, 6, 7), (9, 8, 7, 6), 4),
    ],
)
def test_pages_that_follow_each_other_on_both_sides_are_one_piece(
    src: Sequence[int], dst: Sequence[int], pieces: int
) -> None:
    """The library joins what it is given as pages of one row: as many pieces as `runs` finds."""
    nixl, area = nixl_agent.load(), PoolArea(np.zeros((PAGES, 4096), np.uint8))
    config = nixl.nixlAgentConfig()
    config.useProgThread, config.pthrDelay, config.captureTelemetry = True, 100_000, True
    agents = [nixl.nixlAgent(name, config) for name in ("reader", "owner")]
    own = nixl_agent.OwnPages.in_host(area).memory
    rows = np.array(own.rows(own.page_bytes), np.uint64)
    for agent in agents:
        agent.createBackend("UCX", {})
        agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [own.whole]))
    reader, owner_ = agents
    assert reader.loadRemoteMD(owner_.getLocalMD()) == b"owner"
    sides = [reader.prepXferDlist(name, nixl.DRAM_SEG, rows, []) for name in (nixl.NIXL_INIT_AGENT, "owner")]
    here, there = (np.array(list(pages), np.int32) for pages in (dst, src))
    read = reader.makeXferReq(nixl.NIXL_READ, sides[0], here, sides[1], there)
    reader.postXferReq(read)
    deadline = time.monotonic() + 10.0
    while reader.getXferStatus(read) == nixl.NIXL_IN_PROG:
        assert time.monotonic() < deadline
    assert reader.getXferTelemetry(read).descCount == pieces == len(list(runs(tuple(src), tuple(dst))))
    reader.releaseXferReq(read)
