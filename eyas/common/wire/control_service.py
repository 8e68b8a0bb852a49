"""`ControlService`: commands of an operator to a worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc
import msgspec

from eyas.common.errors import InvalidRequest
from eyas.common.wire import rpc
from eyas.common.wire.control import ControlCommand, ControlOutcome, ReleaseMemory
from protos import control_pb2, control_pb2_grpc

SERVICE = "eyas.internal.v1.ControlService"
MOST_WAIT_S = 600.0
CONTROL_S = 150.0  # for a command beyond its wait: much memory may move
_commands = msgspec.msgpack.Decoder(ControlCommand)
_outcomes = msgspec.msgpack.Decoder(ControlOutcome)


class ControlServicer(control_pb2_grpc.ControlServiceServicer):  # type: ignore[misc]
    """The service of a worker; `control` carries a command out."""

    def __init__(self, control: Callable[[ControlCommand], Awaitable[ControlOutcome]]) -> None:
        self._control = control

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to `server`."""
        control_pb2_grpc.add_ControlServiceServicer_to_server(self, server)

    async def Control(
        self,
        request: control_pb2.ControlRequest,
        context: grpc.aio.ServicerContext[control_pb2.ControlRequest, control_pb2.ControlResponse],
    ) -> control_pb2.ControlResponse:
        """The outcome. Raises InvalidRequest for a command that this version does not have."""
        try:
            command = _commands.decode(request.command)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"command: {error}", param="command") from None
        if isinstance(command, ReleaseMemory) and not 0 <= command.wait_s <= MOST_WAIT_S:
            raise InvalidRequest(f"wait_s must be from 0 to {MOST_WAIT_S:g}", param="wait_s")
        return control_pb2.ControlResponse(outcome=msgspec.msgpack.encode(await self._control(command)))


class ControlClient:
    """`ControlService` of one worker."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = control_pb2_grpc.ControlServiceStub(channel)

    async def control(self, command: ControlCommand) -> ControlOutcome:
        """What the command did there.

        Raises EyasError: Busy if requests run that it would disturb; Unavailable, DeadlineExceeded."""
        request = control_pb2.ControlRequest(command=msgspec.msgpack.encode(command))
        wait_s = command.wait_s if isinstance(command, ReleaseMemory) else 0.0
        try:
            reply = await self._stub.Control(request, timeout=wait_s + CONTROL_S)
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error) from error
        return _outcomes.decode(reply.outcome)
