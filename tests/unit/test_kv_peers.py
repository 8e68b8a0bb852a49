"""What a puller knows of owners of pages: one record of an incarnation, which is let go as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgspec
import pytest
from engine_rig import GEOMETRY, POOL, handle

from eyas.common.errors import TransferFailed
from eyas.common.types import KvKind
from eyas.common.wire.pool import PoolInfo, RankPool
from kv_transfer import peers
from kv_transfer.backends.base import PeerSource, TransferBackend
from kv_transfer.lease_board import LeaseBoard
from kv_transfer.peers import KvPeers, PeerRoute


class Memory(PeerSource):
    """It is somebody's until `lost`."""

    lost = False

    @property
    def current(self) -> bool:
        return not self.lost


def way(memory: PeerSource) -> PeerRoute:
    return PeerRoute(cast(TransferBackend, None), memory)


def restarted(info: PoolInfo) -> PoolInfo:
    return msgspec.structs.replace(info, epoch=info.epoch + 1)


def test_an_owner_is_known_by_its_incarnation_group_and_meaning() -> None:
    known, offered = KvPeers(""), handle(8)
    assert known.known(offered) is None
    met = known.meet("there", KvKind.TARGET, POOL)
    assert known.known(offered) is met
    for field, other in (("worker", "w"), ("epoch", 8), ("layout", "other"), ("group", KvKind.DRAFT)):
        assert known.known(msgspec.structs.replace(offered, **{field: other})) is None, field
    assert known.meet("there", KvKind.DRAFT, POOL) is met
    assert known.known(msgspec.structs.replace(offered, group=KvKind.DRAFT)) is met


def test_a_restart_lets_go_of_all_that_was_known(tmp_path: Path) -> None:
    board = LeaseBoard(tmp_path / "board", pages=4)
    shown, known = msgspec.structs.replace(POOL, board=board.export()), KvPeers(str(tmp_path))
    first = known.meet("there", KvKind.TARGET, shown)
    known.meet("there", KvKind.DRAFT, shown)
    first.pages(KvKind.TARGET, 0).prove(way(Memory()), {})
    again = known.meet("there", KvKind.TARGET, restarted(POOL))
    assert first.board is not None and again.board is None
    assert set(again.pools) == {KvKind.TARGET} and again.pages(KvKind.TARGET, 0).proven is None
    assert known.known(handle(8)) is None


def test_a_way_is_known_until_a_copy_fails() -> None:
    pages = KvPeers("").meet("there", KvKind.TARGET, POOL).pages(KvKind.TARGET, 0)
    route, refused = way(Memory()), {"shm": TransferFailed("no")}
    assert pages.proven is None
    pages.prove(route, refused)
    assert pages.proven is not None and pages.proven.route is route and pages.proven.refusals == refused
    pages.doubt()
    pages.doubt()
    assert pages.proven is None


def test_owners_whose_memory_is_gone_are_let_go_when_another_one_is_met() -> None:
    known, memory = KvPeers(""), Memory()
    known.meet("there", KvKind.TARGET, POOL).pages(KvKind.TARGET, 0).prove(way(memory), {})
    known.meet("second", KvKind.TARGET, POOL)
    assert known.known(handle(8))
    memory.lost = True
    known.meet("third", KvKind.TARGET, POOL)
    assert known.known(handle(8)) is None
    assert known.known(msgspec.structs.replace(handle(8), worker="second"))


def test_the_longest_unused_is_let_go_of_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MOST_PEERS", 2)
    known = KvPeers("")
    for worker in ("there", "second"):
        known.meet(worker, KvKind.TARGET, POOL)
    assert known.known(handle(8))
    known.meet("third", KvKind.TARGET, POOL)
    assert known.known(handle(8))
    assert known.known(msgspec.structs.replace(handle(8), worker="second")) is None


def test_a_rank_that_was_not_described_has_no_pages() -> None:
    info = PoolInfo(7, "m", GEOMETRY, (RankPool(1, 0, {}),))
    peer = KvPeers("").meet("there", KvKind.TARGET, info)
    assert peer.pages(KvKind.TARGET, 1).pool.rank == 1
    with pytest.raises(TransferFailed, match="described no target pages of rank 0"):
        peer.pages(KvKind.TARGET, 0).pool  # noqa: B018
