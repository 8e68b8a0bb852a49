"""The HTTP server before a small app, and a client that writes its bytes by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from starlette.types import Receive, Scope, Send

from eyas.common.cluster.listening import free_ports
from gateway.http.protocol import HttpLimits
from gateway.http.server import HttpServer

LIMITS = HttpLimits(header_s=0.5, idle_s=0.5, rest_s=0.5, stalled_s=0.5)
SOON_S = 20.0  # for what takes half a second, on a busy machine


class App:
    """/held answers when it is let go, /early without its body, /endless never stops, all others at once."""

    def __init__(self) -> None:
        self.held = 0
        self.let_go = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/held":
            self.held += 1
            await self.let_go.wait()
        elif path != "/early":
            while (await receive()).get("more_body"):
                pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if path == "/endless":
            gone = asyncio.ensure_future(receive())
            while not gone.done():
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                await asyncio.sleep(0)
            self.ended.set()
            return
        await send({"type": "http.response.body", "body": path.encode()})


@dataclass
class Wire:
    """One connection as bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    said: bytearray = field(default_factory=bytearray)

    def say(self, words: bytes) -> None:
        self.writer.write(words)

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer."""
        async with asyncio.timeout(SOON_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
            if b"content-length: " in head:
                size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                return int(head[9:12]), await self.reader.readexactly(size)
            body = b""
            while size := int((await self.reader.readline()), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readline()
            return int(head[9:12]), body

    async def end(self) -> bytes:
        """What comes until the connection is closed."""
        async with asyncio.timeout(SOON_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


@dataclass
class Door:
    app: App
    port: int
    wires: contextlib.ExitStack

    async def wire(self) -> Wire:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.wires.callback(lambda: writer.transport.abort())
        return Wire(reader, writer)


@contextlib.asynccontextmanager
async def door(limits: HttpLimits = LIMITS) -> AsyncIterator[Door]:
    port = next(free_ports())
    app = App()
    server = HttpServer(app, "127.0.0.1", port, limits)
    await server.start()
    try:
        with contextlib.ExitStack() as wires:
            yield Door(app, port, wires)
    finally:
        app.let_go.set()
        await server.aclose()
