"""A small HTTP/1.1 client for JSON and server-sent events, which costs little CPU beside the server.

It stamps the arrival of bytes before anything is parsed, and hands over the `data:` lines of a stream as they
are. It opens a connection per request.
"""

from __future__ import annotations

import asyncio
import errno
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from eyas.client.reach import ServerAddress, locked, unreachable
from eyas.common.errors import DeadlineExceeded, EyasError, Unauthorized, Unavailable

STREAM_S = 3600.0  # one whole request that is measured
GET_S = 30.0
CONNECT_S = 10.0
SHOWN = 200  # bytes of a refusal that its error quotes

OnEvent = Callable[[bytes, float], None]
"""Takes what a `data:` line says, and its arrival by `time.perf_counter`. What it raises ends the request."""


@dataclass(frozen=True)
class MeasuredServer(ServerAddress):
    """The server that is measured. `url` is like http://127.0.0.1:8000; a path in it is put before others."""

    async def get(self, path: str) -> bytes:
        """The body of a GET. Raises EyasError if the status is not 200, Unavailable if nothing listens.

        DeadlineExceeded if there is no whole answer within GET_S.
        """
        answer = _HttpAnswer(self._request("GET", path, b""), None)
        await self._exchange(answer, GET_S)
        return bytes(answer.body)

    async def get_json(self, path: str) -> Any:
        """The JSON of a GET; None for a server that does not have it.

        Raises Unavailable if nothing listens, Unauthorized for a wrong key, DeadlineExceeded.
        """
        try:
            return json.loads(await self.get(path))
        except (Unavailable, Unauthorized, DeadlineExceeded):
            raise
        except (EyasError, ValueError):
            return None

    async def stream(self, path: str, body: bytes, on_event: OnEvent) -> None:
        """Calls `on_event` for every `data:` line of a POST's answer, until it ends.

        Raises EyasError if the status is not 200, Unavailable if the connection breaks, DeadlineExceeded.
        """
        await self._exchange(_HttpAnswer(self._request("POST", path, body), on_event), STREAM_S)

    async def _exchange(self, answer: _HttpAnswer, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                transport = await self._connect(answer)
                try:
                    await answer.ended
                finally:
                    transport.close()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.url} did not answer within {timeout_s:g} s") from error
        if answer.status == Unauthorized.http_status:
            raise locked(self.url, self.api_key)
        if answer.status != 200:
            text = answer.body[:SHOWN].decode(errors="replace")
            raise EyasError(f"HTTP {answer.status}: {text}")

    async def _connect(self, answer: _HttpAnswer) -> asyncio.WriteTransport:
        address = urlsplit(self.url)
        host, port = address.hostname or "", address.port or (443 if self.secure else 80)
        loop = asyncio.get_running_loop()
        try:
            # Not `wait_for`: Python 3.11's loses a Ctrl-C that comes as the connection does.
            async with asyncio.timeout(CONNECT_S):
                transport, _ = await loop.create_connection(lambda: answer, host, port, ssl=self.tls)
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise Unavailable(f"no connection to {self.url}: {error}") from error
            raise unreachable(self.url, error) from error
        return transport

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        address = urlsplit(self.url)
        lines = [f"{method} {address.path}{path} HTTP/1.1", f"Host: {address.netloc}", "Connection: close"]
        lines += [f"Content-Length: {len(body)}", "Content-Type: application/json"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + body


class _HttpAnswer(asyncio.Protocol):
    """One request and its answer. Without `on_event`, or if it is a refusal, the body is kept whole."""

    def __init__(self, request: bytes, on_event: OnEvent | None) -> None:
        self._request = request
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.body = bytearray()
        self.status = 0
        self._on_event = on_event
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._rest = b""  # a line that is not whole yet
        self._framed = False  # whether a header says where the body ends

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(_cause(error) or Unavailable(f"the server does not speak HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self.status and not self._framed:
            self._end(None)
        self._end(Unavailable("the server ended the connection in the middle of an answer"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._framed |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self.status = self._parser.get_status_code()

    def on_body(self, part: bytes) -> None:
        """Called by the parser with a part of the body, its chunks unpacked."""
        if self._on_event is None or self.status != 200:
            self.body += part
            return
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip(), self._now)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


def _cause(error: BaseException) -> Exception | None:
    """The error that `on_event` raised: the parser wraps it."""
    inner = error.__cause__ or error.__context__
    return inner if isinstance(inner, Exception) else None
