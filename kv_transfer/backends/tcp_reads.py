"""The puller's side of `tcp`: threads that read pages of peers, each over connections of its own.

A job is cut into requests, and jobs take turns, so that a long one delays no other by more than a request for
each thread. A connection that breaks is made anew, and its request is made again: a job fails when it is
late, when its peer's process is gone, or when bytes were altered on their way time after time.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from eyas.common.errors import Cancelled, EyasError, TransferFailed
from kv_transfer.area import PoolArea
from kv_transfer.backends.base import CopyJob, PeerSource, check_pages, runs
from kv_transfer.backends.tcp_owner import AREA, COUNT, DIGEST, HELLO, MAGIC, MOST_RUNS, RUN, received
from kv_transfer.copy_threads import CopyDone

SOCKETS = 8  # threads, and so connections to one peer
REQUEST_BYTES = 4 << 20
COPY_S, SLOWEST_BYTES_S = 10.0, 50e6  # a job may take this long, and the time of its bytes at this rate
CONNECT_S, LOOK_S, STALL_S = 2.0, 0.2, 3.0  # STALL_S without a byte: the connection is taken for broken
PAUSE_S = 0.1  # before a request is made again
MOST_LINKS = 16  # of a thread
MOST_GARBLED = 3  # requests of a job

_log = logging.getLogger("eyas.pulls")

Request = tuple[tuple[int, int, int], ...]
"""Runs of pages: the first one there, the first one here, and how many."""


@dataclass(eq=False)
class TcpPeer(PeerSource):
    """A peer's listener. `pages`: how many its area has; `page_bytes`: of each, once it has answered."""

    host: str
    port: int
    token: bytes
    pages: int
    is_staging: bool = False
    page_bytes: int = 0
    gone: bool = False

    @property
    def current(self) -> bool:
        return not self.gone

    @property
    def address(self) -> str:
        """The peer's address, for messages."""
        return f"{self.host}:{self.port}"


@dataclass(eq=False)
class _SocketJob:
    """A job, until nothing of it runs. `left`: requests that no thread has; `running`: those that one has."""

    job: CopyJob
    peer: TcpPeer
    left: deque[Request]
    began: float
    deadline: float
    running: int = 0
    moved: int = 0
    garbled: int = 0
    error: EyasError | None = None

    def fail(self, error: EyasError) -> None:
        """Begins no more of it; threads that read for it stop within LOOK_S."""
        self.left.clear()
        self.error = self.error or error

    def check(self) -> None:
        """Raises why it should stop."""
        if self.error is not None:
            raise self.error
        if time.monotonic() >= self.deadline:
            raise TransferFailed(f"a copy by tcp took longer than {self.deadline - self.began:.0f} s")


class SocketReads:
    """Reads into `area`. `done` is called once for each job, by any thread."""

    def __init__(self, area: PoolArea, done: Callable[[CopyDone[CopyJob]], None]) -> None:
        self._area = area
        self._done = done
        self._jobs: dict[tuple[int, int], _SocketJob] = {}
        self._turns: deque[_SocketJob] = deque()  # those with requests left
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._closing = False

    def add(self, peer: TcpPeer, job: CopyJob) -> None:
        """Queues a job. One `CopyDone` follows."""
        page_bytes, now = self._area.pages.shape[1], time.monotonic()
        deadline = now + COPY_S + len(job.dst_pages) * page_bytes / SLOWEST_BYTES_S
        reading = _SocketJob(job, peer, deque(), now, deadline)
        with self._changed:
            try:
                if self._closing:
                    raise Cancelled("the worker is stopping")
                check_pages(job, peer.pages)
            except EyasError as error:
                self._done(CopyDone(job, 0, 0.0, error))
                return
            reading.left.extend(_cut(job, page_bytes))
            self._jobs[job.name] = reading
            self._turns.append(reading)
            self._settle(reading)
            self._start()
            self._changed.notify_all()

    def cancel(self, job: CopyJob) -> None:
        """Ends it early. Jobs that are over are none of this."""
        with self._changed:
            if job.name in self._jobs:
                self._end(self._jobs[job.name], Cancelled("the copy was given up"))

    def close(self, deadline: float) -> bool:
        """Ends all; False if a thread still reads at `deadline` (monotonic seconds)."""
        with self._changed:
            self._closing = True
            for reading in list(self._jobs.values()):
                self._end(reading, Cancelled("the worker is stopping"))
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self) -> None:
        """Starts the threads, at the first job."""
        for number in range(len(self._threads), SOCKETS):
            thread = threading.Thread(target=self._work, name=f"copy-tcp-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        links = _Links(self._area)
        while (taken := self._take()) is not None:
            reading, request = taken
            error: Exception | None = None
            try:
                links.read(reading, request)
            except Exception as failure:  # a defect as well: its job must end, and others wait
                error = failure
            with self._changed:
                again = self._stopped(reading, request, error)
            if again:
                time.sleep(PAUSE_S)
        links.close()

    def _take(self) -> tuple[_SocketJob, Request] | None:
        """The next request, of the job whose turn it is. None: it is closing."""
        with self._changed:
            while not self._turns and not self._closing:
                self._changed.wait()
            if not self._turns:
                return None
            reading = self._turns.popleft()
            request = reading.left.popleft()
            reading.running += 1
            if reading.left:
                self._turns.append(reading)
            return reading, request

    def _stopped(self, reading: _SocketJob, request: Request, error: Exception | None) -> bool:
        """Counts a request that runs no more; whether it is to be made again, after a while."""
        reading.running -= 1
        again = False
        if error is None:
            width = reading.job.part.width or self._area.pages.shape[1]
            reading.moved += sum(count for _, _, count in request) * width
        elif isinstance(error, EyasError):
            self._end(reading, error)
        elif reading.error is None:
            reading.garbled += isinstance(error, _GarbledError)
            again = self._repeatable(reading, error)
        if again:
            _log.info("tcp: pages of %s are read again: %s", reading.peer.address, error)
            reading.left.appendleft(request)
            if reading not in self._turns:
                self._turns.append(reading)
            self._changed.notify()
        self._settle(reading)
        return again

    def _repeatable(self, reading: _SocketJob, error: Exception) -> bool:
        """Ends the job if it is no use."""
        peer = reading.peer
        peer.gone = peer.gone or isinstance(error, ConnectionRefusedError)
        if peer.gone or not peer.page_bytes or reading.garbled > MOST_GARBLED:
            self._end(reading, TransferFailed(f"pages of {peer.address} cannot be read: {error}"))
            return False
        return True

    def _end(self, reading: _SocketJob, error: EyasError) -> None:
        reading.fail(error)
        if reading in self._turns:
            self._turns.remove(reading)
        self._settle(reading)

    def _settle(self, reading: _SocketJob) -> None:
        """Reports a job of which nothing runs and nothing is left, once."""
        if reading.running or reading.left or self._jobs.pop(reading.job.name, None) is None:
            return
        if reading in self._turns:
            self._turns.remove(reading)
        moved = 0 if reading.error else reading.moved
        self._done(CopyDone(reading.job, moved, time.monotonic() - reading.began, reading.error))


class _GarbledError(Exception):
    """Bytes came that are not those that were sent."""


class _Links:
    """One thread's connections, those used last kept."""

    def __init__(self, area: PoolArea) -> None:
        self._area = area
        self._links: OrderedDict[TcpPeer, socket.socket] = OrderedDict()

    def read(self, reading: _SocketJob, request: Request) -> None:
        """Raises OSError if the connection broke, _GarbledError, or an EyasError that ends the job. The
        connection is closed then."""
        peer = reading.peer
        reading.check()
        fresh = peer not in self._links
        try:
            try:
                self._read(self._link(peer), reading, request)
            except ConnectionError:
                if fresh:
                    raise
                self._drop(peer)  # the owner hangs up on connections that rest
                self._read(self._link(peer), reading, request)
        except BaseException:
            self._drop(peer)
            raise

    def close(self) -> None:
        """Closes all."""
        for peer in list(self._links):
            self._drop(peer)

    def _link(self, peer: TcpPeer) -> socket.socket:
        if peer not in self._links:
            while len(self._links) >= MOST_LINKS:
                self._drop(next(iter(self._links)))
            self._links[peer] = _connected(peer)
        self._links.move_to_end(peer)
        return self._links[peer]

    def _drop(self, peer: TcpPeer) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.close()

    def _read(self, link: socket.socket, reading: _SocketJob, request: Request) -> None:
        words = [RUN.pack(source, count) for source, _, count in request]
        width = self._width(reading)
        link.sendall(COUNT.pack(len(request), width) + b"".join(words))
        tail, digest = bytearray(DIGEST.size), xxhash.xxh3_64()
        for _, first, count in request:
            for memory in self._places(first, count, width):
                _fill(link, memory, reading)
                digest.update(memory)
        _fill(link, memoryview(tail), reading)
        if (digest.intdigest(),) != DIGEST.unpack(tail):
            raise _GarbledError("bytes were altered on their way")

    def _width(self, reading: _SocketJob) -> int:
        """Bytes of each page. Raises TransferFailed if pages there do not have them."""
        peer, size = reading.peer, self._area.pages.shape[1]
        width = reading.job.part.width or size
        if width > peer.page_bytes or (not reading.job.part.width and size != peer.page_bytes):
            raise TransferFailed(
                f"{peer.address} has pages of {peer.page_bytes} bytes, not those of the peer"
            )
        return width

    def _places(self, first: int, count: int, width: int) -> list[memoryview]:
        pages = self._area.pages[first : first + count]
        return [pages.reshape(-1).data] if width == pages.shape[1] else [page[:width].data for page in pages]


def _connected(peer: TcpPeer) -> socket.socket:
    """Raises OSError; TransferFailed if somebody else listens there."""
    with contextlib.ExitStack() as undo:
        link = undo.enter_context(socket.create_connection((peer.host, peer.port), CONNECT_S))
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(HELLO.pack(MAGIC, peer.token))
        pages, size = AREA.unpack(received(link, AREA.size))
        if pages != peer.pages or size == 0:
            raise TransferFailed(f"{peer.address} has {pages} pages of {size} bytes, not those of the peer")
        peer.page_bytes = size
        link.settimeout(LOOK_S)
        undo.pop_all()
        return link


def _fill(link: socket.socket, memory: memoryview, reading: _SocketJob) -> None:
    """Receives as many bytes as there is memory."""
    got, last = 0, time.monotonic()
    while got < len(memory):
        reading.check()
        try:
            count = link.recv_into(memory[got:])
        except TimeoutError:
            if time.monotonic() >= last + STALL_S:
                raise
            continue
        if count == 0:
            raise ConnectionResetError("the connection was closed")
        got, last = got + count, time.monotonic()


def _cut(job: CopyJob, page_bytes: int) -> list[Request]:
    """Cuts a job into requests of at most REQUEST_BYTES, or a page."""
    most = max(1, REQUEST_BYTES // page_bytes)
    pieces = [
        (src + at, dst + at, min(most, count - at))
        for src, dst, count in runs(job.source.pages, job.dst_pages)
        for at in range(0, count, most)
    ]
    requests: list[list[tuple[int, int, int]]] = []
    room = 0
    for piece in pieces:
        if piece[2] > room or len(requests[-1]) == MOST_RUNS:
            requests.append([])
            room = most
        requests[-1].append(piece)
        room -= piece[2]
    return [tuple(request) for request in requests]
