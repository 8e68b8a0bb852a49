"""Answers to callers who wait to be called for their body: one that comes before that ends the connection.

Nobody could say whether what comes next is the body or a request.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def closes_unread(cycle: RequestResponseCycle) -> None:
    """The answer of `cycle`, which has not begun, closes the connection if the body was not called for."""
    send: Any = cycle.send

    async def closing(message: Message) -> None:
        if cycle.waiting_for_100_continue:
            cycle.keep_alive = False
        await send(message)

    cycle.send = closing  # type: ignore[method-assign, assignment]
