"""Leases that pullers of the same host can see: what the owner's verdict would be, without asking."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from kv_transfer.lease_board import LEASES_PER_PAGE, LeaseBoard, LeaseBoardView

PLACES = 2 * LEASES_PER_PAGE * 4  # of a pool of four pages


def test_a_lease_is_seen_from_post_to_strike(tmp_path: Path) -> None:
    board = LeaseBoard(tmp_path / "eyas-1-a-leases", pages=4)
    view = LeaseBoardView.find(board.export(), str(tmp_path))
    assert view is not None
    first = board.new_id()
    assert not view.holds(first)
    board.post(first)
    second = board.new_id()  # in another place, as the first one is taken
    board.post(second)
    assert view.holds(first) and view.holds(second) and not view.holds(first + PLACES)
    board.strike(first)
    assert not view.holds(first) and view.holds(second)


def test_every_id_has_a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = LeaseBoard(tmp_path / "board", pages=4)
    drawn = itertools.chain([0, 5, 5 + PLACES, 5 + 2 * PLACES, 6], itertools.repeat(7))
    monkeypatch.setattr("kv_transfer.lease_board.secrets.randbits", lambda bits: next(drawn))
    ids = []
    for _ in range(3):
        ids.append(board.new_id())
        board.post(ids[-1])
    assert ids == [5, 6, 7]


def test_a_pool_of_leases_has_places_left(tmp_path: Path) -> None:
    """An id is found as soon with the most leases that the pages allow as with few."""
    board = LeaseBoard(tmp_path / "board", pages=5000)
    for _ in range(LEASES_PER_PAGE * 5000):
        board.post(board.new_id())
    assert board.new_id()


def test_an_owner_that_is_gone_is_seen_as_it_was(tmp_path: Path) -> None:
    """It writes to no page any more."""
    board = LeaseBoard(tmp_path / "board", pages=4)
    lease = board.new_id()
    board.post(lease)
    export = board.export()
    view = LeaseBoardView.find(export, str(tmp_path))
    board.close()
    assert list(tmp_path.iterdir()) == []
    assert view is not None and view.holds(lease)
    assert LeaseBoardView.find(export, str(tmp_path)) is None


def test_a_board_of_another_host_or_folder_is_none(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    board = LeaseBoard(here / "board", pages=4).export()
    other = LeaseBoard(there / "board", pages=4).export()
    for export in (
        {},
        other,
        {**board, "identity": b"another"},
        {**board, "path": b"\0"},
        {"path": board["path"]},
    ):
        assert LeaseBoardView.find(export, str(here)) is None
    short = here / "short"
    for content in (b"", b"x"):
        short.write_bytes(content)
        assert LeaseBoardView.find({**board, "path": os.fsencode(short)}, str(here)) is None
