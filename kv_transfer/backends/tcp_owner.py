"""The owner's side of `tcp`: a listener whose threads send pages of one area to peers that have its token.

    puller                                      owner
    MAGIC, token                     ->
                                     <-         pages, bytes of a page      (of a wrong token: it hangs up)
    runs and bytes of each page,
    then first and count each        ->
                                     <-         the bytes, XXH3-64 of all of them
    the next runs                    ->         ..

All numbers are little-endian. What pages hold, and until when, is not known here: a lease is judged after all
bytes have come. The kernel copies pages in half of the time if no odd bytes go before them: so their hash
goes behind, and they are sent out of the mapped area, not 4 KiB by 4 KiB out of its file.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading

import xxhash

from kv_transfer.area import PoolArea

MAGIC = b"eyas-kv3"
HELLO, AREA = struct.Struct("<8s32s"), struct.Struct("<QQ")
COUNT, RUN, DIGEST = struct.Struct("<IQ"), struct.Struct("<II"), struct.Struct("<Q")
MOST_RUNS = 1024  # of a request
MOST_CONNECTIONS = 256
MOST_STRANGERS = 64  # connections that have shown no token yet
HELLO_S, IDLE_S, SEND_S = 5.0, 120.0, 20.0  # for the token; between requests; for a run of pages
AGAIN_S = 0.2  # before it accepts again, where it could not

_log = logging.getLogger("eyas.pulls")


class PageServer:
    """Sends pages of `area`, which lies in a file. It listens on `host` where that is this machine's, else
    everywhere, and tells pullers `host`. Raises OSError if it cannot listen.
    """

    def __init__(self, area: PoolArea, host: str) -> None:
        self.token = secrets.token_bytes(32)
        self.host = host
        self._area = area
        self._listener = _listener(host)
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._connections: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}  # connections without a token, the eldest first
        self._lock = threading.Lock()
        self._closing = threading.Event()
        threading.Thread(target=self._accept, name="tcp-listen", daemon=True).start()

    @property
    def port(self) -> int:
        """Its port, chosen by the system."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Hangs up on everyone."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                _hang_up(connection)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                self._begin(self._listener.accept()[0])
            except (OSError, RuntimeError) as error:  # no file, or no thread, is free for it
                if not self._closing.wait(AGAIN_S):
                    _log.warning("tcp: a connection for KV pages could not be taken: %s", error)

    def _begin(self, connection: socket.socket) -> None:
        """Serves a connection on a thread of its own. Of too many strangers the eldest has to go: a puller's
        token comes with its connection, so those who only connect keep nobody out.
        """
        with contextlib.ExitStack() as undo:
            undo.enter_context(connection)
            with self._lock:
                if len(self._strangers) >= MOST_STRANGERS:
                    eldest = next(iter(self._strangers))
                    del self._strangers[eldest]
                    _hang_up(eldest)
                self._strangers[connection] = None
            undo.callback(self._strangers.pop, connection, None)
            threading.Thread(target=self._connected, args=(connection,), daemon=True).start()
            undo.pop_all()

    def _connected(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.add(connection)
        try:
            with connection:
                self._greet(connection)
        except (OSError, ValueError) as error:  # the puller is gone, or is none
            _log.debug("tcp: a connection for KV pages ended: %s", error)
        finally:
            with self._lock:
                self._connections.discard(connection)
                self._strangers.pop(connection, None)

    def _greet(self, connection: socket.socket) -> None:
        """Serves peers that show the token, unless there are too many."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(HELLO_S)
        if not hmac.compare_digest(received(connection, HELLO.size), HELLO.pack(MAGIC, self.token)):
            return
        if not self._free.acquire(blocking=False):
            _log.warning("tcp: more than %d connections for KV pages", MOST_CONNECTIONS)
            return
        with self._lock:
            self._strangers.pop(connection, None)
        try:
            self._serve(connection)
        finally:
            self._free.release()

    def _serve(self, connection: socket.socket) -> None:
        connection.sendall(AREA.pack(*self._area.pages.shape))
        while True:
            connection.settimeout(IDLE_S)
            width, runs = self._runs(connection)
            connection.settimeout(SEND_S)
            self._send(connection, width, runs)

    def _runs(self, connection: socket.socket) -> tuple[int, list[tuple[int, int]]]:
        """The next request: bytes of each page, and the pages. Raises ValueError for pages that are none."""
        count, width = COUNT.unpack(received(connection, COUNT.size))
        if not 0 < count <= MOST_RUNS:
            raise ValueError(f"a request of {count} runs")
        if not 0 < width <= self._area.pages.shape[1]:
            raise ValueError(f"a request of {width} bytes of each page")
        runs = list(RUN.iter_unpack(received(connection, count * RUN.size)))
        if any(first + pages > len(self._area.pages) for first, pages in runs):
            raise ValueError("a request for pages that the area does not have")
        return width, runs

    def _send(self, connection: socket.socket, width: int, runs: list[tuple[int, int]]) -> None:
        digest, size = xxhash.xxh3_64(), self._area.pages.shape[1]
        whole = self._area.pages.reshape(-1).data
        pieces = [whole[first * size : (first + pages) * size] for first, pages in runs]
        if width < size:
            starts = [(first + i) * size for first, pages in runs for i in range(pages)]
            pieces = [whole[start : start + width] for start in starts]
        for piece in pieces:
            digest.update(piece)
            connection.sendall(piece)
        connection.sendall(DIGEST.pack(digest.intdigest()))


def received(connection: socket.socket, count: int) -> bytes:
    """`count` bytes. Raises ConnectionError if it ends before them, TimeoutError if they are late."""
    data = bytearray()
    while len(data) < count:
        some = connection.recv(count - len(data))
        if not some:
            raise ConnectionResetError("the connection was closed")
        data += some
    return bytes(data)


def _listener(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=64)
    except OSError:  # a name that others dial, such as a container's host's
        return socket.create_server(("", 0), family=family, backlog=64)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
