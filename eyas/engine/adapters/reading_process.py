"""A process beside an engine that reads adapters: what it computes takes nothing of the interpreter's lock,
for which the thread of the steps would wait.

It has the reader and the sites of the engine, as they are in the host's memory. It packs an adapter into
memory of the engine, which it maps as long as that takes. It ends with its engine, whose pipe it reads.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eyas.common.errors import EyasError, Overloaded
from eyas.common.machine.processes import python_function
from eyas.common.wire.message import WireFailure
from eyas.engine.adapters.reader import AdapterReader
from eyas.engine.adapters.sites import AdapterSites, PackedAdapter
from eyas.engine.checkpoint.host_tensors import HostTensors, Room, SameRoom, TensorPlace

READ_S = 300.0  # it may take so long to read an adapter
END_S = 5.0


class ReadAdapter(NamedTuple):
    """An adapter that was packed: as in `PackedAdapter`."""

    id: str
    rank: int
    places: list[list[int]]


class ReadingProcess:
    """The engine's side; used by one thread at a time."""

    def __init__(self, reader: AdapterReader, sites: AdapterSites) -> None:
        """It starts at once: it imports what it needs, and takes what it knows, beside the engine's start."""
        self._reader, self._sites = reader, sites
        self._start()

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        command = python_function(__name__, "main", str(theirs.fileno()))
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        theirs.close()
        self._end = weakref.finalize(self, _end, self._pipe, self._process)
        known = self._pipe, (self._reader, self._sites.on_host())
        self._greeting = threading.Thread(target=_greet, args=known, name="greeting", daemon=True)
        self._greeting.start()  # it takes nothing from its pipe as long as it imports

    def read(self, folder: Path, room: Room = HostTensors) -> PackedAdapter:
        """The adapter in a folder. `room`: gives memory, zeros, for it.

        Raises what reading, packing and `room` do, and EyasError if the process ended.
        """
        if not self._end.alive:
            self._start()
        limit = threading.Timer(READ_S, self._process.kill)  # a stopped process takes nothing from its pipe
        limit.start()
        try:
            self._greeting.join()
            _send(self._pipe, (folder, self._sites.gains))
            answer: Any = _received(self._pipe)
            if isinstance(answer, dict):
                made = _made(room, answer, folder)
                _send(self._pipe, made.path if isinstance(made, HostTensors) else made)
                answer = _received(self._pipe)
        except (OSError, EOFError):
            self._end()
            raise EyasError(f"the process that reads adapters was lost, or slow, with {folder}") from None
        finally:
            limit.cancel()
        if isinstance(answer, WireFailure):
            raise answer.error()
        assert isinstance(made, HostTensors)  # it has packed the adapter there
        read: ReadAdapter = answer
        return PackedAdapter(read.id, read.rank, folder, torch.tensor(read.places), made)


def _made(room: Room, places: dict[str, TensorPlace], folder: Path) -> HostTensors | WireFailure:
    """Memory for an adapter, or why there is none."""
    try:
        return room(places)
    except Exception as error:  # of any kind: the process waits for an answer
        return _failure(folder, error)


def _failure(folder: Path, error: Exception) -> WireFailure:
    """Why an adapter could not be read, for the other end of the pipe."""
    if isinstance(error, EyasError):
        return WireFailure.of(error)
    if isinstance(error, OSError | MemoryError | RuntimeError):
        return WireFailure.of(Overloaded(f"no memory for the adapter in {folder}: {error}"))
    return WireFailure.of(EyasError(f"{type(error).__name__}: {error}"))


def _greet(pipe: Connection, known: tuple[AdapterReader, AdapterSites]) -> None:
    """Ends early where the process has ended, or the pipe is closed: who reads next sees that."""
    with contextlib.suppress(OSError, TypeError):
        _send(pipe, known)


def _send(pipe: Connection, what: object) -> None:
    """`Connection.send` would share tensors by descriptors, which needs a key that both have."""
    pipe.send_bytes(pickle.dumps(what))


def _received(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def _end(pipe: Connection, process: subprocess.Popen[bytes]) -> None:
    pipe.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    """The process. The argument: the descriptor of its pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's, which is its engine's business
    torch.set_num_threads(1)
    pipe, file = Connection(int(sys.argv[1])), SameRoom()

    def room(places: dict[str, TensorPlace]) -> HostTensors:
        """The engine's memory for an adapter; raises why there is none."""
        _send(pipe, places)
        answer: Any = _received(pipe)
        if isinstance(answer, WireFailure):
            raise answer.error()
        return HostTensors(places, answer)

    def read(folder: Path, gains: torch.Tensor | None) -> ReadAdapter:
        """Packs the adapter in a folder. Its memory is mapped no more when this returns."""
        packed = sites.packed(reader.read(folder, sites.check, file), folder, gains, room)
        return ReadAdapter(packed.id, packed.rank, packed.places.tolist())

    try:
        reader, sites = _received(pipe)
        while True:
            _send(pipe, _answer(read, *_received(pipe)))
    except (EOFError, OSError):
        return  # the engine has ended


def _answer(
    read: Callable[[Path, torch.Tensor | None], ReadAdapter], folder: Path, gains: torch.Tensor | None
) -> ReadAdapter | WireFailure:
    try:
        return read(folder, gains)
    except EOFError:  # the engine has ended
        raise
    except Exception as error:
        return _failure(folder, error)
