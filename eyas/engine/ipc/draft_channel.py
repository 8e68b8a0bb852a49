"""The direct channel between a decode engine and a draft worker's engine on one host: a mailbox per sequence,
and a socket.

The decode engine offers it (`OfferedChannel`) and says so by way of the fronts; the draft worker answers
(`answer`): it connects, and hands over the memory that both then map, of its GPU too where the decode
engine's GPU is to write there. The memory has no name, so it is gone as soon as both have let go of it,
however they ended. The socket stays: a byte on it wakes the other host, its end says that the other engine
has let go. Only `answer` waits for the other engine, and `close` for the GPU.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from pathlib import Path
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from eyas.common.config import MOST_NODES
from eyas.common.errors import ConfigError
from eyas.engine.ipc.lending import Borrower, Lender
from eyas.engine.ipc.mailbox import STORES_IN_ORDER, DraftMailbox, MailLayout
from eyas.engine.ipc.messages import DraftChannel
from eyas.engine.ipc.row_ring import LocalGpu, RowMemory
from kv_transfer.gpu.driver import DriverError
from kv_transfer.host_files import HostFile, is_ours, listen_at

MOST_BYTES = 1 << 30  # of all that both map
CONNECT_S = 1.0  # to a socket that listens already
_ANSWER = Struct("<Q")  # bytes of the ring of rows; 0: there is none


class MailChannel:
    """An engine's end of a channel, used by the engine's thread only.

    `gone`: the other end has let go, or its process has ended. `rows`: where features are, if the decode
    engine's GPU writes rounds and takes drafts; None: its host does.
    """

    def __init__(self, peer: socket.socket, mailbox: DraftMailbox, rows: RowMemory | None) -> None:
        self._socket = peer
        self.mailbox = mailbox
        self.rows = rows
        self.gone = False
        self._free = list(range(mailbox.places - 1, -1, -1))
        self._lender, self._borrower = Lender(peer), Borrower(peer)
        peer.setblocking(False)

    @property
    def descriptor(self) -> int:
        """A file descriptor that can be read when there is mail to look for, or the other end has gone."""
        return self._socket.fileno()

    def take_place(self) -> int:
        """Takes a free place for a new sequence; -1: all are taken."""
        return self._free.pop() if self._free else -1

    def give_back(self, place: int) -> None:
        """Frees the place of a sequence that is followed no more.

        What is still written there is read by none.
        """
        self._free.append(place)

    def wake(self) -> None:
        """Wakes the other end, which then looks into its mailboxes."""
        try:
            self._socket.send(b"\0")
        except BlockingIOError:
            pass  # it has not heard the last ones yet
        except OSError:
            self.gone = True

    def listen(self) -> None:
        """Clears the wake-up of this end, or notices that the other end has gone."""
        try:
            self.gone = not self._borrower.listen() or self.gone
        except ConnectionError:
            self.gone = True

    def lend(self, data: NDArray[np.float32]) -> int:
        """The number by which the other end fetches these bytes; 0: they have to go with their message."""
        return self._lender.lend(data)

    def fetch(self, number: int) -> bytes | None:
        """What the other end has lent by this number; None: nothing."""
        self.listen()
        return self._borrower.fetch(number)

    def close(self) -> None:
        """Lets go of the memory, and tells the other end."""
        self._socket.close()
        self._borrower.close()
        self.mailbox.close()
        if self.rows is not None:
            self.rows.close()


class OfferedChannel:
    """A decode engine's offer: it listens at `path` until a draft worker has answered, or `close`.

    Raises ConfigError if it cannot be made here.
    """

    def __init__(self, path: Path, offer: DraftChannel, gpu: LocalGpu | None = None) -> None:
        """`offer`: without its export, which only the listener has."""
        if not STORES_IN_ORDER:
            raise ConfigError("this processor does not keep the order of its stores")
        self._path = path
        self._offer = offer
        self._gpu = gpu
        self._socket = listen_at(path, 1)
        self._socket.setblocking(False)
        self._answered = False
        self.export = HostFile.at(str(path)).export()

    @property
    def descriptor(self) -> int:
        """A file descriptor that can be read when `accept` has something to do."""
        return self._socket.fileno()

    def accept(self) -> MailChannel | None:
        """The channel, once a draft worker has answered. Raises ConfigError for an answer that is none."""
        try:
            if not self._answered:
                self._meet()
            data, descriptors, _, _ = socket.recv_fds(self._socket, _ANSWER.size, 2)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConfigError(f"the draft worker has hung up: {error.strerror or error}") from None
        try:
            if len(data) != _ANSWER.size or not descriptors:
                raise ConfigError("the draft worker has hung up")
            (size,) = _ANSWER.unpack(data)
            return self._made(size, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _made(self, size: int, descriptors: list[int]) -> MailChannel:
        """`size`: bytes of the draft worker's ring of rows. Errors: as of `accept`."""
        offer, gpu = self._offer, self._gpu if size else None
        place = _place(offer, by_device=size > 0)
        memory = _mapped(descriptors[0], place.nbytes(offer.places))
        if size and (gpu is None or len(descriptors) != 2):
            raise ConfigError("the draft worker has a ring of rows that was not asked for")
        rows = None if gpu is None else RowMemory.mapped(offer, gpu, descriptors[1], size)
        try:
            return MailChannel(self._socket, DraftMailbox(memoryview(memory), place, offer.places, gpu), rows)
        except DriverError as error:
            if rows is not None:
                rows.close()
            raise ConfigError(str(error)) from None

    def _meet(self) -> None:
        """Makes the socket the connection: from now on one peer may answer."""
        peer, _ = self._socket.accept()
        self.close()
        self._socket, self._answered = peer, True
        peer.setblocking(False)
        if not is_ours(peer):
            raise ConfigError("the draft worker runs as another user")

    def close(self) -> None:
        """Withdraws the offer: no draft worker can answer any more."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


def answer(offer: DraftChannel, width: int, pool_dir: str, rows: RowMemory | None = None) -> MailChannel:
    """The draft worker's end of a channel that was offered; `width` is that of its own head, `rows` what it
    has for features from the decode engine's GPU.

    Raises ConfigError, saying why, if the two are not on one host, or do not agree.
    """
    place = _place(offer, by_device=rows is not None)
    _check(offer, width, place)
    path = HostFile.find(offer.export, pool_dir).path
    memory, descriptor = _allocated(place.nbytes(offer.places))
    shared = [descriptor]
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.settimeout(CONNECT_S)
        peer.connect(path)
        if not is_ours(peer):
            raise ConfigError(f"the decode engine at {path} runs as another user")
        shared += [rows.export()] if rows is not None else []
        socket.send_fds(peer, [_ANSWER.pack(rows.size if rows is not None else 0)], shared)
    except (OSError, DriverError) as error:
        peer.close()
        raise ConfigError(f"{path} cannot be reached: {getattr(error, 'strerror', '') or error}") from None
    except ConfigError:
        peer.close()
        raise
    finally:
        for one in shared:
            os.close(one)
    return MailChannel(peer, _mailbox(memory, place, offer.places, rows), rows)


def _mailbox(memory: mmap.mmap, place: MailLayout, places: int, rows: RowMemory | None) -> DraftMailbox:
    """The draft worker's, for its GPU too where features come there; if the driver refuses, for its host."""
    if rows is not None:
        with contextlib.suppress(DriverError):
            return DraftMailbox(memoryview(memory), place, places, rows.gpu)
    return DraftMailbox(memoryview(memory), place, places)


def _place(offer: DraftChannel, *, by_device: bool) -> MailLayout:
    return MailLayout(offer.rows, offer.nodes, 0 if by_device else offer.width)


def _check(offer: DraftChannel, width: int, place: MailLayout) -> None:
    """Raises ConfigError for a channel that a peer may not ask for."""
    if offer.width != width:
        raise ConfigError(f"its features have {offer.width} values, the draft head's {width}")
    if not 1 <= offer.nodes <= MOST_NODES:
        raise ConfigError(f"nodes: {offer.nodes} is not between 1 and {MOST_NODES}")
    if min(offer.places, offer.rows) < 1:
        raise ConfigError(f"{offer.places} places of {offer.rows} rows are none")
    if place.nbytes(offer.places) > MOST_BYTES:
        raise ConfigError(f"it would take more than {MOST_BYTES / 2**30:g} GiB")


def _allocated(size: int) -> tuple[mmap.mmap, int]:
    """Memory without a name, allocated and not only sized, and its descriptor."""
    descriptor = os.memfd_create("eyas-drafts")
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size), descriptor
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"{size} bytes of shared memory cannot be had: {error.strerror}") from None


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    if os.fstat(descriptor).st_size != size:
        raise ConfigError("the draft worker's memory is not as large as was agreed")
    return mmap.mmap(descriptor, size)
