"""Parts of streamed bodies: what a turn of the loop holds leaves as one chunk, and nothing once it is cut."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.http.protocol import BufferedParts, PartsOutbox


class Transport:
    """Notes what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closing = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.closing


def connection(outbox: PartsOutbox) -> tuple[BufferedParts, Transport]:
    transport: Any = Transport()
    return BufferedParts(transport, FlowControl(transport), outbox), transport


async def test_what_a_turn_holds_leaves_together_as_one_chunk_per_connection() -> None:
    outbox = PartsOutbox()
    (one, first), (other, second) = connection(outbox), connection(outbox)
    for parts, part in ((one, b"a" * 16), (other, b"b"), (one, b"c")):
        parts.write(part)
    assert not first.written and not second.written
    await asyncio.sleep(0)
    assert first.written == [b"11\r\n" + b"a" * 16 + b"c\r\n"] and second.written == [b"1\r\nb\r\n"]
    one.write(b"d")
    one.flush()  # before anything else is sent
    await asyncio.sleep(0)
    assert first.written[1:] == [b"1\r\nd\r\n"]


@pytest.mark.parametrize("how", ["cut", "closing"])
async def test_nothing_leaves_an_ended_connection_later(how: str) -> None:
    parts, transport = connection(PartsOutbox())
    parts.write(b"a")
    setattr(parts if how == "cut" else transport, how, True)
    await asyncio.sleep(0)
    parts.write(b"b")
    await asyncio.sleep(0)
    assert not transport.written
