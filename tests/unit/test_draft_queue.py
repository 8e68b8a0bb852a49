"""A draft worker that is behind costs batches, and never the offer of a channel."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from decode_svc.drafts import MAX_QUEUED, DraftStreams
from eyas.engine.ipc.messages import DraftChannel, DraftClose, DraftDown, DraftUp

OFFER = DraftChannel({"path": b"/dev/shm/x", "identity": b"host/1/2"}, 4096, 60, 512, 32)


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


async def test_the_offer_of_a_channel_goes_with_the_next_batch() -> None:
    engine = Engine()
    streams = DraftStreams(engine, nowhere)  # type: ignore[arg-type]
    streams.follow(["w"])
    stream = streams._streams["w"]
    stream._down = False
    batch = DraftUp(closes=(DraftClose(1, 1),), worker="w")
    for _ in range(MAX_QUEUED):
        engine.post(batch)
    engine.post(DraftUp(channel=OFFER, worker="w"))
    assert len(stream._queue) == MAX_QUEUED and not any(one.HasField("channel") for one in stream._queue)
    stream._queue.clear()
    engine.post(batch)
    engine.post(batch)
    first, second = stream._queue
    assert first.channel.places == OFFER.places and not second.HasField("channel")
    await streams.close()
