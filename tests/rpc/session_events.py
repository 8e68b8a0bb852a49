"""Reads events and tokens of a worker's session."""

from __future__ import annotations

import asyncio
from typing import Any

from eyas.common.types import TokenEntry
from eyas.common.wire import message


async def next_of(session: Any, kind: type) -> Any:
    """The next event of a kind; heartbeats and others pass by."""
    async with asyncio.timeout(30):
        async for event in session:
            if isinstance(event, kind):
                return event


async def tokens_of(session: Any, ends: int = 1) -> list[TokenEntry]:
    """Everything that Steps bring until `ends` choices have finished."""
    got: list[Any] = []
    async with asyncio.timeout(30):
        while sum(entry.finish is not None for entry in got) < ends:
            got += (await next_of(session, message.StepReply)).entries
    return got
