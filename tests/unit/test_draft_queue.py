"""A draft worker that is behind costs batches, and never the offer of a direct line."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from decode_svc.drafts import MAX_QUEUED, DraftStreams
from eyas.engine.ipc.messages import DraftClose, DraftDown, DraftLine, DraftUp

LINE = DraftLine({"path": b"/dev/shm/x", "identity": b"host/1/2"}, 3, 512, 6, 4096, 60)


class Engine:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def on(self, kind: type, do: Any) -> None:
        self.post = do

    def send(self, *messages: DraftDown) -> None:
        self.told += messages


@contextlib.asynccontextmanager
async def nowhere(address: str) -> AsyncIterator[None]:
    await asyncio.Event().wait()
    yield


async def test_the_offer_of_a_line_goes_with_the_next_batch() -> None:
    engine = Engine()
    streams = DraftStreams(engine, nowhere)  # type: ignore[arg-type]
    streams.follow(["w"])
    stream = streams._streams["w"]
    stream._down = False
    batch = DraftUp(closes=(DraftClose(1, 1),), worker="w")
    for _ in range(MAX_QUEUED):
        engine.post(batch)
    engine.post(DraftUp(line=LINE, worker="w"))
    assert len(stream._queue) == MAX_QUEUED and not any(one.HasField("line") for one in stream._queue)
    stream._queue.clear()
    engine.post(batch)
    engine.post(batch)
    first, second = stream._queue
    assert first.line.epoch == LINE.epoch and not second.HasField("line")
    await streams.close()
