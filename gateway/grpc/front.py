"""The gRPC front: the service `eyas.v1.Eyas` over the same backend, limits and text as the HTTP front.

It translates messages to calls and back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import grpc
import msgspec

from eyas.common.cluster.listening import listen
from eyas.common.cluster.names import is_loopback, is_passed_on
from eyas.common.config import GatewayConfig
from eyas.common.errors import Forbidden, InvalidRequest
from eyas.common.logging import request_id, traceparent
from eyas.common.security.tls import caller_context
from eyas.common.types import GenerationRequest
from eyas.common.wire import rpc
from eyas.common.wire.control import ContinueGeneration, ReleaseMemory, ResumeMemory
from gateway.backends.admission import ServedModel, admit, answer_limit, called, new_adapter, serving
from gateway.backends.base import GenerationBackend, GenerationStream
from gateway.formats.chat_request import ChatModel, chat_prompt, read_rules, reading_of, with_grammar
from gateway.grpc import admission
from gateway.grpc import control as grpc_control
from gateway.grpc import messages as grpc_messages
from gateway.grpc import weights as grpc_weights
from gateway.grpc.messages import GrpcChat, chat_of, delta_to_pb, read_delta_to_pb
from gateway.grpc.relay import GrpcRelay
from gateway.limits.keys import KeyRing
from gateway.limits.queues import ReadQueue
from gateway.limits.quotas import CallerQuotas, headers, pay
from gateway.observe.metrics import GatewayMetrics
from gateway.observe.timings import timings_object
from gateway.parsers.message import MessageReading
from gateway.text.entries import TextRules, TextStream
from gateway.text.message_reader import MessageReader
from gateway.text.tokenizer import MANY_MESSAGES, Tokenizer
from protos import eyas_pb2, eyas_pb2_grpc

SERVICE = "eyas.v1.Eyas"
HEALTH_EVERY_S = 1.0
STOP_GRACE_S = 1.0

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Response = TypeVar("Response", eyas_pb2.ChatResponse, eyas_pb2.GenerateResponse)


@dataclass(frozen=True)
class _PendingCall:
    """A call with its prompt in ids. `reading`: what is looked for in the answers of the `chat`."""

    prompt: tuple[int, ...]
    request: eyas_pb2.ChatRequest | eyas_pb2.GenerateRequest
    rules: TextRules
    context: Context
    chat: GrpcChat | None = None
    reading: MessageReading | None = None

    @property
    def options(self) -> eyas_pb2.GenerateOptions:
        """The options of the request."""
        return self.request.options

    def named(self, error: InvalidRequest) -> InvalidRequest:
        """Returns the error with this API's field names; of a grammar of tools alone, with theirs."""
        name = error.param or ""
        if name == "grammar" and not self.options.HasField("grammar"):
            ours, theirs = "grammar", "tools"
        elif name.startswith("speculative."):
            ours, theirs = "speculative", "draft_limits"
        else:
            return error
        message = error.message.replace(ours, theirs, 1)
        return type(error)(message, param=name.replace(ours, theirs, 1))


class EyasServicer(eyas_pb2_grpc.EyasServicer):  # type: ignore[misc]
    """`GrpcChat`, `Generate`, `Models`, and what an operator asks. Errors go to the server's interceptor."""

    def __init__(
        self,
        config: GatewayConfig,
        backend: GenerationBackend,
        tokenizer: Tokenizer,
        metrics: GatewayMetrics,
        pace: ReadQueue,
    ) -> None:
        self.keys = KeyRing(config)
        self._config = config
        self._backend = backend
        self._tokenizer = tokenizer
        self._chats = ChatModel.of(config, tokenizer)
        self._metrics = metrics
        self._pace = pace

    async def Chat(
        self, request: eyas_pb2.ChatRequest, context: Context
    ) -> AsyncGenerator[eyas_pb2.ChatResponse, None]:
        """Answers a chat: deltas, then the usage. Raises InvalidRequest naming the field, or what fails."""
        await self._check(request, context)
        is_long = len(request.messages) >= MANY_MESSAGES
        chat = await self._pace.aside(partial(chat_of, request)) if is_long else chat_of(request)
        text, prompt = await chat_prompt(self._chats, chat.messages, chat)
        reading = reading_of(self._chats.dialect, chat, chat.messages, text)
        rules = grpc_messages.text_rules(request.options, continues_prompt=False)
        if reading is not None:
            rules = read_rules(rules, reading)
        pending = _PendingCall(prompt, request, rules, context, chat, reading)
        async with contextlib.aclosing(self._run(pending, eyas_pb2.ChatResponse)) as responses:
            async for response in responses:
                yield response

    async def Generate(
        self, request: eyas_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[eyas_pb2.GenerateResponse, None]:
        """Continues a text or token ids: deltas, then the usage. Raises as `GrpcChat` does."""
        await self._check(request, context)
        if request.WhichOneof("prompt") == "ids":
            if not request.options.HasField("truncate_prompt_tokens"):
                answer_limit(await self._served(), len(request.ids.ids), least=0)  # before they are copied
            prompt = tuple(request.ids.ids)
        else:
            prompt = await self._tokenizer.encode_prompt(request.text)
        rules = grpc_messages.text_rules(request.options, continues_prompt=True)
        pending = _PendingCall(prompt, request, rules, context)
        async with contextlib.aclosing(self._run(pending, eyas_pb2.GenerateResponse)) as responses:
            async for response in responses:
                yield response

    async def Models(self, request: eyas_pb2.ModelsRequest, context: Context) -> eyas_pb2.ModelsResponse:
        """The served model, by all its names, and its adapters. Raises Unavailable while no worker serves."""
        model = await self._served()
        await _begin(model, context)
        length, parent = model.context_length, self._config.served_model
        models = [eyas_pb2.ModelInfo(id=name, context_length=length) for name in self._config.names]
        for adapter in model.adapters.adapters:
            models.append(eyas_pb2.ModelInfo(id=adapter.name, context_length=length, parent=parent))
        return eyas_pb2.ModelsResponse(models=models)

    async def PauseGeneration(
        self, request: eyas_pb2.PauseGenerationRequest, context: Context
    ) -> eyas_pb2.PauseGenerationResponse:
        """Pauses every worker; how many requests that ended, or sent back to a queue."""
        self._check_operator(context)
        outcomes = await self._backend.control(grpc_control.pause_of(request))
        count = sum(outcome.requests for outcome in outcomes.values())
        return eyas_pb2.PauseGenerationResponse(requests=count)

    async def ContinueGeneration(
        self, request: eyas_pb2.ContinueGenerationRequest, context: Context
    ) -> eyas_pb2.ContinueGenerationResponse:
        """Lets every worker go on. Raises Busy while one's memory is away."""
        self._check_operator(context)
        await self._backend.control(ContinueGeneration())
        return eyas_pb2.ContinueGenerationResponse()

    async def UpdateWeights(
        self, request: eyas_pb2.UpdateWeightsRequest, context: Context
    ) -> eyas_pb2.UpdateWeightsResponse:
        """Changes the weights of every worker, or of none. Raises what is wrong with them."""
        self._check_operator(context)
        change = await self._backend.weights.update(grpc_weights.update_of(request))
        return grpc_weights.change_to_pb(change)

    async def JoinWeightsGroup(
        self, request: eyas_pb2.JoinWeightsGroupRequest, context: Context
    ) -> eyas_pb2.JoinWeightsGroupResponse:
        """Has every worker join a group. Raises what is wrong with it."""
        self._check_operator(context)
        workers = await self._backend.weights.join(grpc_weights.join_of(request))
        return eyas_pb2.JoinWeightsGroupResponse(workers=workers)

    async def LeaveWeightsGroup(
        self, request: eyas_pb2.LeaveWeightsGroupRequest, context: Context
    ) -> eyas_pb2.LeaveWeightsGroupResponse:
        """Has every worker leave it."""
        self._check_operator(context)
        await self._backend.weights.leave(request.group)
        return eyas_pb2.LeaveWeightsGroupResponse()

    async def LoadAdapter(
        self, request: eyas_pb2.LoadAdapterRequest, context: Context
    ) -> eyas_pb2.LoadAdapterResponse:
        """Loads an adapter on every worker, or on none. Raises what is wrong with its name or its folder."""
        adapter = new_adapter(self._config, request.name, request.path, pinned=request.pinned)
        loaded = await self._backend.adapters.load(adapter, replace=request.replace)
        return eyas_pb2.LoadAdapterResponse(adapter=grpc_messages.adapter_to_pb(loaded))

    async def UnloadAdapter(
        self, request: eyas_pb2.UnloadAdapterRequest, context: Context
    ) -> eyas_pb2.UnloadAdapterResponse:
        """Unloads an adapter on every worker. Raises ModelNotFound if none has the name."""
        gone = await self._backend.adapters.unload(request.name, request.id)
        return eyas_pb2.UnloadAdapterResponse(adapter=grpc_messages.adapter_to_pb(gone))

    async def ReleaseMemory(
        self, request: eyas_pb2.ReleaseMemoryRequest, context: Context
    ) -> eyas_pb2.ReleaseMemoryResponse:
        """Lets memory go on every worker. Raises Busy if requests still use it."""
        self._check_operator(context)
        outcomes = await self._backend.control(ReleaseMemory(grpc_control.tags_of(request.tags)))
        return eyas_pb2.ReleaseMemoryResponse(moved=grpc_control.moved_to_pb(outcomes))

    async def ResumeMemory(
        self, request: eyas_pb2.ResumeMemoryRequest, context: Context
    ) -> eyas_pb2.ResumeMemoryResponse:
        """Takes it again."""
        self._check_operator(context)
        outcomes = await self._backend.control(ResumeMemory(grpc_control.tags_of(request.tags)))
        return eyas_pb2.ResumeMemoryResponse(moved=grpc_control.moved_to_pb(outcomes))

    def _check_operator(self, context: Context) -> None:
        """Raises Forbidden where strangers could change weights, or control the server. Who has connected is
        not known here, so all callers must be of this machine.
        """
        passed_on = is_passed_on(key for key, _ in context.invocation_metadata() or ())
        if not self.keys.needed and (passed_on or not is_loopback(self._config.host)):
            text = (
                "without API keys this is done where the server listens on 127.0.0.1 alone, behind no proxy"
            )
            raise Forbidden(text)

    async def _check(
        self, request: eyas_pb2.ChatRequest | eyas_pb2.GenerateRequest, context: Context
    ) -> None:
        """Waits for the turn of the request. Raises Overloaded if too much waits, ModelNotFound unless it
        names the served model, or none.
        """
        if request.model:
            called(await self._served(request.model), self._config, request.model)
        await self._pace.enter(admission.caller_of(context, self.keys).name, request.ByteSize())

    async def _served(self, name: str = "") -> ServedModel:
        return await serving(self._config, self._backend, name)

    async def _run(self, pending: _PendingCall, response: type[Response]) -> AsyncGenerator[Response, None]:
        """Admits the prompt, then yields its deltas and its usage; every way out frees the cluster."""
        began = time.monotonic()
        model = await self._served(pending.request.model)
        model = called(model, self._config, pending.request.model or model.id)
        request = await self._admit(model, pending)
        readers = [MessageReader(pending.reading) for _ in request.choices if pending.reading is not None]
        async with contextlib.AsyncExitStack() as owned:
            meter = owned.enter_context(self._metrics.meter())
            generation = await owned.enter_async_context(
                contextlib.aclosing(await self._start(request, pending))
            )
            await _begin(model, pending.context)
            text = TextStream(generation, request, self._tokenizer, pending.rules)
            pay(text.usage.prompt_tokens)
            owned.callback(lambda: pay(text.usage.completion_tokens))
            owned.callback(lambda: meter.ended(text.usage, [text.trace]))
            yield response(started=grpc_messages.started_to_pb(model, request))
            prompt_sent = request.params.prompt_logprobs is None
            while deltas := await text.take():
                if not prompt_sent and text.trace.prompt is not None:
                    prompt_sent = True  # a thread converts it: it is long, and other streams go on
                    prompt = await asyncio.to_thread(grpc_messages.prompt_to_pb, request, text.trace.prompt)
                    yield response(prompt_logprobs=prompt)
                meter.deltas(deltas)
                for delta in deltas:
                    message = (
                        read_delta_to_pb(delta, readers[delta.choice]) if readers else delta_to_pb(delta)
                    )
                    yield response(delta=message)
            timings = timings_object(began, text.trace, text.usage)
            reasoned = sum(reader.reasoning_tokens for reader in readers)
            finished = grpc_messages.finished_to_pb(text.usage, timings, reasoned)
            finished.weight_version = text.weight_version
            yield response(finished=finished)

    async def _start(self, request: GenerationRequest, pending: _PendingCall) -> GenerationStream:
        try:
            return await self._backend.start(request)
        except InvalidRequest as error:
            raise pending.named(error) from None

    async def _admit(self, model: ServedModel, pending: _PendingCall) -> GenerationRequest:
        """The admitted request. Raises InvalidRequest naming the option, or ContextLengthExceeded."""
        words = grpc_messages.bad_words(pending.options)
        spellings = await self._tokenizer.spellings(words) if words else ()
        options = grpc_messages.generation_options(model, pending.options, spellings)
        if pending.chat is not None:
            options = with_grammar(options, self._chats, pending.chat, pending.reading)
        if pending.options.prediction:
            predicted = await self._tokenizer.encode_prompt(
                pending.options.prediction, add_special_tokens=False
            )
            options = replace(options, predicted=predicted)
        timeout_s = min(self._config.request_timeout_s, pending.context.time_remaining() or float("inf"))
        request = admit(model, pending.prompt, options, timeout_s)
        return msgspec.structs.replace(request, caller=admission.caller_of(pending.context, self.keys).name)


class GrpcFront:
    """The gateway's gRPC server, with reflection, and health: SERVING means that a request would succeed."""

    def __init__(
        self,
        config: GatewayConfig,
        backend: GenerationBackend,
        tokenizer: Tokenizer,
        metrics: GatewayMetrics,
        quotas: CallerQuotas | None = None,
    ) -> None:
        """`quotas` None: no limits. Raises ConfigError if the port is taken, or the certificate is bad."""
        self._backend = backend
        quotas = quotas or CallerQuotas()
        servicer = EyasServicer(config, backend, tokenizer, metrics, quotas.pace)
        self._server = rpc.server(
            admission.AdmissionInterceptor(SERVICE, servicer.keys, quotas, metrics.tracer),
            admission.limits(config),
        )
        eyas_pb2_grpc.add_EyasServicer_to_server(servicer, self._server)
        self._health = rpc.HealthService(self._server, [SERVICE])
        tls = None if config.certificate is None else caller_context(config.certificate, "h2")
        listener = listen(config.host, config.grpc_port, "grpc-port", config.member is not None)
        self._socket = rpc.bind_unnamed(self._server)
        self._relay = GrpcRelay(listener, f"/proc/self/fd/{self._socket}", tls, config.max_connections)
        self.port = self._relay.port
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serves, and follows the backend's health, until `aclose`."""
        await self._health.set(not self._backend.health().problem)
        await self._server.start()
        self._relay.start()
        self._watch = asyncio.create_task(self._follow_health(), name="grpc health")

    async def aclose(self) -> None:
        """Stops listening, gives running calls `STOP_GRACE_S`, then ends them."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._relay.stop()
        await self._server.stop(STOP_GRACE_S)
        await self._relay.aclose()
        os.close(self._socket)

    async def _follow_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            await self._health.set(not self._backend.health().problem)


async def _begin(model: ServedModel, context: Context) -> None:
    """Sends the initial metadata: the call's id and trace, its key's limits, whether answers mean nothing."""
    metadata = [(rpc.REQUEST_ID, request_id.get()), *headers().items()]
    if traceparent.get():
        metadata.append((rpc.TRACEPARENT, traceparent.get()))
    if model.synthetic:
        metadata.append((rpc.SYNTHETIC, "1"))
    await context.send_initial_metadata(metadata)
