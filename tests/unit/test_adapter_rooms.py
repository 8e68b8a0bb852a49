"""Locked memory for adapters is made ahead, and unlocked after its last use; a stand-in locks it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eyas.common.errors import ConfigError
from eyas.engine.adapters.sites import NUMBERS
from eyas.engine.checkpoint.host_tensors import SameRoom, TensorPlace, laid_out
from eyas.engine.device import adapter_rooms
from eyas.engine.device.adapter_rooms import PIECE_BYTES, AdapterRooms

ONE, OTHER = ({NUMBERS: TensorPlace("BF16", (count,), 0)} for count in (PIECE_BYTES, 40))
STREAM = SimpleNamespace(device=0, synchronize=lambda: None)


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each piece that is locked."""
    sizes: list[int] = []

    def pin_each(pieces: Iterable[torch.Tensor]) -> None:
        sizes.extend(piece.nbytes for piece in pieces)

    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(adapter_rooms, "pin_each", pin_each)
    monkeypatch.setattr(adapter_rooms, "unpin", lambda piece: sizes.remove(piece.nbytes))
    return sizes


@pytest.fixture
def rooms(locked: list[int]) -> Iterator[AdapterRooms]:
    """Nothing is locked or unlocked any more when the stand-ins go."""
    made = AdapterRooms(STREAM)  # type: ignore[arg-type]
    yield made
    made._locking.shutdown()
    made._next = None
    for thread in threading.enumerate():
        if thread.name == "unlocking":
            thread.join(5)


def test_the_next_adapter_of_its_layout_finds_memory_locked(locked: list[int], rooms: AdapterRooms) -> None:
    first = rooms(ONE)
    assert not first.tensor(NUMBERS).any()
    assert 512 * Path(first.path).stat().st_blocks >= 2 * PIECE_BYTES  # whose pages are there
    ahead = rooms._next
    assert ahead is not None
    ahead.result()
    assert locked == [PIECE_BYTES] * 4
    assert ahead.result() is rooms(ONE) and ahead.result() is not first


def test_memory_of_another_layout_is_unlocked(locked: list[int], rooms: AdapterRooms) -> None:
    """As that of an adapter that nobody has any more."""
    first, other = rooms(ONE), rooms(OTHER)
    assert rooms._next is not None
    rooms._next.result()
    _wait_for(lambda: locked.count(PIECE_BYTES) == 2)
    assert other.places == OTHER and locked.count(80) == 2
    del first
    _wait_for(lambda: locked == [80, 80])


def test_memory_that_could_not_be_made_ahead_is_made_when_it_is_needed(
    rooms: AdapterRooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as refusing:
        refusing.setattr(adapter_rooms, "pin_each", _refuse)
        with pytest.raises(ConfigError, match="cannot page-lock"):
            rooms(OTHER)
        rooms._next = rooms._locking.submit(rooms._locked, OTHER)
        assert isinstance(rooms._next.exception(), ConfigError)
    assert rooms(OTHER).places == OTHER


def test_no_memory_waits_for_large_adapters(rooms: AdapterRooms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_rooms, "REUSED_BYTES", 79)
    assert rooms(OTHER).places == OTHER and rooms._next is None


def test_memory_of_last_time_is_given_again_for_the_same_places_alone() -> None:
    room, places = SameRoom(), laid_out([("a", "BF16", (3,)), ("b", "BF16", (2,))])
    first = room(places)
    first.tensor("a").fill_(1)
    assert room(dict(places)) is first
    other = room(laid_out([("a", "BF16", (3,))]))
    assert other is not first and not other.tensor("a").any()


def _refuse(pieces: Iterable[torch.Tensor]) -> None:
    raise ConfigError("the driver cannot page-lock it")


def _wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    assert holds()
