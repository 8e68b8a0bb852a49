"""Passes callers' connections on to gRPC, so that its limits hold from a caller's first byte.

gRPC bounds headers and calls by its SETTINGS, but not before a caller has acknowledged them: until then a
header may have 16 MiB, and its hundred thousand entries all become Python's, which stops every stream for
that time. So they are acknowledged here in the caller's place (`SettingsOpening`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from typing import Any

from eyas.common.cluster.listening import BACKLOG
from eyas.common.logging import RateLimitedLogger
from eyas.common.security.tls import TlsListener

FLUSH_S = 5.0  # a caller that takes less than what waits for it is gone: gRPC's own pings would say the same
LAST_S = 3.0  # for the last bytes at the gateway's end, as over HTTP; its group kills it after 5 s
_log = logging.getLogger("eyas.gateway")
_alarm = RateLimitedLogger(_log)


PREFACE_BYTES = 24
HEAD_BYTES = 9  # of a frame: length (3), type, flags, stream (4)
SETTINGS, ACK = 4, 1
ACKNOWLEDGED = bytes((0, 0, 0, SETTINGS, ACK, 0, 0, 0, 0))
MAX_BYTES = 1 << 20  # a caller acknowledges as soon as it has read a server's first bytes
MAX_FRAMES = 1 << 13  # a look at each takes some microseconds


# The opening of an HTTP/2 connection, until the SETTINGS are acknowledged in the caller's place. Bytes in,
# bytes out: no sockets.
class SettingsOpening:
    """The server's SETTINGS are acknowledged right behind the caller's own; the caller's acknowledgement,
    which comes later, is kept back.
    """

    def __init__(self) -> None:
        self.over = False  # what comes now needs no look
        self._rest = PREFACE_BYTES  # of what has begun to pass
        self._behind = b""  # passes once that has
        self._head = b""  # the part of a frame's head that has come
        self._frames = 0
        self._bytes = 0

    def passes(self, data: bytes) -> bytes:
        """Returns the bytes that the server gets for these.

        Raises ValueError if `MAX_BYTES` or `MAX_FRAMES` came without an acknowledgement.
        """
        self._bytes += len(data)
        data, passed, at = self._head + data, bytearray(), 0
        self._head = b""
        while at < len(data) and not self.over:
            if self._rest:
                part = data[at : at + self._rest]
                passed += part
                at += len(part)
                self._rest -= len(part)
            elif len(data) - at < HEAD_BYTES:
                self._head = data[at:]
                at = len(data)
            else:
                head = data[at : at + HEAD_BYTES]
                at += HEAD_BYTES
                passed += self._begin(head)
            if not self._rest:
                passed += self._behind
                self._behind = b""
        if not self.over and self._bytes > MAX_BYTES:
            raise ValueError(f"{MAX_BYTES} bytes came, and no acknowledgement of SETTINGS")
        return bytes(passed + data[at:])

    def _begin(self, head: bytes) -> bytes:
        """A frame begins. Gives what passes of its head."""
        self._frames += 1
        if self._frames > MAX_FRAMES:
            raise ValueError(f"{MAX_FRAMES} frames came, and no acknowledgement of SETTINGS")
        length, settings, acknowledges = int.from_bytes(head[:3]), head[3] == SETTINGS, bool(head[4] & ACK)
        if self._frames == 1:
            if settings and not acknowledges:
                self._behind = ACKNOWLEDGED
            else:
                self.over = True  # a server refuses any other beginning
        elif settings and acknowledges and not length:
            self.over = True
            return b""
        self._rest = length
        return head


class GrpcRelay:
    """Takes connections at `listener`, which is its own from now on, and passes them on to the socket `path`.

    `tls` None: callers speak in plain. `limit`: of TLS handshakes at a time; gRPC itself bounds connections.
    """

    def __init__(self, listener: socket.socket, path: str, tls: ssl.SSLContext | None, limit: int) -> None:
        self.port = int(listener.getsockname()[1])
        self._listener = listener
        self._path = path
        self._tls = None if tls is None else TlsListener(listener, tls, limit)
        self._accepting: asyncio.Task[None] | None = None
        self._callers: set[_CallerEnd] = set()

    def start(self) -> None:
        """Takes connections from now on (the socket has listened since it was made)."""
        accepting = self._accept() if self._tls is None else self._tls.accept(self._protocol)
        self._accepting = asyncio.create_task(accepting, name="grpc relay")

    async def stop(self) -> None:
        """Takes no more connections. Open ones go on."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()

    async def aclose(self) -> None:
        """Closes, after gRPC has ended its connections: callers have `LAST_S` to take their last bytes."""
        if self._callers:
            await asyncio.wait([caller.gone for caller in self._callers], timeout=LAST_S)
        for caller in self._callers:
            caller.abort()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self._protocol, sock=self._listener, backlog=BACKLOG)
        with contextlib.closing(server):  # `serve_forever` would wait, at the end, for open connections
            await loop.create_future()

    def _protocol(self) -> _CallerEnd:
        return _CallerEnd(self._path, self._callers)


class _RelayEnd(asyncio.Protocol):
    """One end of a relayed connection. While it takes bytes slowly, the other end is read slowly."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _RelayEnd | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if (other := self.open_other()) is not None:
            other.write(data)

    def pause_writing(self) -> None:
        if (other := self.open_other()) is not None:
            other.pause_reading()

    def resume_writing(self) -> None:
        if (other := self.open_other()) is not None:
            other.resume_reading()

    def open_other(self) -> asyncio.Transport | None:
        """The other end's transport, unless it is closed or not there yet."""
        other = None if self.other is None else self.other.transport
        return None if other is None or other.is_closing() else other

    def abort(self) -> None:
        """Closes it at once."""
        if self.transport is not None:
            self.transport.abort()


class _CallerEnd(_RelayEnd):
    """The caller's end. `callers`: those that are open."""

    def __init__(self, path: str, callers: set[_CallerEnd]) -> None:
        super().__init__()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._path = path
        self._callers = callers
        self._opening: SettingsOpening | None = SettingsOpening()
        self._early: bytes | None = b""  # what came before gRPC's first bytes; None once they are here
        self._dialling: asyncio.Task[None] | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._callers.add(self)
        self._dialling = asyncio.create_task(self._dial(), name="grpc relay")

    async def _dial(self) -> None:
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: _ServiceEnd(self), self._path)
        except OSError as error:
            _alarm.warning("a caller does not get through to gRPC: %s", error)
            self.abort()

    def begin(self) -> None:
        """gRPC has said its SETTINGS."""
        early, self._early = self._early, None
        if early and self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()
            self.data_received(early)

    def data_received(self, data: bytes) -> None:
        if self._early is not None:
            self._early += data
            assert self.transport is not None
            self.transport.pause_reading()
            return
        if self._opening is not None:
            try:
                data = self._opening.passes(data)
            except ValueError as error:
                _alarm.warning("a gRPC connection is closed: %s", error)
                self.abort()
                return
            if self._opening.over:
                self._opening = None
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_soon()

    def resume_writing(self) -> None:
        if self._stalled is not None and self.transport is not None and not self.transport.is_closing():
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def eof_received(self) -> None:
        """The caller says no more: the transport closes once the caller has taken what waits for it."""
        self._end_soon()

    def close(self) -> None:
        """Closes it once it has taken what waits for it."""
        assert self.transport is not None
        self.transport.close()
        self._end_soon()

    def _end_soon(self) -> None:
        if self._stalled is None:
            self._stalled = asyncio.get_running_loop().call_later(FLUSH_S, self.abort)

    def connection_lost(self, error: Exception | None) -> None:
        self._callers.discard(self)
        if self._stalled is not None:
            self._stalled.cancel()
        if self._dialling is not None:
            self._dialling.cancel()
        if self.other is not None:
            self.other.abort()
        if not self.gone.done():
            self.gone.set_result(None)


class _ServiceEnd(_RelayEnd):
    """The end at gRPC."""

    def __init__(self, caller: _CallerEnd) -> None:
        super().__init__()
        self.other: _CallerEnd = caller
        self._started = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.other.other = self
        if self.open_other() is None:
            self.abort()

    def data_received(self, data: bytes) -> None:
        if not self._started:
            self._started = True
            self.other.begin()
        super().data_received(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.open_other() is not None:
            self.other.close()
