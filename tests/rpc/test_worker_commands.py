"""What gateways ask of a worker's engine beside requests, over a real channel: how long they wait, and what a
worker does not understand.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from eyas.common.errors import InvalidRequest
from eyas.common.weights import (
    CloseForWeights,
    LeaveGroup,
    Running,
    WeightsCommand,
    WeightsReply,
)
from eyas.common.wire import rpc
from eyas.common.wire.control import ControlOutcome, PauseGeneration, PauseMode
from eyas.common.wire.control_service import ControlClient, ControlServicer, EngineCommand, EngineReply
from eyas.common.wire.message import WireFailure
from protos import control_pb2, control_pb2_grpc


class ScriptedEngine:
    """Answers one group's commands with a failure, and notes all others."""

    def __init__(self) -> None:
        self.commands: list[tuple[EngineCommand, float]] = []

    async def call(self, command: EngineCommand, wait_s: float) -> EngineReply:
        if command == LeaveGroup("b"):
            return WeightsReply(failure=WireFailure.of(InvalidRequest("no group b", param="group_name")))
        self.commands.append((command, wait_s))
        return WeightsReply(requests=3) if isinstance(command, WeightsCommand) else ControlOutcome(requests=2)


@pytest_asyncio.fixture
async def address() -> AsyncIterator[tuple[ScriptedEngine, str]]:
    engine, server = ScriptedEngine(), rpc.server()
    ControlServicer(engine.call).register(server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    async with contextlib.AsyncExitStack() as owned:
        owned.push_async_callback(server.stop, 0)
        yield engine, f"127.0.0.1:{port}"


async def test_an_update_may_wait_for_an_hour_for_what_runs(address: tuple[ScriptedEngine, str]) -> None:
    """The longest wait that callers may ask for, and the gateway's own patience beyond it."""
    engine, worker = address
    close = CloseForWeights("d", Running.DRAIN, 3600.0, 30.0)
    async with rpc.channel(worker) as channel:
        assert (await ControlClient(channel).change(close, 3630.0)).requests == 3
    ((command, wait_s),) = engine.commands
    assert command == close
    assert wait_s == pytest.approx(3630.0, abs=10.0)


async def test_an_operators_commands_come_by_the_same_way(address: tuple[ScriptedEngine, str]) -> None:
    engine, worker = address
    pause = PauseGeneration(PauseMode.RETRACT)
    async with rpc.channel(worker) as channel:
        assert await ControlClient(channel).control(pause) == ControlOutcome(requests=2)
    assert [command for command, _ in engine.commands] == [pause]


async def test_failures_keep_their_kind_and_their_field(address: tuple[ScriptedEngine, str]) -> None:
    async with rpc.channel(address[1]) as channel:
        with pytest.raises(InvalidRequest, match="no group b") as failure:
            await ControlClient(channel).change(LeaveGroup("b"), 10.0)
        assert failure.value.param == "group_name"
        stub = control_pb2_grpc.ControlServiceStub(channel)
        with pytest.raises(Exception, match="command: "):
            await stub.Control(control_pb2.ControlRequest(command=b"\x80"), timeout=10.0)
