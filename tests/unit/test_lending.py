"""Bytes that one end of a socket lends the other, beside its messages."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from eyas.engine.ipc import lending
from eyas.engine.ipc.lending import LEAST_BYTES, Borrower, Lender

Ends = tuple[Lender, Borrower, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Both, and the lender's socket."""
    ours, theirs = socket.socketpair()
    before = len(os.listdir("/proc/self/fd"))
    for one in (ours, theirs):
        one.setblocking(False)
    borrower = Borrower(theirs)
    yield Lender(ours), borrower, ours
    borrower.close()
    assert len(os.listdir("/proc/self/fd")) <= before, "a descriptor was left open"
    theirs.close()
    ours.close()


def floats(rows: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 4096), np.float32)


def test_what_is_lent_is_fetched_once_in_any_order(ends: Ends) -> None:
    lender, borrower, _ = ends
    some = [floats(2 + i, i) for i in range(5)]
    assert [lender.lend(one) for one in some] == [1, 2, 3, 4, 5]
    assert borrower.listen()
    for number in (3, 1, 5, 2, 4):
        assert borrower.fetch(number) == some[number - 1].tobytes()
        assert borrower.fetch(number) is None
    assert borrower.fetch(6) is None


def test_little_is_not_lent(ends: Ends) -> None:
    assert ends[0].lend(np.zeros(LEAST_BYTES // 4 - 1, np.float32)) == 0
    assert ends[0].lend(np.zeros(LEAST_BYTES // 4, np.float32)) == 1


def test_what_is_never_fetched_makes_room(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "MOST_LENT", 3)
    lender, borrower, _ = ends
    for i in range(6):
        lender.lend(floats(2, i))
    assert borrower.listen()
    assert [borrower.fetch(i) is not None for i in range(1, 7)] == [False] * 3 + [True] * 3


def test_a_full_socket_lends_nothing_and_loses_nothing(ends: Ends) -> None:
    lender, borrower, _ = ends
    one, numbers = floats(2), []
    while numbers[-1:] != [0] and len(numbers) < 5000:
        numbers.append(lender.lend(one))
    assert numbers[-1] == 0 and numbers[:-1] == list(range(1, len(numbers)))
    borrower.listen()
    assert lender.lend(one) == len(numbers)
    assert borrower.listen() and borrower.fetch(len(numbers)) == one.tobytes()


def test_a_loan_that_was_cut_is_none(ends: Ends) -> None:
    lender, borrower, _ = ends
    lender.lend(floats(2))
    borrower.listen()
    os.ftruncate(borrower._here[1][0], 10)
    assert borrower.fetch(1) is None


def test_the_end_is_seen_behind_what_was_lent(ends: Ends) -> None:
    lender, borrower, ours = ends
    lender.lend(floats(2))
    ours.shutdown(socket.SHUT_WR)
    assert not borrower.listen() and borrower.fetch(1) == floats(2).tobytes()
