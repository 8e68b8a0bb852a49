"""Calls of a front to its engine that have one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from eyas.common.errors import Unavailable
from eyas.common.weights import WeightsCall, WeightsCommand, WeightsReply
from eyas.common.wire.buffer import StreamBuffer
from eyas.common.wire.control import ControlCommand, ControlOutcome, ReleaseMemory
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import Command, ControlEngine, EngineStopped, FlushCache

MOVES_S = 110.0  # for weights of 140 GB to leave, into memory of the host that has to be locked
ANSWER_S = 10.0  # beyond the wait: what the engine is in the middle of


async def flush(engine: EngineClient, wait_s: float) -> int:
    """Empties the engine's prefix cache once nothing runs; returns how many pages it had.

    Raises Busy if requests still run after `wait_s`, and Unavailable while the engine cannot serve.
    """
    answer = await _asked(engine, lambda call: FlushCache(call, wait_s), wait_s)
    if answer.failure is not None:
        raise answer.failure.error()
    return int(answer.pages)


async def change_weights(engine: EngineClient, command: WeightsCommand, wait_s: float) -> WeightsReply:
    """The engine's answer to a command about its weights. Raises Unavailable while it cannot serve, and
    DeadlineExceeded if none comes.
    """
    answer = await _asked(engine, lambda call: WeightsCall(call, command), wait_s)
    reply: WeightsReply = answer.reply
    return reply


async def control(engine: EngineClient, command: ControlCommand) -> ControlOutcome:
    """Has the engine carry a command out. Raises what keeps it from that, and Unavailable while it cannot
    serve.
    """
    wait_s = command.wait_s if isinstance(command, ReleaseMemory) else 0.0
    answer = await _asked(engine, lambda call: ControlEngine(call, command), wait_s + MOVES_S)
    if answer.failure is not None:
        raise answer.failure.error()
    outcome: ControlOutcome = answer.outcome
    return outcome


async def _asked(engine: EngineClient, command: Callable[[int], Command], wait_s: float) -> Any:
    """The event that answers the command of a call. Raises what the engine has stopped with."""
    deadline = asyncio.get_running_loop().time() + wait_s + ANSWER_S
    answer: StreamBuffer[Any] = StreamBuffer(2, deadline)
    call = engine.open(answer.put)
    try:
        engine.send(command(call))
        event = await answer.get()
        if not isinstance(event, EngineStopped):
            return event
        raise Unavailable("the engine has left") if event.failure is None else event.failure.error()
    finally:
        engine.close(call)
