"""`WeightsService`: the steps of an update of a worker's weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc
import msgspec

from eyas.common.errors import InvalidRequest
from eyas.common.weights import WeightsCommand, WeightsReply
from eyas.common.wire import rpc
from protos import weights_pb2, weights_pb2_grpc

SERVICE = "eyas.internal.v1.WeightsService"
WAIT_S = 900.0  # where a caller has no deadline
_commands = msgspec.msgpack.Decoder(WeightsCommand)
_replies = msgspec.msgpack.Decoder(WeightsReply)


class WeightsServicer(weights_pb2_grpc.WeightsServiceServicer):  # type: ignore[misc]
    """The service of a worker; `change` carries a command out within seconds."""

    def __init__(self, change: Callable[[WeightsCommand, float], Awaitable[WeightsReply]]) -> None:
        self._change = change

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to `server`."""
        weights_pb2_grpc.add_WeightsServiceServicer_to_server(self, server)

    async def ChangeWeights(
        self,
        request: weights_pb2.ChangeWeightsRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.ChangeWeightsRequest, weights_pb2.ChangeWeightsResponse
        ],
    ) -> weights_pb2.ChangeWeightsResponse:
        """Waits as long as the caller. Raises InvalidRequest for a command that this version lacks."""
        try:
            command = _commands.decode(request.command)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"command: {error}", param="command") from None
        reply = await self._change(command, context.time_remaining() or WAIT_S)
        return weights_pb2.ChangeWeightsResponse(reply=msgspec.msgpack.encode(reply))


class WeightsClient:
    """`WeightsService` of one worker."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = weights_pb2_grpc.WeightsServiceStub(channel)

    async def change(self, command: WeightsCommand, wait_s: float) -> WeightsReply:
        """Has the worker carry a command out.

        Raises what it failed with; Unavailable if the worker is gone, DeadlineExceeded after `wait_s`.
        """
        packed = msgspec.msgpack.encode(command)
        request = weights_pb2.ChangeWeightsRequest(command=packed)
        try:
            reply = await self._stub.ChangeWeights(request, timeout=wait_s)
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error) from error
        read = _replies.decode(reply.reply)
        if read.failure is not None:
            raise read.failure.error()
        return read
