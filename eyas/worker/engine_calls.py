"""Calls from a front to its engine, each with one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from eyas.common.errors import Unavailable
from eyas.common.types import Adapter
from eyas.common.weights import WeightsCommand
from eyas.common.wire.buffer import StreamBuffer
from eyas.common.wire.clients import ADAPTER_S
from eyas.common.wire.control_service import EngineCommand, EngineReply
from eyas.engine.ipc.adapter_messages import LoadAdapter, UnloadAdapter
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import Command, ControlEngine, EngineStopped, FlushCache, WeightsCall

ANSWER_S = 10.0  # beyond the caller's wait: the engine first finishes its current step


async def flush(engine: EngineClient, wait_s: float) -> int:
    """Empties the engine's prefix cache once no request runs; returns the number of pages it had.

    Raises Busy if requests still run after `wait_s`, and Unavailable while the engine cannot serve.
    """
    answer = await _answer(engine, lambda call: FlushCache(call, wait_s), wait_s)
    if answer.failure is not None:
        raise answer.failure.error()
    return int(answer.pages)


async def control(engine: EngineClient, command: EngineCommand, wait_s: float) -> EngineReply:
    """Sends a control command to the engine; returns its reply.

    Raises the engine's error if the command failed, Unavailable while the engine cannot serve, and
    DeadlineExceeded if no answer arrives.
    """
    reply: EngineReply
    if isinstance(command, WeightsCommand):
        reply = (await _answer(engine, lambda call: WeightsCall(call, command), wait_s)).reply
        return reply
    answer = await _answer(engine, lambda call: ControlEngine(call, command), wait_s)
    if answer.failure is not None:
        raise answer.failure.error()
    reply = answer.outcome
    return reply


async def load_adapter(engine: EngineClient, adapter: Adapter) -> Adapter:
    """Loads an adapter into the engine, which need not serve yet; returns it with its id and rank.

    Raises EyasError if its folder cannot be used, and DeadlineExceeded if no answer arrives.
    """
    name, path, id, pinned = adapter.name, adapter.path, adapter.id, adapter.pinned
    answer = await _answer(
        engine, lambda call: LoadAdapter(call, path, name, id, pinned), ADAPTER_S, early=True
    )
    if answer.failure is not None:
        raise answer.failure.error()
    return msgspec.structs.replace(adapter, id=answer.id, rank=answer.rank)


async def unload_adapter(engine: EngineClient, id: str) -> None:
    """Unloads an adapter: the engine accepts no more requests for it."""
    await _answer(engine, lambda call: UnloadAdapter(call, id), ADAPTER_S, early=True)


async def _answer(
    engine: EngineClient, command: Callable[[int], Command], wait_s: float, *, early: bool = False
) -> Any:
    """Sends a command and returns the event that answers it. `early`: the engine need not serve yet.

    Raises the engine's error, or Unavailable, if it stops; DeadlineExceeded.
    """
    deadline = asyncio.get_running_loop().time() + wait_s + ANSWER_S
    answer: StreamBuffer[Any] = StreamBuffer(2, deadline)
    call = engine.adopt(answer.put) if early else engine.open(answer.put)
    try:
        engine.send(command(call))
        event = await answer.get()
        if not isinstance(event, EngineStopped):
            return event
        raise Unavailable("the engine has left") if event.failure is None else event.failure.error()
    finally:
        engine.close(call)
