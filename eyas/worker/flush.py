"""A flush of the prefix cache, seen from the front: the engine does it, or says why it does not."""

from __future__ import annotations

import asyncio

from eyas.common.errors import Unavailable
from eyas.common.wire.buffer import StreamBuffer
from eyas.common.wire.message import WireFailure
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import CacheFlushed, EngineStopped, FlushCache

ANSWER_S = 10.0  # beyond the wait: what the engine is in the middle of


async def flush(engine: EngineClient, wait_s: float) -> int:
    """Empties the engine's prefix cache once nothing runs; returns how many pages it had.

    Raises Busy if requests still run after `wait_s`, and Unavailable while the engine cannot serve.
    """
    deadline = asyncio.get_running_loop().time() + wait_s + ANSWER_S
    answer: StreamBuffer[CacheFlushed | EngineStopped] = StreamBuffer(2, deadline)
    call = engine.open(answer.put)
    try:
        engine.send(FlushCache(call, wait_s))
        match await answer.get():
            case CacheFlushed(pages=pages, failure=None):
                return pages
            case (
                CacheFlushed(failure=WireFailure() as failure)
                | EngineStopped(failure=WireFailure() as failure)
            ):
                raise failure.error()
        raise Unavailable("the engine has left")
    finally:
        engine.close(call)
