"""Page-locked memory of the host for adapters, which a GPU's slots are filled from.

To lock memory takes a driver tens of milliseconds, and steps' launches wait for it meanwhile: it is done in
small pieces, and ahead. An adapter of the layout of the last one finds its memory locked.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from eyas.engine.adapters.sites import NUMBERS
from eyas.engine.checkpoint.host_tensors import REUSED_BYTES, HostTensors, TensorPlace
from eyas.engine.kv.pinned import pin_each, unpin

PIECE_BYTES = 2**20
"""Locked at a time, and copied: steps' launches wait for that, some 0.2 ms."""
_APART_S = 0.0001
"""Between two pieces: a launch that waits would else wait for most of them, 14 ms of an 8B's adapter."""


class AdapterRooms:
    """A `Room`, used by one thread at a time. `stream`: of the copies into slots."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._locking = ThreadPoolExecutor(1, "locking")
        self._next: Future[HostTensors] | None = None

    def __call__(self, places: dict[str, TensorPlace]) -> HostTensors:
        """Zeros, whose `NUMBERS` are locked as long as this object is there. Begins to lock the same for the
        next adapter, unless it is too large to wait.

        Raises ConfigError if the host has no room for them, or the driver cannot lock them.
        """
        made, self._next = self._next, None
        if made is not None and made.exception() is None and made.result().places == places:
            room = made.result()
        else:
            room = self._locked(places)
        if max(place.start + place.nbytes for place in places.values()) <= REUSED_BYTES:
            self._next = self._locking.submit(self._locked, places)
        return room

    def _locked(self, places: dict[str, TensorPlace]) -> HostTensors:
        room = HostTensors(places)
        room.allocate()
        numbers = room.tensor(NUMBERS).view(torch.uint8)
        with torch.cuda.device(self._stream.device):
            pin_each(_apart(numbers.split(PIECE_BYTES)))
        weakref.finalize(room, _begin_to_unlock, numbers, self._stream).atexit = False
        return room


def _begin_to_unlock(numbers: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Beside the steps: it waits for copies, and for the driver."""
    threading.Thread(target=_unlock, args=(numbers, stream), name="unlocking", daemon=True).start()


def _unlock(numbers: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Unlocks memory that is in use no longer, once the copies on `stream` have read it."""
    stream.synchronize()
    for piece in _apart(numbers.split(PIECE_BYTES)):
        unpin(piece)


def _apart(pieces: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for piece in pieces:
        yield piece
        time.sleep(_APART_S)
