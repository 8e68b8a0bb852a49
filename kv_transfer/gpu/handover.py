"""Handing a GPU's memory to other processes of this host: file descriptors over a socket in the file system.

The connection stays open after the descriptor has passed: its end tells the taker that the giver's process is
gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eyas.common.errors import TransferFailed
from kv_transfer.gpu.driver import DriverError
from kv_transfer.host_files import is_ours, listen_at

_SIZE = struct.Struct("<Q")
_WAITING = 64  # connections that are not accepted yet
PAUSE_S = 0.1  # before the next try to accept, where a process may have no descriptor left
TAKE_S = 2.0  # a giver that does not answer in this time is stopped, or gone


class DescriptorGiver:
    """Gives `size` bytes to every process of the same user that connects to `path`, until `close`.

    `export` makes a new descriptor of the memory, which is closed once it was sent. The folder of `path` must
    be one that other users cannot enter.
    """

    def __init__(self, path: Path, size: int, export: Callable[[], int]) -> None:
        self._path = path
        self._size = size
        self._export = export
        self._closing = False
        self._takers: list[socket.socket] = []
        self._listener = listen_at(path, _WAITING)
        self._thread = threading.Thread(target=self._run, name="kv-giver", daemon=True)
        self._thread.start()

    @property
    def taken(self) -> bool:
        """Whether some process has the memory mapped, or may map it."""
        return any(not _ended(taker) for taker in self._takers)

    def close(self) -> None:
        """Ends the handover: no process gets the memory any more; those that have it hear of the end."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()
        for taker in self._takers:
            taker.close()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while True:
            try:
                taker, _ = self._listener.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(PAUSE_S)
                continue
            self._forget()
            try:
                self._give(taker)
            except (OSError, DriverError):
                taker.close()  # it sees that the connection ends

    def _give(self, taker: socket.socket) -> None:
        if not is_ours(taker):
            taker.close()
            return
        self._takers.append(taker)
        descriptor = self._export()
        try:
            socket.send_fds(taker, [_SIZE.pack(self._size)], [descriptor])
        finally:
            os.close(descriptor)

    def _forget(self) -> None:
        """Takers that are gone."""
        for taker in list(self._takers):
            if _ended(taker):
                self._takers.remove(taker)
                taker.close()


@dataclass(frozen=True)
class TakenDescriptor:
    """A descriptor of `size` bytes of a GPU, for the taker to close, and the connection to their giver."""

    descriptor: int
    size: int
    giver: socket.socket


def take(path: str, within_s: float | None = None) -> TakenDescriptor:
    """Ask the giver at `path`. Raises TransferFailed if it does not answer `within_s` (TAKE_S) seconds."""
    giver = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    giver.settimeout(TAKE_S if within_s is None else within_s)
    try:
        giver.connect(path)
        if not is_ours(giver):
            raise TransferFailed(f"the owner of {path} runs as another user")
        data, descriptors, _, _ = socket.recv_fds(giver, _SIZE.size, 1)
    except OSError as error:
        giver.close()
        raise TransferFailed(f"the owner of {path} gives no memory: {error.strerror or error}") from None
    except TransferFailed:
        giver.close()
        raise
    if len(data) != _SIZE.size or len(descriptors) != 1:
        giver.close()
        for descriptor in descriptors:
            os.close(descriptor)
        raise TransferFailed(f"the owner of {path} gives no memory: it closed the connection")
    giver.settimeout(None)
    return TakenDescriptor(descriptors[0], _SIZE.unpack(data)[0], giver)


def wait_for_end(giver: socket.socket) -> None:
    """Returns when the giver has closed the connection, or its process has ended, or we shut it down."""
    with contextlib.suppress(OSError):
        while giver.recv(1):
            pass


def _ended(peer: socket.socket) -> bool:
    try:
        return peer.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
