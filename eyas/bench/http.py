"""A small HTTP/1.1 client for JSON and server-sent events, which costs little CPU beside the server.

It knows chunked bodies and `data:` lines. It opens a connection per request, and refuses to know TLS.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from eyas.client.reach import nothing_listens
from eyas.common.errors import EyasError, Unavailable

TIMEOUT_S = 900.0  # one whole request
CONNECT_S = 10.0
LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Server:
    """The server that is measured. `url` is like http://127.0.0.1:8000."""

    url: str
    api_key: str | None = None

    async def get(self, path: str) -> bytes:
        """The body of a GET. Raises EyasError if the status is not 200."""
        async with asyncio.timeout(TIMEOUT_S):
            return b"".join([part async for part in self._body("GET", path, None)])

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        """The JSON of every `data:` line of a streamed POST, up to [DONE].

        Raises EyasError if the status is not 200, Unavailable if the connection breaks.
        """
        rest = b""
        async with asyncio.timeout(TIMEOUT_S):
            async for part in self._body("POST", path, body):
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        yield json.loads(data)

    async def _body(self, method: str, path: str, body: dict[str, Any] | None) -> AsyncIterator[bytes]:
        reader, writer = await self._connect()
        try:
            writer.write(self._request(method, path, body))
            await writer.drain()
            status, headers = await _head(reader)
            parts = (
                _chunks(reader) if headers.get("transfer-encoding") == "chunked" else _plain(reader, headers)
            )
            if status != 200:
                text = b"".join([part async for part in parts]).decode(errors="replace")
                raise EyasError(f"HTTP {status}: {text[:200]}")
            async for part in parts:
                yield part
        except asyncio.IncompleteReadError as error:
            raise Unavailable("the server ended the connection in the middle of an answer") from error
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = urlsplit(self.url)
        connecting = asyncio.open_connection(address.hostname, address.port or 80, limit=LINE_BYTES)
        try:
            return await asyncio.wait_for(connecting, CONNECT_S)
        except (OSError, TimeoutError) as error:
            raise nothing_listens(self.url) from error

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        content = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", f"Host: {urlsplit(self.url).netloc}", "Connection: close"]
        lines += [f"Content-Length: {len(content)}", "Content-Type: application/json"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + content


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return int(first.split()[1]), {name.lower(): value.strip() for name, value in pairs}


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _plain(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    yield await reader.readexactly(int(headers["content-length"]))
