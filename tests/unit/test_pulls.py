"""Pulls whose front makes the copies: a route is proven first; pages are kept while one may be written."""

from __future__ import annotations

import itertools
import re
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_rig import GEOMETRY, PAGE, POOL, Rig, handle, request

from eyas.common.errors import EyasError
from eyas.common.types import FirstToken, KvKind
from eyas.common.wire.pool import PoolInfo, RankPool
from eyas.engine.ipc.messages import (
    AttachKv,
    CancelGeneration,
    ClosePull,
    CopyPages,
    CopyStopped,
    Event,
    OpenPull,
    PagesLost,
    PullDone,
    PullMet,
    PullReady,
    PullReleased,
    ReleaseHandle,
    ReleasePull,
    StepReply,
    StopCopy,
    WireFailure,
)
from eyas.engine.kv.front_wire import FrontWire
from eyas.engine.kv.pulls import PullManager
from kv_transfer.area import PoolArea
from kv_transfer.backends.base import BackendSite, PeerSource
from kv_transfer.backends.shm import ShmBackend
from kv_transfer.backends.stream import StreamBackend
from kv_transfer.copier import PageCopier
from kv_transfer.layout import RankPools
from kv_transfer.lease_board import LeaseBoard
from kv_transfer.peers import KvPeers, PeerRoutes

STOPPED = WireFailure("cancelled", "the pull was given up")
BROKEN = WireFailure("unavailable", "the peer is gone")
PROOF = bytes(range(128))
OURS = RankPools(GEOMETRY)
INFO = PoolInfo(7, "m", GEOMETRY, (RankPool(0, zlib.crc32(PROOF), {"grpc": {}}),))
assert len(PROOF) == GEOMETRY.page_bytes and POOL.geometry.pages == 64


class FrontRig(Rig):
    """Real routes and backends; the test is the front. `opened`: the newest pull."""

    opened: OpenPull

    def __init__(self, transfer: str = "auto", boards: str = "") -> None:
        self.transfer, self.boards = transfer, boards
        super().__init__()

    def _pulls(self) -> PullManager:
        memory = memoryview(bytearray(65 * GEOMETRY.page_bytes))
        self.area, wire = PoolArea.new(memory, GEOMETRY.page_bytes, "/dev/shm/here"), FrontWire(self.outbox)
        site = BackendSite(self.area, "/dev/shm", wire)
        backends = {"shm": ShmBackend(site), "grpc": StreamBackend(site)}
        copier, routes = PageCopier(backends, window=4), PeerRoutes(backends, self.transfer, OURS)
        return PullManager(copier, routes, wire, PAGE, self.outbox, itertools.count(1), KvPeers(self.boards))

    def tell(self, *commands: object) -> list[Event]:
        """What the engine says after it has heard `commands`, and looked after its pulls once."""
        for command in commands:
            self.pulls.receive(command)
        self.poll()
        return self.outbox.take()

    def prove(self, proof: CopyPages, page: bytes = PROOF) -> list[Event]:
        """The front has written the owner's proof page, or another, where it was told to."""
        assert proof.proof and proof.pages == (GEOMETRY.pages,)
        self.area.pages[proof.dst_pages[0]] = np.frombuffer(page, np.uint8)
        return self.tell(CopyStopped(proof.pull, proof.number, 128, 0.1))

    def attach(self, id: str, info: PoolInfo = INFO) -> int:
        """A request of 28 prompt tokens (7 pages) that has met its owner and has pages; the pull's number."""
        self.submit(request(28, id=id), attach=True)
        offered = msgspec.structs.replace(handle(28), epoch=info.epoch)
        self.requests.attach(AttachKv(id, 1, (offered,)))
        (opened,) = self.said(OpenPull)
        self.opened = opened
        assert self.tell(*([] if opened.known else [PullMet(opened.pull, info)])) == []
        return opened.pull


def of(events: list[Event], kind: type) -> list:
    return [event for event in events if isinstance(event, kind)]


def pulling(rig: FrontRig, rows: int) -> tuple[int, CopyPages]:
    """A pull whose route is proven and whose first `rows` rows are being copied."""
    pull = rig.attach("a")
    (proof,) = of(rig.tell(PullReady(pull, rows)), CopyPages)
    (copy,) = of(rig.prove(proof), CopyPages)
    return pull, copy


def test_pages_are_asked_for_as_they_become_ready_and_count_once_all_stopped() -> None:
    rig = FrontRig()
    pull, first = pulling(rig, 13)
    assert first == CopyPages(pull, first.number, handle(28).shards[0].pages[:3], first.dst_pages)
    (second,) = of(rig.tell(PullDone(pull, (FirstToken(0, 5),))), CopyPages)
    assert second.number != first.number and not set(first.dst_pages) & set(second.dst_pages)
    assert rig.tell(CopyStopped(pull, second.number, 400, 0.1)) == []
    assert rig.tell(CopyStopped(pull, first.number, 300, 0.1)) == [ReleasePull(pull)]
    rig.tell(PullReleased(pull, True))
    (seq,) = rig.joined
    assert seq.pages[:7] == [*first.dst_pages, *second.dst_pages]
    assert len(seq.pages) == 8, "its first round has rows of its own"
    assert (seq.generation.transfer_path, seq.generation.transfer_bytes) == ("grpc", 700)


@pytest.mark.parametrize("valid", [True, False])
def test_a_verdict_that_can_be_seen_is_not_asked_for(valid: bool, tmp_path: Path) -> None:
    """The owner is told one way: nothing comes back of it."""
    board = LeaseBoard(tmp_path / "board", pages=4)
    rig = FrontRig(boards=str(tmp_path))
    pull = rig.attach("a", msgspec.structs.replace(INFO, board=board.export()))
    lease = rig.opened.handle
    if valid:
        board.post(lease.id)
    (proof,) = of(rig.tell(PullDone(pull, (FirstToken(0, 5),))), CopyPages)
    (copy,) = of(rig.prove(proof), CopyPages)
    events = rig.tell(CopyStopped(pull, copy.number, 700, 0.1))
    assert [e for e in events if not isinstance(e, PagesLost | StepReply)] == [
        ReleaseHandle(lease, 1),
        ClosePull(pull),
    ]
    assert len(rig.joined) == valid and bool(rig.held()) == valid


def test_a_proven_route_is_not_proven_again_until_a_copy_fails_or_the_owner_restarts() -> None:
    rig = FrontRig()
    pulling(rig, 13)
    again = rig.attach("b")
    assert rig.opened.known, "and the owner is not asked again what its pages mean"
    (copy,) = of(rig.tell(PullReady(again, 28)), CopyPages)
    assert not copy.proof
    rig.tell(CopyStopped(again, copy.number, 0, 0.1, BROKEN))
    assert rig.pulls.routes.refused["grpc"] == 1
    (proof,) = of(rig.tell(PullReady(rig.attach("c"), 28)), CopyPages)
    assert proof.proof
    rig.prove(proof)
    restarted = rig.attach("d", msgspec.structs.replace(INFO, epoch=8))
    assert not rig.opened.known
    (proof,) = of(rig.tell(PullReady(restarted, 28)), CopyPages)
    assert proof.proof


def test_a_proof_with_other_bytes_is_named_and_no_page_is_copied() -> None:
    rig = FrontRig()
    pull = rig.attach("a")
    (proof,) = of(rig.tell(PullReady(pull, 28)), CopyPages)
    events = rig.prove(proof, PROOF[::-1])
    assert [type(event) for event in events] == [PagesLost, ReleaseHandle, ClosePull] and rig.held() == 0
    assert rig.pulls.routes.refused == {"grpc": 1}


@pytest.mark.parametrize(
    ("transfer", "exports", "sentence"),
    [
        ("auto", {}, "by shm: worker there does not offer .*; by grpc: worker there does not offer"),
        ("shm", {"grpc": {}}, "does not offer its KV by shm, and transfer is shm, which allows no other"),
        ("shm", {"shm": {"path": b"/dev/shm/x", "identity": b"y"}}, "is not a file in .* transfer is shm"),
        ("shm", {"shm": {"path": b"/etc/passwd", "identity": b""}}, "is not a file in .* transfer is shm"),
        ("shm", {"shm": {}}, "is not a file in .* transfer is shm"),
    ],
)
def test_a_way_that_does_not_lead_there_is_refused_by_name(
    transfer: str, exports: dict[str, dict[str, bytes]], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = FrontRig(transfer)
    info = msgspec.structs.replace(INFO, ranks=(RankPool(0, 0, exports),))
    assert of(rig.tell(PullReady(rig.attach("a", info), 28)), PagesLost)
    (line,) = [line for line in caplog.messages if "its KV did not arrive" in line]
    assert re.search(sentence, line) and rig.held() == 0


def test_a_rank_that_the_owner_did_not_describe_is_refused() -> None:
    rig = FrontRig()
    info = msgspec.structs.replace(INFO, ranks=(RankPool(1, 0, {"grpc": {}}),))
    rig.submit(request(28, id="a"), attach=True)
    rig.requests.attach(AttachKv("a", 1, (handle(28),)))
    (opened,) = rig.said(OpenPull)
    events = rig.tell(PullMet(opened.pull, info))
    assert of(events, PagesLost) and not of(events, CopyPages) and rig.held() == 0


@pytest.mark.parametrize("proven", [False, True])
def test_a_cancelled_pull_keeps_its_pages_until_the_front_says_stopped(proven: bool) -> None:
    rig = FrontRig()
    if proven:
        pull, copy = pulling(rig, 28)
    else:
        pull = rig.attach("a")
        (copy,) = of(rig.tell(PullReady(pull, 28)), CopyPages)
    rig.requests.cancel(CancelGeneration("a"))
    events = rig.tell()
    assert of(events, ClosePull) == [ClosePull(pull)]
    assert of(events, StopCopy) == [StopCopy(pull, copy.number)]
    assert rig.held() == 7
    assert rig.tell(CopyStopped(pull, copy.number, 0, 0.1, STOPPED)) == []
    assert rig.held() == 0 and rig.pulls.active == 0


@pytest.mark.parametrize("proven", [False, True])
def test_a_preempted_pull_stops_its_copies_and_starts_again(proven: bool) -> None:
    rig = FrontRig()
    if proven:
        pull, copy = pulling(rig, 12)
    else:
        pull = rig.attach("a")
        (copy,) = of(rig.tell(PullReady(pull, 12)), CopyPages)
    assert rig.pulls.preempt()
    events = rig.outbox.take()
    assert events == [StopCopy(pull, copy.number)] and rig.held() == 7
    (again,) = of(rig.tell(CopyStopped(pull, copy.number, 0, 0.1, STOPPED)), CopyPages)
    assert again.proof is not proven and again.number != copy.number
    if not proven:
        (again,) = of(rig.prove(again), CopyPages)
    assert len(again.pages) == 3 and not again.proof


def test_a_failed_copy_loses_the_attempt() -> None:
    rig = FrontRig()
    pull, copy = pulling(rig, 12)
    events = rig.tell(CopyStopped(pull, copy.number, 0, 0.1, BROKEN))
    assert [type(event) for event in events] == [PagesLost, ReleaseHandle, ClosePull]
    assert rig.held() == 0


def test_several_pulls_of_one_owner_prove_their_way_apart() -> None:
    """So that one which is given up takes none of the others with it."""
    rig = FrontRig()
    pulls = [rig.attach(id) for id in "abc"]
    proofs = [of(rig.tell(PullReady(pull, 28)), CopyPages)[0] for pull in pulls]
    assert all(proof.proof for proof in proofs)
    rig.requests.cancel(CancelGeneration("a"))
    rig.tell(CopyStopped(pulls[0], proofs[0].number, 0, 0.1, STOPPED))
    copies = list(itertools.chain(*(of(rig.prove(proof), CopyPages) for proof in proofs[1:])))
    assert [copy.pull for copy in copies] == pulls[1:]
    assert [len(copy.pages) for copy in copies] == [7, 7]


def test_a_worker_without_the_way_that_it_may_take_says_so() -> None:
    pages = KvPeers("").meet("w1", KvKind.TARGET, INFO).pages(KvKind.TARGET, 0)
    for transfer, says in (("grpc", "this worker has no way named grpc"), ("auto", "no way leads to")):
        with pytest.raises(EyasError, match=says):
            PeerRoutes({}, transfer, OURS).search(pages).next()


def test_auto_passes_over_a_way_that_is_slow_here_and_says_why() -> None:
    """It is taken where it alone may be."""
    source = PeerSource()
    ways: dict[str, Any] = {
        name: SimpleNamespace(
            name=name, direct=False, drawback=lambda export, why=why: why, open=lambda export: source
        )
        for name, why in (("slow", "no card is up"), ("plain", ""))
    }
    info = msgspec.structs.replace(INFO, ranks=(RankPool(0, 0, {"slow": {}, "plain": {}}),))
    pages = KvPeers("").meet("w1", KvKind.TARGET, info).pages(KvKind.TARGET, 0)
    search = PeerRoutes(ways, "auto", OURS).search(pages)
    assert search.next().backend.name == "plain" and search.refusals["slow"].message == "no card is up"
    assert PeerRoutes(ways, "slow", OURS).search(pages).next().backend.name == "slow"


@pytest.mark.parametrize(("here", "there"), [(False, True), (True, False)])
def test_parts_of_pages_that_one_end_cannot_divide_are_refused_by_name(here: bool, there: bool) -> None:
    """As those of groups of ranks, of which one is read where its pages lie."""
    source = PeerSource()
    source.is_staging = there
    way = SimpleNamespace(name="way", direct=False, drawback=lambda export: "", open=lambda export: source)
    half = RankPool(0, 0, {"way": {}})
    info = msgspec.structs.replace(INFO, ranks=(half, msgspec.structs.replace(half, rank=1)))
    ours = msgspec.structs.replace(GEOMETRY, kv_heads=2 * GEOMETRY.kv_heads)
    pages = KvPeers("").meet("w1", KvKind.TARGET, info).pages(KvKind.TARGET, 1)
    with pytest.raises(EyasError, match="of 2 ranks there and of 1 here, .* whole ones go, by way"):
        PeerRoutes({"way": way}, "auto", RankPools(ours, 1, here)).search(pages).next()  # type: ignore[dict-item]
    source.is_staging = True
    route = PeerRoutes({"way": way}, "auto", RankPools(ours, 1, True)).search(pages).next()  # type: ignore[dict-item]
    (part,) = route.parts
    assert (part.source.rank, part.target.first, part.width) == (1, GEOMETRY.kv_heads, GEOMETRY.page_bytes)
