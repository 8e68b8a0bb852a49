"""The asyncio client: chat, generate and models over one gRPC channel.

gRPC does not survive a fork: its threads are gone in the child of a process that used it before, so a call
would wait for ever, whatever its timeout, on new channels too. Such a call is refused.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias, Unpack

import grpc
import msgspec

from eyas.client import wire
from eyas.client.types import (
    ChatOptions,
    Choice,
    Completion,
    Delta,
    LoraAdapter,
    MemoryTag,
    Message,
    Model,
    MovedMemory,
    Options,
    PauseMode,
    PromptLogprobs,
    Timings,
    ToolCall,
    ToolCallDelta,
    Usage,
    WeightsUpdated,
)
from eyas.client.weights import WeightsSource
from eyas.client.wire import chat_request
from eyas.common.errors import Cancelled, EyasError, InvalidRequest, Overloaded, Unavailable
from eyas.common.security.tls import TO_CALLERS, client_tls
from eyas.common.wire import rpc
from protos import eyas_pb2, eyas_pb2_grpc

DEFAULT_TARGET = "127.0.0.1:8001"
SECURE = "https://"
DEFAULT_TIMEOUT_S = 7 * 86_400.0  # a week: none, since the server ends a call that brings no tokens
DEFAULT_RETRIES = 2
UPDATE_S = 1200.0  # for new weights, beside the wait for what runs
CONTROL_S = 180.0  # for what an operator asks: much memory may move
FIRST_PAUSE_S = 0.2  # before the first retry; each further one waits twice as long

Event: TypeAlias = eyas_pb2.ChatResponse | eyas_pb2.GenerateResponse
Call: TypeAlias = grpc.aio.UnaryStreamCall[Any, Event]


class AsyncStream:
    """The deltas of one running call, in order. Leaving its `async with` block cancels the call.

    Iteration raises EyasError if the call fails. `request_id`, the call's name in the server's logs, is empty
    until the server has admitted the call; `prompt_logprobs` come before the first delta, if they were asked
    for; `usage` and `timings` are all zeros until the call has ended. A call that the server could not take
    is made anew, `retries` times and within its timeout, but never after its first delta.
    """

    def __init__(self, call: Callable[[float], Call], timeout_s: float, retries: int) -> None:
        """`call(timeout_s)` begins the call."""
        self.request_id: str = ""
        self.prompt_logprobs: PromptLogprobs | None = None
        self.usage: Usage = Usage()
        self.timings: Timings = Timings()
        self._begin = call
        self._clock = asyncio.get_running_loop().time
        self._deadline = self._clock() + timeout_s
        self._retries = retries
        self._pause_s = FIRST_PAUSE_S
        self._started = False
        self._finished = False
        self._closed = False
        self._call = call(timeout_s)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        refuse_forked()
        while not self._closed:
            try:
                event: Any = await self._call.read()
            except grpc.aio.AioRpcError as error:
                await self._try_again(rpc.map_rpc_error(error, TO_CALLERS))
                continue
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
                if not self._closed:
                    raise Cancelled("the client was closed during the call") from None
                break  # the call was left while it was read
            if event is grpc.aio.EOF:  # pyright: ignore  (its stubs lack it)
                if self._finished:
                    self._closed = True
                else:
                    await self._try_again(Unavailable("the server ended the answer before it was complete"))
            elif event.HasField("delta"):
                self._started = True
                return wire.delta_from_pb(event.delta)
            else:
                await self._note(event)
        raise StopAsyncIteration

    async def _note(self, event: Event) -> None:
        """Remember what an event says beside deltas; an unknown one, of a newer server, says nothing."""
        if event.HasField("started"):
            self.request_id = event.started.request_id
        elif event.HasField("prompt_logprobs"):
            self.prompt_logprobs = wire.prompt_logprobs_from_pb(event.prompt_logprobs)
        elif event.HasField("finished"):
            metadata = await self._call.initial_metadata()
            self.usage = msgspec.structs.replace(
                wire.usage_from_pb(event.finished.usage, metadata),
                weight_version=event.finished.weight_version,
            )
            self.timings = wire.timings_from_pb(event.finished.timings)
            self._finished = True

    async def _try_again(self, error: EyasError) -> None:
        """Begins the call anew after a pause; raises `error` if that is not safe or leads nowhere."""
        pause_s = self._pause_s if not isinstance(error, Overloaded) else error.retry_after_s
        temporary = isinstance(error, Unavailable | Overloaded) and not self._started
        if not temporary or self._retries == 0 or self._clock() + pause_s >= self._deadline:
            self._closed = True
            raise error
        self._retries -= 1
        self._pause_s *= 2
        await asyncio.sleep(pause_s)
        if not self._closed:
            self._call = self._begin(self._deadline - self._clock())

    async def completion(self) -> Completion:
        """Everything that is still to come, as whole answers."""
        deltas: dict[int, list[Delta]] = {}
        async for delta in self:
            deltas.setdefault(delta.choice, []).append(delta)
        choices = tuple(_joined(index, deltas[index]) for index in sorted(deltas))
        return Completion(choices, self.usage, self.request_id, self.timings, self.prompt_logprobs)

    async def aclose(self) -> None:
        """Cancel the call if it still runs. Idempotent."""
        self._closed = True
        if not is_forked():
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncClient:
    """A client of one Eyas server, for asyncio; `Client` is its twin for ordinary code.

    `target` is host:port of the server's gRPC port, with https:// in front for TLS; `ca` is then a file of
    the authorities to trust (without: those that come with gRPC). Every call may take its own `timeout_s`,
    in seconds; an empty `model` means the one that the server has. Calls raise the errors of
    `eyas.common.errors`; one that the server is too busy for, or away, is tried `retries` times more before
    its first token. A closed client's calls raise `Cancelled`; in a forked child they raise InvalidRequest.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        api_key: str | None = None,
        model: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: int = DEFAULT_RETRIES,
        ca: str | None = None,
    ) -> None:
        """Raises InvalidRequest for an `api_key` that no header can hold, and in a process that was forked
        from one that has used a client; ConfigError for a wrong `ca`.
        """
        refuse_forked()
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidRequest("api_key must be printable ASCII, without a line's end", param="api_key")
        secure = target.startswith(SECURE)
        self._channel = rpc.channel(target.removeprefix(SECURE), client_tls(ca) if secure else None)
        self._stub: Any = eyas_pb2_grpc.EyasStub(self._channel)  # generated, without types
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._model = model
        self._timeout_s = timeout_s
        self._retries = retries
        self._closed = False

    async def chat(
        self, messages: Sequence[Message], *, timeout_s: float | None = None, **options: Unpack[ChatOptions]
    ) -> Completion:
        """The assistant's answer to `messages`, whole."""
        async with self.chat_stream(messages, timeout_s=timeout_s, **options) as stream:
            return await stream.completion()

    def chat_stream(
        self, messages: Sequence[Message], *, timeout_s: float | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncStream:
        """The assistant's answer to `messages` as it is made."""
        return self._stream(self._stub.Chat, chat_request(self._model, messages, options), timeout_s)

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

    async def pause_generation(
        self, mode: PauseMode = "abort", *, limit_s: float = 0.0, timeout_s: float = CONTROL_S
    ) -> int:
        """Stops generation on all workers, between two steps; how many requests that ended, or sent back to a
        queue. Requests that come meanwhile wait, each until its deadline.

        `limit_s`: the seconds after which generation goes on by itself, once memory is there; 0: it does not.
        """
        request = wire.pause_request(mode, limit_s)
        reply = await self._call(self._stub.PauseGeneration, request, timeout_s)
        return int(reply.requests)

    async def continue_generation(self, *, timeout_s: float = CONTROL_S) -> None:
        """Lets generation go on."""
        await self._call(self._stub.ContinueGeneration, eyas_pb2.ContinueGenerationRequest(), timeout_s)

    async def release_memory(
        self, tags: Sequence[MemoryTag] = (), *, timeout_s: float = CONTROL_S
    ) -> list[MovedMemory]:
        """Lets memory of all workers go (no tags: all that can): it is free for others. What has left.

        Raises EyasError while requests use it: pause them first.
        """
        request = eyas_pb2.ReleaseMemoryRequest(tags=wire.tags_to_pb(tags))
        return wire.moved_from_pb((await self._call(self._stub.ReleaseMemory, request, timeout_s)).moved)

    async def resume_memory(
        self, tags: Sequence[MemoryTag] = (), *, timeout_s: float = CONTROL_S
    ) -> list[MovedMemory]:
        """Takes memory again that was let go of: weights as they were, KV empty. What has come back."""
        request = eyas_pb2.ResumeMemoryRequest(tags=wire.tags_to_pb(tags))
        return wire.moved_from_pb((await self._call(self._stub.ResumeMemory, request, timeout_s)).moved)

    async def update_weights(
        self,
        source: WeightsSource,
        *,
        version: str = "",
        running: str = "drain",
        wait_s: float = 300.0,
        whole: bool = False,
    ) -> WeightsUpdated:
        """Changes the weights of all workers, or of none; returns when the new ones serve.

        `source`: a folder with all of the model's tensors on the workers' machine; `SharedTensors`,
        `DeviceTensors` or `BroadcastTensors`; or safetensors files as bytes. `running`: "drain", "abort" or
        "restart", what becomes of calls that run.
        `whole`: a missing tensor is an error, as it is of a folder; else it stays. Raises EyasError, which
        names what is wrong: then the old weights serve on.
        """
        request = wire.update_to_pb(source, running)
        request.version, request.wait_s, request.whole = version, wait_s, whole
        reply = await self._call(self._stub.UpdateWeights, request, wait_s + UPDATE_S)
        return wire.updated_from_pb(reply)

    async def join_weights_group(
        self,
        group: str,
        address: str,
        size: int,
        *,
        backend: str = "nccl",
        first_rank: int = 1,
        timeout_s: float = CONTROL_S,
    ) -> tuple[str, ...]:
        """All workers join a `torch.distributed` group of `size` processes, whose rank 0 listens at `address`
        (HOST:PORT) and waits for them; returns the workers, in the order of their ranks.
        """
        request = eyas_pb2.JoinWeightsGroupRequest(group=group, address=address, size=size, backend=backend)
        request.first_rank = first_rank
        return tuple((await self._call(self._stub.JoinWeightsGroup, request, timeout_s)).workers)

    async def leave_weights_group(self, group: str, *, timeout_s: float = CONTROL_S) -> None:
        """They leave it."""
        request = eyas_pb2.LeaveWeightsGroupRequest(group=group)
        await self._call(self._stub.LeaveWeightsGroup, request, timeout_s)

    async def load_adapter(
        self,
        name: str,
        path: str,
        *,
        pinned: bool = False,
        replace: bool = False,
        timeout_s: float = CONTROL_S,
    ) -> LoraAdapter:
        """Loads the LoRA adapter in a folder of the server, on all workers or on none: calls then name it as
        their `model`. `pinned`: it stays on the devices. `replace`: in place of one that has the name.
        """
        request = eyas_pb2.LoadAdapterRequest(name=name, path=path, pinned=pinned, replace=replace)
        return wire.adapter_from_pb((await self._call(self._stub.LoadAdapter, request, timeout_s)).adapter)

    async def unload_adapter(self, name: str, *, timeout_s: float = CONTROL_S) -> LoraAdapter:
        """Unloads an adapter; calls that have it go on to their ends. Raises NotFound for no one's name."""
        request = eyas_pb2.UnloadAdapterRequest(name=name)
        return wire.adapter_from_pb((await self._call(self._stub.UnloadAdapter, request, timeout_s)).adapter)

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        """The one answer of a call."""
        self._check_open()
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error, TO_CALLERS) from error

    async def models(self, *, timeout_s: float = 10.0) -> list[Model]:
        """Returns the models of the server."""
        reply = await self._call(self._stub.Models, eyas_pb2.ModelsRequest(), timeout_s)
        return [Model(model.id, model.context_length, model.parent) for model in reply.models]

    async def aclose(self) -> None:
        """Cancel what still runs and close the connection, but for a forked parent's. Idempotent."""
        self._closed = True
        if not is_forked():
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _stream(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[Any, Event],
        request: eyas_pb2.ChatRequest | eyas_pb2.GenerateRequest,
        timeout_s: float | None,
    ) -> AsyncStream:
        def call(left_s: float) -> Call:
            self._check_open()
            return method(request, timeout=left_s, metadata=self._metadata)

        return AsyncStream(call, self._timeout_s if timeout_s is None else timeout_s, self._retries)

    def _check_open(self) -> None:
        refuse_forked()
        if self._closed:
            raise Cancelled("the client is closed")


def _is_cancelled() -> bool:
    """Whether the running task itself was asked to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _joined(index: int, deltas: Sequence[Delta]) -> Choice:
    return Choice(
        index=index,
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        finish_reason=deltas[-1].finish_reason,
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=_calls([part for delta in deltas for part in delta.tool_calls]),
    )


def _calls(parts: Sequence[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls that these parts make, in order: a call's first part has its id and its name."""
    arguments: dict[int, str] = {}
    for part in parts:
        arguments[part.index] = arguments.get(part.index, "") + part.arguments
    return tuple(ToolCall(part.id, part.name, arguments[part.index]) for part in parts if part.name)


def is_forked() -> bool:
    """Whether this process was forked from one that has made a client."""
    return _home() != os.getpid()


def refuse_forked() -> None:
    """Raises InvalidRequest in such a process."""
    if is_forked():
        raise InvalidRequest(
            "this process was forked from one that has made a client, and gRPC does not survive that: "
            "make the first client in the child, or start processes by multiprocessing's 'spawn'"
        )


@functools.cache
def _home() -> int:
    """The process that made the first client; a forked child remembers its parent's."""
    return os.getpid()
