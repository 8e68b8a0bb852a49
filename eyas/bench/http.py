"""A small HTTP/1.1 client for JSON and server-sent events, which costs little CPU beside the server.

It stamps the arrival of bytes before anything is parsed, and hands over the `data:` lines of a stream as they
are. It opens a connection per request, and refuses to know what an event says.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from eyas.client.reach import nothing_listens
from eyas.common.errors import EyasError, Unauthorized, Unavailable

TIMEOUT_S = 3600.0  # one whole request
CONNECT_S = 10.0
SHOWN = 200  # bytes of a refusal that its error quotes

OnEvent = Callable[[bytes, float], None]
"""Takes what a `data:` line says, and its arrival by `time.perf_counter`. What it raises ends the request."""


@dataclass(frozen=True)
class Server:
    """The server that is measured. `url` is like http://127.0.0.1:8000."""

    url: str
    api_key: str | None = None

    async def get(self, path: str) -> bytes:
        """The body of a GET. Raises EyasError if the status is not 200, Unavailable if nothing answers."""
        answer = _Answer(self._request("GET", path, b""), None)
        await self._exchange(answer)
        return bytes(answer.body)

    async def get_json(self, path: str) -> Any:
        """The JSON of a GET; None for a server that does not have it.

        Raises Unavailable if nothing answers, Unauthorized for a wrong key.
        """
        try:
            return json.loads(await self.get(path))
        except (Unavailable, Unauthorized):
            raise
        except (EyasError, ValueError):
            return None

    async def stream(self, path: str, body: bytes, on_event: OnEvent) -> None:
        """Calls `on_event` for every `data:` line of a POST's answer, until it ends.

        Raises EyasError if the status is not 200, Unavailable if the connection breaks, TimeoutError.
        """
        await self._exchange(_Answer(self._request("POST", path, body), on_event))

    async def _exchange(self, answer: _Answer) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            transport = await self._connect(answer)
            try:
                await answer.ended
            finally:
                transport.close()
        if answer.status == Unauthorized.http_status:
            raise Unauthorized(f"{self.url} wants an API key: give --api-key, or set EYAS_API_KEY")
        if answer.status != 200:
            text = answer.body[:SHOWN].decode(errors="replace")
            raise EyasError(f"HTTP {answer.status}: {text}")

    async def _connect(self, answer: _Answer) -> asyncio.WriteTransport:
        address = urlsplit(self.url)
        secure = address.scheme == "https"
        host, port = address.hostname or "", address.port or (443 if secure else 80)
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(lambda: answer, host, port, ssl=secure or None)
        try:
            transport, _ = await asyncio.wait_for(connecting, CONNECT_S)
        except (OSError, TimeoutError) as error:
            raise nothing_listens(self.url) from error
        return transport

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {urlsplit(self.url).netloc}", "Connection: close"]
        lines += [f"Content-Length: {len(body)}", "Content-Type: application/json"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + body


class _Answer(asyncio.Protocol):
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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(_cause(error) or Unavailable(f"the server does not speak HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(Unavailable("the server ended the connection in the middle of an answer"))

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
    """What `on_event` raised: the parser wraps it."""
    inner = error.__cause__ or error.__context__
    return inner if isinstance(inner, Exception) else None
