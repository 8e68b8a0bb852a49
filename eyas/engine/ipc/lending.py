"""Bytes that one process of a host lends another, beside messages that go a longer way: memory without a
name, whose descriptor goes by a socket that both have.

Features of a prompt are megabytes, which four processes would copy several times. A message then names their
number alone. Who lends waits for nothing: where the socket is full, or a descriptor is not to be had, nothing
is lent, and the bytes go with the message.
"""

from __future__ import annotations

import contextlib
import os
import socket
from struct import Struct

import numpy as np
from numpy.typing import NDArray

LEAST_BYTES = 1 << 15
"""Fewer go with their message: a loan takes some 30 us."""
MOST_LENT = 512
"""Loans that wait to be fetched; beyond them the oldest ends."""
_FRAME = Struct("<QQ")  # number, bytes


class Lender:
    """The end of a socket that lends. Numbers begin at 1."""

    def __init__(self, peer: socket.socket) -> None:
        self._socket = peer
        self._lent = 0

    def lend(self, data: NDArray[np.float32]) -> int:
        """The number of the loan of a contiguous array's bytes; 0: they are not lent."""
        if data.nbytes < LEAST_BYTES:
            return 0
        with contextlib.suppress(OSError):
            descriptor = os.memfd_create("eyas-lent")
            try:
                with os.fdopen(descriptor, "wb", closefd=False) as file:
                    file.write(data.data)
                frame = _FRAME.pack(self._lent + 1, data.nbytes)
                sent = socket.send_fds(self._socket, [frame], [descriptor])
            finally:
                os.close(descriptor)
            if sent == _FRAME.size:
                self._lent += 1
                return self._lent
        return 0


class Borrower:
    """The other end. Other bytes on the socket wake its reader, and mean nothing else."""

    def __init__(self, peer: socket.socket) -> None:
        self._socket = peer
        self._here: dict[int, tuple[int, int]] = {}  # descriptor and bytes of each loan

    def listen(self) -> bool:
        """Takes the descriptors that have come. False: the other end has gone. Raises ConnectionError as
        well, if it went badly.
        """
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, _FRAME.size, 1)
            except BlockingIOError:
                return True
            if not data:
                return False
            for descriptor in descriptors:
                self._take(data, descriptor)

    def _take(self, data: bytes, descriptor: int) -> None:
        if len(data) != _FRAME.size:
            os.close(descriptor)
            return
        number, size = _FRAME.unpack(data)
        self._end(number)
        self._here[number] = descriptor, size
        if len(self._here) > MOST_LENT:
            self._end(next(iter(self._here)))

    def fetch(self, number: int) -> bytes | None:
        """The bytes of a loan, which ends; None: there is no such loan, or its owner has cut it."""
        if number not in self._here:
            return None
        descriptor, size = self._here[number]
        data = os.pread(descriptor, size, 0)
        self._end(number)
        return data if len(data) == size else None

    def _end(self, number: int) -> None:
        if (lent := self._here.pop(number, None)) is not None:
            os.close(lent[0])

    def close(self) -> None:
        """Ends all loans."""
        for number in list(self._here):
            self._end(number)
