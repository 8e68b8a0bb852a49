"""Commits that a decode engine posts until its draft worker answers."""

from __future__ import annotations

import asyncio

from fake_engine import FakeWorker

from eyas.engine.ipc.messages import (
    DraftCommit,
    DraftDown,
    DraftUp,
)

COMMIT = DraftCommit(1, 2, 3, (8, 9), b"\x00\x80\xff", 5, 1, 6)


async def until_up(decode: FakeWorker, drafter: str) -> None:
    """Posts commits until one is answered by a proposal."""
    async with asyncio.timeout(30):
        while not any(down.proposals for down in decode.engine.of(DraftDown)):
            decode.engine.post = [DraftUp(commits=(COMMIT,), worker=drafter)]
            await asyncio.sleep(0.05)
