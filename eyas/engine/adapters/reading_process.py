"""A process beside an engine that reads adapters: what it computes takes nothing of the interpreter's lock,
for which the thread of the steps would wait.

It has the reader and the sites of the engine, as they are in the host's memory, and gives the memory of what
it has packed. It ends with its engine, whose pipe it reads.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

from eyas.common.errors import EyasError, Overloaded
from eyas.common.machine.processes import python_function
from eyas.common.wire.message import WireFailure
from eyas.engine.adapters.reader import AdapterReader
from eyas.engine.adapters.sites import AdapterSites, PackedAdapter
from eyas.engine.checkpoint.host_tensors import HostTensors, TensorPlace

READ_S = 300.0  # it may take so long to read an adapter
END_S = 5.0


@dataclass(frozen=True)
class PackedMemory:
    """An adapter that was packed: as in `PackedAdapter`, and its memory."""

    id: str
    rank: int
    places: list[list[int]]
    tensors: dict[str, TensorPlace]
    path: str

    def adapter(self, folder: Path) -> PackedAdapter:
        """The adapter, whose memory is mapped here from now on."""
        memory = HostTensors(self.tensors, self.path)
        return PackedAdapter(self.id, self.rank, folder, torch.tensor(self.places), memory)


class ReadingProcess:
    """The engine's side; used by one thread at a time."""

    def __init__(self, reader: AdapterReader, sites: AdapterSites) -> None:
        """It starts at once, and imports what it needs beside the engine's start."""
        self._reader, self._sites = reader, sites
        self._start()

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        command = python_function(__name__, "main", str(theirs.fileno()))
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        theirs.close()
        self._end = weakref.finalize(self, _end, self._pipe, self._process)
        self._new = True

    def read(self, folder: Path) -> PackedAdapter:
        """The adapter in a folder. Raises what reading and packing do, and EyasError if the process ended."""
        if not self._end.alive:
            self._start()
        limit = threading.Timer(READ_S, self._process.kill)  # a stopped process takes nothing from its pipe
        limit.start()
        try:
            if self._new:
                _send(self._pipe, (self._reader, self._sites.on_host()))
                self._new = False
            _send(self._pipe, (folder, self._sites.gains))
            answer: Any = _received(self._pipe)
        except (OSError, EOFError):
            self._end()
            raise EyasError(f"the process that reads adapters was lost, or slow, with {folder}") from None
        finally:
            limit.cancel()
        if isinstance(answer, WireFailure):
            raise answer.error()
        made: PackedMemory = answer
        return made.adapter(folder)


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
    pipe, packed = Connection(int(sys.argv[1])), None
    try:
        reader, sites = _received(pipe)
        while True:
            folder, gains = _received(pipe)
            try:
                packed = sites.packed(reader.read(folder, sites.check), folder, gains)
                own = packed.id, packed.rank, packed.places.tolist()  # which is kept until the next is read
                _send(pipe, PackedMemory(*own, packed.memory.places, packed.memory.path))
            except EyasError as error:
                _send(pipe, WireFailure.of(error))
            except (MemoryError, RuntimeError) as error:
                _send(pipe, WireFailure.of(Overloaded(f"no memory for the adapter in {folder}: {error}")))
            except Exception as error:
                _send(pipe, WireFailure.of(EyasError(f"{type(error).__name__}: {error}")))
    except (EOFError, OSError):
        return  # the engine has ended
