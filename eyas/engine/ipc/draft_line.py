"""A line between a decode engine and a draft worker's engine on the same host: two rings and a bell, and
on GPUs a ring of rows and a mailbox beside them.

The decode engine offers it (`OfferedLine`) and says so by way of the fronts; the draft worker answers
(`answer`): it connects, and hands over the memory that both then map. The memory has no name, so it is gone
as soon as both have let go of it, however they ended. The connection stays: a byte on it says that there are
new records, its end that the other engine has let go. No record is waited for: `answer` alone waits for the
other engine to accept, and `close` for the GPU. It knows how records come and go, and nothing of sequences.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Generic, TypeVar

from eyas.common.config import MOST_NODES, MOST_STEPS
from eyas.common.errors import ConfigError
from eyas.engine.ipc.draft_records import CommitRecords, ProposalRecords, Records
from eyas.engine.ipc.mailbox import PAGE, Mailbox, MailLayout
from eyas.engine.ipc.messages import DraftCommit, DraftLine, Proposal
from eyas.engine.ipc.ring import STORES_IN_ORDER, RingReader, RingShape, RingWriter
from eyas.engine.ipc.row_memory import Gpu, RowMemory
from kv_transfer.gpu.driver import DriverError
from kv_transfer.host_file import HostFile
from kv_transfer.host_socket import is_ours, listen_at

MOST_RECORDS = 8192  # each way
MOST_BYTES = 1 << 30  # of all that both map
CONNECT_S = 1.0  # to a socket that listens already
_RUNG = 4096  # bytes of the bell, read at once
_ANSWER = Struct("<Q")  # bytes of the ring of rows; 0: there is none

_log = logging.getLogger("eyas.engine")

Out = TypeVar("Out")
In = TypeVar("In")


class Line(Generic[Out, In]):
    """One engine's end: it posts `Out` and takes `In`. Used by the engine's thread only.

    `gone`: the other end has let go, or its process has ended; what it had published is still taken. `rows`:
    where features are, if the devices move them by themselves. `mailbox`: where rounds and drafts are, if the
    device of the decode engine takes them there.
    """

    def __init__(
        self,
        bell: socket.socket,
        out: tuple[RingWriter, Records[Out]],
        into: tuple[RingReader, Records[In]],
        rows: RowMemory | None,
        mailbox: Mailbox | None,
    ) -> None:
        self._bell = bell
        self._writer, self._written = out
        self._reader, self._read = into
        self.rows = rows
        self.mailbox = mailbox
        self.gone = False
        bell.setblocking(False)

    @property
    def descriptor(self) -> int:
        """It can be read when there is something to take, or the other end has gone."""
        return self._bell.fileno()

    def post(self, message: Out) -> bool:
        """Writes one record; `ring` tells of it. False: the ring is full, or no record holds the message."""
        record = self._writer.begin() if self._written.fits(message) else None
        if record is None:
            return False
        self._written.write(record, message)
        self._writer.publish()
        return True

    def ring(self) -> None:
        """Wakes the other end, which then takes all that was posted."""
        try:
            self._bell.send(b"\0")
        except BlockingIOError:
            pass  # it has not heard the last ones yet
        except OSError:
            self.gone = True

    def take(self) -> list[In]:
        """Everything that was posted at the other end since the last call, but what is no message."""
        self._listen()
        taken: list[In] = []
        while (record := self._reader.look()) is not None:
            message = self._read.read(record)
            if self._reader.release() and message is not None:
                taken.append(message)
        return taken

    def _listen(self) -> None:
        try:
            while self._bell.recv(_RUNG):
                pass
            self.gone = True
        except BlockingIOError:
            pass  # there is no more
        except ConnectionError:
            self.gone = True

    def close(self) -> None:
        """Lets go of the memory, and tells the other end."""
        self._bell.close()
        self._writer.close()
        self._reader.close()
        if self.mailbox is not None:
            self.mailbox.close()
        if self.rows is not None:
            self.rows.close()


class OfferedLine:
    """A decode engine's offer: it listens at `path` until a draft worker has answered, or `close`.

    Raises ConfigError if it cannot be made here.
    """

    def __init__(self, path: Path, line: DraftLine, gpu: Gpu | None = None) -> None:
        """`line`: without its export, which only the listener has."""
        if not STORES_IN_ORDER:
            raise ConfigError("this processor does not keep the order of its stores")
        self._path = path
        self._line = line
        self._gpu = gpu
        self._socket = listen_at(path, 1)
        self._socket.setblocking(False)
        self._answered = False
        self.export = HostFile.at(str(path)).export()

    @property
    def descriptor(self) -> int:
        """It can be read when `accept` has something to do."""
        return self._socket.fileno()

    def accept(self) -> Line[DraftCommit, Proposal] | None:
        """The line, once a draft worker has answered. Raises ConfigError for an answer that is none."""
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
            parts = _Parts.of(self._line, mailbox=size > 0)
            memory = _mapped(descriptors[0], parts.nbytes)
            rows = self._rows(descriptors[1:], size)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        view = memoryview(memory)
        return Line(
            self._socket,
            (RingWriter(view[: parts.split], parts.commits), CommitRecords(self._line)),
            (RingReader(view[parts.split :], parts.proposals), ProposalRecords(self._line)),
            rows,
            self._mailbox(view[parts.mailbox :]) if rows is not None else None,
        )

    def _mailbox(self, memory: memoryview) -> Mailbox | None:
        """For this engine's GPU, if that can use memory of the host."""
        line = self._line
        try:
            return Mailbox(memory, MailLayout(line.kept, line.nodes), line.places, self._gpu)
        except DriverError as error:
            _log.warning("rounds and drafts go by the host: %s", error)
            return None

    def _rows(self, descriptors: list[int], size: int) -> RowMemory | None:
        """The draft worker's ring of rows, if it made one that can be reached from here."""
        if self._gpu is None or len(descriptors) != 1:
            return None
        try:
            return RowMemory.mapped(self._line, self._gpu, descriptors[0], size)
        except ConfigError as error:
            _log.warning("features go by shared memory: %s", error.message)
            return None

    def _meet(self) -> None:
        """From now on the socket is the connection: one peer may answer."""
        peer, _ = self._socket.accept()
        self.close()
        self._socket, self._answered = peer, True
        peer.setblocking(False)
        if not is_ours(peer):
            raise ConfigError("the draft worker runs as another user")

    def close(self) -> None:
        """No draft worker can answer any more."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


def answer(
    line: DraftLine, width: int, pool_dir: str, rows: RowMemory | None = None
) -> Line[Proposal, DraftCommit]:
    """The draft worker's end of a line that was offered; `width` is that of its own head, `rows` what it has
    for features that come past the host.

    Raises ConfigError, saying why, if the two are not on one host, or do not agree.
    """
    parts = _Parts.of(line, mailbox=rows is not None)
    _check(line, width, parts)
    path = HostFile.find(line.export, pool_dir).path
    memory, descriptor = _allocated(parts.nbytes)
    shared = [descriptor]
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bell.settimeout(CONNECT_S)
        bell.connect(path)
        if not is_ours(bell):
            raise ConfigError(f"the decode engine at {path} runs as another user")
        shared += [rows.export()] if rows is not None else []
        socket.send_fds(bell, [_ANSWER.pack(rows.size if rows is not None else 0)], shared)
    except (OSError, DriverError) as error:
        bell.close()
        raise ConfigError(f"{path} cannot be reached: {getattr(error, 'strerror', '') or error}") from None
    except ConfigError:
        bell.close()
        raise
    finally:
        for one in shared:
            os.close(one)
    view = memoryview(memory)
    return Line(
        bell,
        (RingWriter(view[parts.split :], parts.proposals), ProposalRecords(line)),
        (RingReader(view[: parts.split], parts.commits), CommitRecords(line)),
        rows,
        Mailbox(view[parts.mailbox :], MailLayout(line.kept, line.nodes), line.places)
        if rows is not None
        else None,
    )


def _check(line: DraftLine, width: int, parts: _Parts) -> None:
    """Raises ConfigError for a line that a peer may not ask for."""
    if line.width != width:
        raise ConfigError(f"its features have {line.width} values, the draft head's {width}")
    bounds = {"records": MOST_RECORDS, "rows": MOST_STEPS + 1, "nodes": MOST_NODES}
    for name, most in bounds.items():
        if not 1 <= getattr(line, name) <= most:
            raise ConfigError(f"{name}: {getattr(line, name)} is not between 1 and {most}")
    if parts.nbytes > MOST_BYTES:
        raise ConfigError(f"it would take more than {MOST_BYTES / 2**30:g} GiB")


@dataclass(frozen=True)
class _Parts:
    """Of a line's memory, `nbytes` in all: the ring of commits, from byte `split` on that of proposals, from
    `mailbox` on that, if there is one.
    """

    commits: RingShape
    proposals: RingShape
    mailbox: int
    nbytes: int

    @property
    def split(self) -> int:
        return self.commits.nbytes

    @classmethod
    def of(cls, line: DraftLine, *, mailbox: bool) -> _Parts:
        commits = RingShape(line.records, CommitRecords(line).size)
        proposals = RingShape(line.records, ProposalRecords(line).size)
        rings = commits.nbytes + proposals.nbytes
        if not mailbox:
            return cls(commits, proposals, rings, rings)
        first = -(-rings // PAGE) * PAGE
        size = MailLayout(line.kept, line.nodes).nbytes(line.places)
        return cls(commits, proposals, first, first + size)


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
