"""HTTP/1.1 for untrusted clients: uvicorn's protocol with bounds on everything that a client can stretch.

It bounds the size and the time of headers, the chunks of a body, idle and stalled connections, and the number
of connections. A body's bytes are bounded where they are read (`gateway.http.wire`). A head is refused if two
readers could see different ends of the body: one of them would take a part of the body for a request. This
file reads uvicorn's private state: `pyproject.toml` bounds the versions that it is written for.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import httptools
from starlette.types import Message
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from eyas.common.errors import (
    EyasError,
    HeadersTooLarge,
    InvalidRequest,
    PayloadTooLarge,
    RequestTimeout,
    Unavailable,
)
from eyas.common.logging import RateLimitedLogger, known_as
from gateway.backends.answer import PARTS, BodyParts
from gateway.formats.openai_reply import error_body

_CHUNK_LINES = 16  # bytes around a chunk of a body: its length and two line ends
_log = logging.getLogger("eyas.gateway")
Headers: TypeAlias = list[tuple[bytes, bytes]]  # names in lower case

_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)([/?][^#]*)?", re.IGNORECASE)


# Parts of streamed responses on their way out: one write per connection and turn of the event loop. A decode
# step gives tokens to many streams at once. Their parts are held until all of them are rendered, and then
# leave one after the other, so that readers on this host are woken once.
class PartsOutbox:
    """The connections of one server that hold parts: they are flushed when the loop next turns."""

    __slots__ = ("_holders",)

    def __init__(self) -> None:
        self._holders: list[BufferedParts] = []

    def add(self, holder: BufferedParts) -> None:
        """`holder` has begun to hold parts."""
        if not self._holders:
            asyncio.get_running_loop().call_soon(self._flush)
        self._holders.append(holder)

    def _flush(self) -> None:
        holders, self._holders = self._holders, []
        for holder in holders:
            holder.flush()


class BufferedParts(BodyParts):
    """The parts of a connection's responses with chunked bodies, one after the other.

    The connection says when the client reads too slowly (`blocked`), and when nothing may leave any more
    (`cut`). What is before a body and after it is not sent here.
    """

    __slots__ = ("_flow", "_more", "_outbox", "_part", "_transport", "blocked", "cut")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, outbox: PartsOutbox) -> None:
        self._transport = transport
        self._flow = flow
        self._outbox = outbox
        self._part = b""  # what waits: most turns of the loop bring a connection one part
        self._more: list[bytes] | None = None  # those behind it
        self.blocked = False
        self.cut = False

    def write(self, part: bytes) -> None:
        if not self._part:
            self._part = part
            self._outbox.add(self)
        elif self._more is None:
            self._more = [part]
        else:
            self._more.append(part)

    def flush(self) -> None:
        part, more = self._part, self._more
        self._part, self._more = b"", None
        if part and not self.cut and not self._transport.is_closing():
            if more is not None:
                part = b"".join((part, *more))
            self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    async def drain(self) -> None:
        await self._flow.drain()


def without_chunks(cycle: RequestResponseCycle) -> None:
    """The answer of `cycle`, which has not begun, is sent as it is. uvicorn closes after an answer to 1.0."""
    send: Any = cycle.send
    unknown = False

    async def plain(message: Message) -> None:
        nonlocal unknown
        if message["type"] == "http.response.start":
            unknown = all(name.lower() != b"content-length" for name, _ in message["headers"])
            if unknown:
                cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
        elif unknown and not message.get("more_body", False):
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = plain  # type: ignore[method-assign, assignment]


# Answers to callers who wait to be called for their body: one that comes before that ends the connection.
# Nobody could say whether what comes next is the body or a request.
def closes_unread(cycle: RequestResponseCycle) -> None:
    """The answer of `cycle`, which has not begun, closes the connection if the body was not called for."""
    send: Any = cycle.send

    async def closing(message: Message) -> None:
        if cycle.waiting_for_100_continue:
            cycle.keep_alive = False
        await send(message)

    cycle.send = closing  # type: ignore[method-assign, assignment]


@dataclass(frozen=True)
class HttpLimits:
    """The limits of one client's connections; times in seconds."""

    connections: int = 4096
    header_bytes: int = 64 * 1024  # the request's line and all headers
    headers: int = 100
    chunks: int = 8192  # of a body: each costs as much as some hundred bytes
    header_s: float = 10.0  # from a request's first byte, or the connection's start, to the last header
    idle_s: float = 75.0  # between two requests
    rest_s: float = 5.0  # after the answer, to send or take the remaining bytes
    stalled_s: float = 60.0  # a client that takes nothing of its answer for this long is cut off
    pipelined: int = 16  # requests sent ahead of their answers


class OpenConnections:
    """The open connections of a server. When it is full, a new one replaces the one that is idle longest."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self._open: set[HttpProtocol] = set()
        self._waiting: dict[HttpProtocol, None] = {}  # they wait for a request; the one idle longest is first
        self._alarm = RateLimitedLogger(_log)
        self.outbox = PartsOutbox()

    def protocol(self, **given: Any) -> HttpProtocol:
        """The factory that uvicorn calls for each connection."""
        return HttpProtocol(self, **given)

    def enter(self, connection: HttpProtocol) -> None:
        """Registers a connection. Raises Unavailable if the server is full and no connection is idle."""
        if len(self._open) >= self.limits.connections:
            self._alarm.warning("%d HTTP connections are open: new ones replace idle ones", len(self._open))
            if not self._waiting:
                raise Unavailable("the server has too many connections")
            longest = next(iter(self._waiting))
            self.leave(longest)
            longest.transport.abort()
        self._open.add(connection)

    def waits(self, connection: HttpProtocol) -> None:
        """The connection waits for a request, or for the rest of one: it may be replaced."""
        self.works(connection)
        if connection in self._open:
            self._waiting[connection] = None

    def works(self, connection: HttpProtocol) -> None:
        """The connection answers a request: it may not be replaced."""
        self._waiting.pop(connection, None)

    def leave(self, connection: HttpProtocol) -> None:
        """The connection is closed."""
        self.works(connection)
        self._open.discard(connection)


class HttpProtocol(HttpToolsProtocol):
    """One connection. It has one timer, for the event that it waits for, and none while it answers.

    Its methods are callbacks of asyncio, uvicorn and the HTTP parser.
    """

    def __init__(self, connections: OpenConnections, **given: Any) -> None:
        super().__init__(**given)
        self._connections = connections
        self._limits = connections.limits
        self._header_bytes = 0  # of this request, in complete headers
        self._header_lines = 0  # of this request, those behind its body too
        self._loose_bytes = 0  # of this request, except its body
        self._chunks = 0  # of this request's body
        self._in_header = True
        self._in_body = False
        self._upgrading = False  # the parser takes what follows this head for another protocol
        self._refused = False
        self._stalled: asyncio.TimerHandle | None = None

    # --- the connection --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admits the connection, or refuses and closes it if there are too many."""
        super().connection_made(transport)
        self._parts = BufferedParts(transport, self.flow, self._connections.outbox)
        try:
            self._connections.enter(self)
        except EyasError as error:
            self._refuse(error)
            transport.close()
            return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Frees its place and stops its timers."""
        self._connections.leave(self)
        self._unset_keepalive_if_required()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads too slowly: starts the time after which the connection is cut."""
        super().pause_writing()
        self._parts.blocked = True
        self._stalled = self.loop.call_later(self._limits.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._parts.blocked = False
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def timeout_keep_alive_handler(self) -> None:
        """Closes the idle connection, once the client has taken everything."""
        super().timeout_keep_alive_handler()
        self._watch()  # it closes when the client has taken everything; that has a time limit too

    # --- a request -------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parses what came; answers what is not HTTP, or too large, with an error."""
        if self._refused:
            return
        self._loose_bytes += len(data)
        try:
            self._feed(data)
            if self._loose_bytes > self._limits.header_bytes:
                raise self._too_large()
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, EyasError) else InvalidRequest("this is no HTTP request"))
        except EyasError as error:
            self._refuse(error)

    def _feed(self, data: bytes) -> None:
        """Parses `data`. A head that asks for another protocol is parsed anew without that."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                self._upgrading = False
                version = self.parser.get_http_version()
                head = without_upgrade(self.parser.get_method(), self.url, version, self.headers)
                data = head + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)  # the old one may be at its end
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's

    def on_message_begin(self) -> None:
        """A request begins. Raises InvalidRequest if too many wait for their answers."""
        if len(self.pipeline) >= self._limits.pipelined:
            raise InvalidRequest("too many requests were sent ahead of their answers")
        super().on_message_begin()
        self._header_bytes = self._header_lines = self._chunks = 0
        self._in_header = True
        self._watch()

    def on_url(self, url: bytes) -> None:
        """Counts a part of the request line as header bytes."""
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts one header's bytes. One that follows a body is dropped: the request is asked already."""
        if self._in_header:
            super().on_header(name, value)
        self._header_lines += 1
        self._count(len(name) + len(value))

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self._limits.header_bytes or self._header_lines > self._limits.headers:
            raise self._too_large()

    def on_headers_complete(self) -> None:
        """The body's time limit starts. Raises InvalidRequest for a head that is not served."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        check_framing(method, version, self.headers)
        self._upgrading = self.parser.should_upgrade()
        if self._upgrading:
            return
        self.url = target(method, self.url, self.headers)
        self.expect_100_continue &= version == "1.1"
        super().on_headers_complete()
        if self.expect_100_continue:
            closes_unread(self.cycle)
        if version == "1.0":
            without_chunks(self.cycle)
        else:
            extensions: Any = {PARTS: self._parts}
            self.scope["extensions"] = extensions
        self._in_header, self._in_body = False, True
        self._watch()

    def on_chunk_header(self) -> None:
        """A chunk of the body begins. Raises PayloadTooLarge for one too many."""
        self._chunks += 1
        if self._chunks > self._limits.chunks:
            raise PayloadTooLarge(f"the body has more than {self._limits.chunks} chunks")

    def on_body(self, body: bytes) -> None:
        """Bytes of a body do not count as header bytes."""
        self._loose_bytes = max(0, self._loose_bytes - len(body) - _CHUNK_LINES)
        self.cycle.waiting_for_100_continue = False  # the client sends without waiting
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole: no limit on its arrival holds any longer."""
        if self._upgrading:
            return
        self.cycle.waiting_for_100_continue = False
        super().on_message_complete()
        if not self.parser.should_keep_alive():  # what follows is not parsed, also if a trailer says so
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.transport.close()
        self._in_body = False
        self._loose_bytes = 0
        self._watch()

    def on_response_complete(self) -> None:
        """Starts the time limit for the next request."""
        super().on_response_complete()
        self._watch()

    # --- limits ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Sets the timer for the next event."""
        self._unset_keepalive_if_required()
        ending = self._refused or self.transport.is_closing()
        if self._answering and not ending:
            self._connections.works(self)
            return
        self._connections.waits(self)
        if ending or self._in_body:
            self._after(self._limits.rest_s, self.transport.abort)
        elif self._in_header:
            self._after(self._limits.header_s, self._header_timeout)
        else:
            self._after(self._limits.idle_s, self.timeout_keep_alive_handler)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, action)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _header_timeout(self) -> None:
        """The header did not arrive in time. A client that has sent nothing gets no answer."""
        if self._loose_bytes == 0:
            self.transport.close()
        else:
            self._refuse(RequestTimeout(f"the header did not arrive within {self._limits.header_s:g} s"))

    def _too_large(self) -> HeadersTooLarge:
        limits = self._limits
        return HeadersTooLarge(
            f"the header has more than {limits.headers} lines or {limits.header_bytes} bytes"
        )

    def _refuse(self, error: EyasError) -> None:
        """Answers with `error` and ends the connection; what arrives meanwhile is discarded.

        It does not close at once: that would reset the connection, and a client that still sends would not
        see the answer.
        """
        self._refused = True
        answered = self._in_body and not self._answering  # before its body was read
        if self._answering:
            if not self._in_body or self.pipeline or self.cycle.response_started:
                self.transport.abort()  # another answer is due first, so this one cannot be sent
                return
            self.cycle.disconnected = self._parts.cut = True  # this is the answer: its own is dropped
            self.cycle.waiting_for_100_continue = False  # nothing more is written before the end
            self.cycle.message_event.set()
        if not answered:
            self.transport.write(_answer(error))
        if self.transport.can_write_eof():  # TLS cannot end one direction alone
            self.transport.write_eof()
        self._watch()


def _answer(error: EyasError) -> bytes:
    """The last answer of a connection."""
    body = error_body(error)
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    head += f"x-request-id: {known_as('')}\r\n\r\n"  # the caller's may not have come
    return STATUS_LINE[error.http_status] + head.encode() + body


def target(method: bytes, url: bytes, headers: Headers) -> bytes:
    """The path and query of a request's target. The host of an absolute one replaces the Host header.

    Raises InvalidRequest for another kind of target than the method has, and for a Host that is not one.
    """
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        raise InvalidRequest("the request has several Host headers")
    if url.startswith(b"/") or (url == b"*" and method == b"OPTIONS"):
        return url
    absolute = _ABSOLUTE.fullmatch(url)
    if absolute is None:
        raise InvalidRequest("the request's target is neither a path nor an http:// URL")
    host, rest = absolute.groups()
    headers[:] = [(b"host", host), *((name, value) for name, value in headers if name != b"host")]
    rest = rest or b""
    return bytes(rest if rest.startswith(b"/") else b"/" + rest)


def check_framing(method: bytes, version: str, headers: Headers) -> None:
    """Raises InvalidRequest for a version, a method or a coding that is not served here.

    The parser has refused already what contradicts itself: several lengths, or a length beside a coding.
    """
    if version not in ("1.0", "1.1"):
        raise InvalidRequest("the request must be HTTP/1.0 or HTTP/1.1")
    if method == b"CONNECT":
        raise InvalidRequest("this server is no proxy: it takes no CONNECT")
    if version == "1.1" and all(name != b"host" for name, _ in headers):
        raise InvalidRequest("the request has no Host header")
    codings = [value.strip(b" \t").lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or version == "1.0"):
        raise InvalidRequest("Transfer-Encoding must be chunked, and needs HTTP/1.1")


def without_upgrade(method: bytes, url: bytes, version: str, headers: Headers) -> bytes:
    """The head's bytes without its wish for another protocol, which a server may ignore."""
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    lines += [b"%b: %b" % header for header in _plain(headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _plain(headers: Headers) -> Iterator[tuple[bytes, bytes]]:
    for name, value in headers:
        if name == b"connection":
            options = [option.strip(b" \t") for option in value.split(b",")]
            value = b", ".join(option for option in options if option.lower() != b"upgrade")
        if name != b"upgrade":
            yield name, value
