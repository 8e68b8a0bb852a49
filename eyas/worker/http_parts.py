"""Parts of streamed responses on their way out: one write per response and turn of the event loop.

A decode step gives tokens to many streams at once. Their parts are held until all of them are rendered, and
then leave one after the other, so that readers on this host are woken once. It knows uvicorn's cycles and
chunked bodies, and refuses to know what a part says.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.parts import Parts


class Outbox:
    """The responses of one server that hold parts: they are flushed when the loop next turns."""

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


class HeldParts(Parts):
    """The parts of one response with a chunked body, whose header is sent by its cycle."""

    __slots__ = ("_cycle", "_flow", "_held", "_outbox")

    def __init__(self, cycle: RequestResponseCycle, outbox: Outbox) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._outbox = outbox
        self._held: list[bytes] = []

    @property
    def blocked(self) -> bool:
        return self._flow.write_paused  # never once the client is gone

    def write(self, part: bytes) -> None:
        if not self._held:
            self._outbox.add(self)
        self._held.append(b"%x\r\n%b\r\n" % (len(part), part))

    def flush(self) -> None:
        held, self._held = self._held, []
        if held and not self._cycle.disconnected and not self._cycle.transport.is_closing():
            self._cycle.transport.write(b"".join(held))

    async def drain(self) -> None:
        await self._cycle.flow.drain()
