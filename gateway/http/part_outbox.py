"""Parts of streamed responses on their way out: one write per connection and turn of the event loop.

A decode step gives tokens to many streams at once. Their parts are held until all of them are rendered, and
then leave one after the other, so that readers on this host are woken once.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl

from gateway.http.parts import BodyParts


class PartsOutbox:
    """The connections of one server that hold parts: they are flushed when the loop next turns."""

    __slots__ = ("_holders",)

    def __init__(self) -> None:
        self._holders: list[HeldParts] = []

    def add(self, holder: HeldParts) -> None:
        """`holder` has begun to hold parts."""
        if not self._holders:
            asyncio.get_running_loop().call_soon(self._flush)
        self._holders.append(holder)

    def _flush(self) -> None:
        holders, self._holders = self._holders, []
        for holder in holders:
            holder.flush()


class HeldParts(BodyParts):
    """The parts of a connection's responses with chunked bodies, one after the other.

    The connection says when the client reads too slowly (`blocked`), and when nothing may leave any more
    (`cut`). What is before a body and after it is not sent here.
    """

    __slots__ = ("_flow", "_held", "_outbox", "_transport", "blocked", "cut")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, outbox: PartsOutbox) -> None:
        self._transport = transport
        self._flow = flow
        self._outbox = outbox
        self._held: list[bytes] = []
        self.blocked = False
        self.cut = False

    def write(self, part: bytes) -> None:
        if not self._held:
            self._outbox.add(self)
        self._held.append(part)

    def flush(self) -> None:
        held = self._held
        if held and not self.cut and not self._transport.is_closing():
            part = held[0] if len(held) == 1 else b"".join(held)
            self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        held.clear()

    async def drain(self) -> None:
        await self._flow.drain()
