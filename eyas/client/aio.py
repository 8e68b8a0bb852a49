"""The asyncio client: chat, generate and models over one gRPC channel.

It knows calls, deadlines and cancellation. It refuses to know HTTP, tokenizers and the cluster behind the
gateway.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from eyas.client import wire
from eyas.client.types import Choice, Completion, Delta, Message, Model, Options, Usage
from eyas.common import rpc
from eyas.common.errors import Unavailable
from protos import eyas_pb2, eyas_pb2_grpc

DEFAULT_TARGET = "127.0.0.1:8001"
DEFAULT_TIMEOUT_S = 600.0


class AsyncStream:
    """The deltas of one running call, in order. Leaving its `async with` block cancels the call.

    Iteration raises EyasError if the call fails. `usage` is there once it has ended.
    """

    def __init__(self, call: grpc.aio.UnaryStreamCall) -> None:
        self.usage: Usage | None = None
        self._call = call
        self._closed = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._closed:
            try:
                event = await self._call.read()
            except grpc.aio.AioRpcError as error:
                self._closed = True
                raise rpc.map_rpc_error(error) from error
            if event is grpc.aio.EOF:
                self._closed = True
                if self.usage is None:
                    raise Unavailable("the server ended the answer before it was complete")
            elif event.HasField("usage"):
                self.usage = wire.usage_from_pb(event.usage)
            elif event.HasField("delta"):
                return wire.delta_from_pb(event.delta)
        raise StopAsyncIteration

    async def completion(self) -> Completion:
        """Everything that is still to come, as whole answers."""
        deltas: dict[int, list[Delta]] = {}
        async for delta in self:
            deltas.setdefault(delta.choice, []).append(delta)
        choices = tuple(_joined(index, deltas[index]) for index in sorted(deltas))
        return Completion(choices, self.usage or Usage())

    async def aclose(self) -> None:
        """Cancel the call if it still runs. Idempotent."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncClient:
    """A client of one Eyas server, for asyncio; `Client` is its twin for ordinary code.

    `target` is host:port of the server's gRPC port. Every call may take its own `timeout_s`, in seconds; an
    empty `model` means the one that the server has. Calls raise the errors of `eyas.common.errors`.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        api_key: str | None = None,
        model: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._channel = rpc.channel(target)
        self._stub = eyas_pb2_grpc.EyasStub(self._channel)
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._model = model
        self._timeout_s = timeout_s

    async def chat(
        self, messages: Sequence[Message], *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """The assistant's answer to `messages`, whole."""
        async with self.chat_stream(messages, timeout_s=timeout_s, **options) as stream:
            return await stream.completion()

    def chat_stream(
        self, messages: Sequence[Message], *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """The assistant's answer to `messages` as it is made."""
        return self._stream(self._stub.Chat, wire.chat_request(self._model, messages, options), timeout_s)

    async def generate(
        self, prompt: str | Sequence[int], *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """The continuation of a text, or of token ids, whole."""
        async with self.generate_stream(prompt, timeout_s=timeout_s, **options) as stream:
            return await stream.completion()

    def generate_stream(
        self, prompt: str | Sequence[int], *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """The continuation of a text, or of token ids, as it is made."""
        request = wire.generate_request(self._model, prompt, options)
        return self._stream(self._stub.Generate, request, timeout_s)

    async def models(self, *, timeout_s: float = 10.0) -> list[Model]:
        """What the server offers."""
        try:
            reply = await self._stub.Models(
                eyas_pb2.ModelsRequest(), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error) from error
        return [Model(model.id, model.context_length) for model in reply.models]

    async def aclose(self) -> None:
        """Cancel what still runs and close the connection."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _stream(
        self,
        method: grpc.aio.UnaryStreamMultiCallable,
        request: eyas_pb2.ChatRequest | eyas_pb2.GenerateRequest,
        timeout_s: float | None,
    ) -> AsyncStream:
        timeout = self._timeout_s if timeout_s is None else timeout_s
        return AsyncStream(method(request, timeout=timeout, metadata=self._metadata))


def _joined(index: int, deltas: Sequence[Delta]) -> Choice:
    return Choice(
        index=index,
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        finish_reason=deltas[-1].finish_reason,
    )
