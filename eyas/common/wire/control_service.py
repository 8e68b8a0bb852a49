"""`ControlService`: commands to a worker's engine beside requests, an operator's and those of new weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import grpc
import msgspec

from eyas.common.errors import InvalidRequest
from eyas.common.weights import WeightsCommand, WeightsReply
from eyas.common.wire import rpc
from eyas.common.wire.control import ControlCommand, ControlOutcome, ReleaseMemory
from protos import control_pb2, control_pb2_grpc

EngineCommand: TypeAlias = ControlCommand | WeightsCommand
EngineReply: TypeAlias = ControlOutcome | WeightsReply

SERVICE = "eyas.internal.v1.ControlService"
CONTROL_S = 120.0  # for a command beyond its wait: 140 GB may leave for memory that has to be locked
WAIT_S = 900.0  # where a caller has no deadline
_commands = msgspec.msgpack.Decoder(EngineCommand)
_outcomes = msgspec.msgpack.Decoder(ControlOutcome)
_replies = msgspec.msgpack.Decoder(WeightsReply)


class ControlServicer(control_pb2_grpc.ControlServiceServicer):  # type: ignore[misc]
    """The service of a worker; `call` carries a command out within seconds."""

    def __init__(self, call: Callable[[EngineCommand, float], Awaitable[EngineReply]]) -> None:
        self._call = call

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to `server`."""
        control_pb2_grpc.add_ControlServiceServicer_to_server(self, server)

    async def Control(
        self,
        request: control_pb2.ControlRequest,
        context: grpc.aio.ServicerContext[control_pb2.ControlRequest, control_pb2.ControlResponse],
    ) -> control_pb2.ControlResponse:
        """Waits as long as the caller. Raises InvalidRequest for a command that this version lacks."""
        try:
            command = _commands.decode(request.command)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"command: {error}", param="command") from None
        reply = await self._call(command, context.time_remaining() or WAIT_S)
        return control_pb2.ControlResponse(reply=msgspec.msgpack.encode(reply))


class ControlClient:
    """`ControlService` of one worker."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = control_pb2_grpc.ControlServiceStub(channel)

    async def control(self, command: ControlCommand) -> ControlOutcome:
        """The outcome of the command there.

        Raises EyasError: Busy if requests run that it would disturb; Unavailable, DeadlineExceeded.
        """
        wait_s = command.wait_s if isinstance(command, ReleaseMemory) else 0.0
        return _outcomes.decode(await self._call(command, wait_s + CONTROL_S))

    async def change(self, command: WeightsCommand, wait_s: float) -> WeightsReply:
        """Has the worker carry a command about its weights out.

        Raises what it failed with; Unavailable if the worker is gone, DeadlineExceeded after `wait_s`.
        """
        reply = _replies.decode(await self._call(command, wait_s))
        if reply.failure is not None:
            raise reply.failure.error()
        return reply

    async def _call(self, command: EngineCommand, wait_s: float) -> bytes:
        """The reply of the engine, as msgpack."""
        request = control_pb2.ControlRequest(command=msgspec.msgpack.encode(command))
        try:
            answer = await self._stub.Control(request, timeout=wait_s)
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error) from error
        reply: bytes = answer.reply
        return reply
