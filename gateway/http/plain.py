"""Answers of unknown length to callers of HTTP/1.0, who know no chunks: the connection's end is theirs."""

from __future__ import annotations

import sys
from typing import Any

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


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
