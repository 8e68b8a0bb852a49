"""The gRPC front: the service `eyas.v1.Eyas` over the same backend, limits and text as the HTTP front.

It translates messages to calls and back. It refuses to know how tokens are made and routed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, TypeAlias

import grpc
import msgspec

from eyas.common import convert, rpc
from eyas.common.config import GatewayConfig
from eyas.common.errors import InvalidRequest
from gateway import grpc_door
from gateway.admission import GenerationOptions, ServedModel, admit, answer_limit, check_model, served_model
from gateway.backend import GenerationBackend
from gateway.keys import Keys
from gateway.metrics import GatewayMetrics
from gateway.schema import MAX_CHOICES, MAX_STOP_LENGTH, MAX_STOPS
from gateway.text import TextDelta, TextRules, TextStream, UsageCounts
from gateway.tokenizer import Tokenizer
from protos import eyas_pb2, eyas_pb2_grpc

SERVICE = "eyas.v1.Eyas"
HEALTH_EVERY_S = 1.0
STOP_GRACE_S = 1.0
ROLES = ("system", "user", "assistant")

_SAMPLING = (
    "min_tokens temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty "
    "ignore_eos logprobs"
).split()

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class EyasServicer(eyas_pb2_grpc.EyasServicer):  # type: ignore[misc]
    """`Chat`, `Generate` and `Models`. Errors go to the server's interceptor."""

    def __init__(
        self, config: GatewayConfig, backend: GenerationBackend, tokenizer: Tokenizer, metrics: GatewayMetrics
    ) -> None:
        self.keys = Keys(config.api_keys)
        self._config = config
        self._backend = backend
        self._tokenizer = tokenizer
        self._metrics = metrics

    async def Chat(
        self, request: eyas_pb2.ChatRequest, context: Context
    ) -> AsyncGenerator[eyas_pb2.GenerateEvent, None]:
        """Answers a chat: deltas, then the usage. Raises InvalidRequest naming the field, or what fails."""
        self._check(request)
        if not request.messages:
            raise InvalidRequest("messages is empty", param="messages")
        for i, message in enumerate(request.messages):
            if message.role not in ROLES:
                field = f"messages[{i}].role"
                raise InvalidRequest(f"{field} must be one of {', '.join(ROLES)}", param=field)
        prompt = await self._tokenizer.encode_chat(
            [{"role": message.role, "content": message.content} for message in request.messages]
        )
        rules = TextRules(_stops(request.options))
        async with contextlib.aclosing(self._run(prompt, request.options, rules, context)) as events:
            async for event in events:
                yield event

    async def Generate(
        self, request: eyas_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[eyas_pb2.GenerateEvent, None]:
        """Continues a text or token ids: deltas, then the usage. Raises as `Chat` does."""
        self._check(request)
        if request.WhichOneof("prompt") == "ids":
            answer_limit(await self._served(), len(request.ids.ids), least=0)  # before they are copied
            prompt = tuple(request.ids.ids)
        else:
            prompt = await self._tokenizer.encode_prompt(request.text)
        rules = TextRules(_stops(request.options), continues_prompt=True)
        async with contextlib.aclosing(self._run(prompt, request.options, rules, context)) as events:
            async for event in events:
                yield event

    async def Models(self, request: eyas_pb2.ModelsRequest, context: Context) -> eyas_pb2.ModelsReply:
        """The served model. Raises Unavailable while no worker serves it."""
        model = await self._served()
        await _mark(model, context)
        info = eyas_pb2.ModelInfo(id=model.id, context_length=model.context_length)
        return eyas_pb2.ModelsReply(models=[info])

    def _check(self, request: eyas_pb2.ChatRequest | eyas_pb2.GenerateRequest) -> None:
        """Raises ModelNotFound unless the request names the served model, or none."""
        if request.model:
            check_model(self._config, request.model)

    async def _served(self) -> ServedModel:
        return served_model(self._config, await self._backend.models())

    async def _run(
        self,
        prompt: tuple[int, ...],
        options: eyas_pb2.GenerateOptions,
        rules: TextRules,
        context: Context,
    ) -> AsyncGenerator[eyas_pb2.GenerateEvent, None]:
        """Admits the prompt, then yields its deltas and its usage; every way out frees the cluster."""
        model = await self._served()
        timeout_s = min(self._config.request_timeout_s, context.time_remaining() or float("inf"))
        request = admit(model, prompt, _options(model, options), timeout_s)
        request = msgspec.structs.replace(request, caller=grpc_door.caller_of(context, self.keys))
        async with contextlib.AsyncExitStack() as owned:
            meter = owned.enter_context(self._metrics.meter())
            generation = await owned.enter_async_context(
                contextlib.aclosing(await self._backend.start(request))
            )
            await _mark(model, context)
            text = TextStream(generation, request, self._tokenizer, rules)
            owned.callback(lambda: meter.ended(text.usage, [text.trace]))
            async for delta in text.deltas():
                meter.delta(delta)
                yield eyas_pb2.GenerateEvent(delta=_delta_to_pb(delta))
            yield eyas_pb2.GenerateEvent(usage=_usage_to_pb(text.usage))


class GrpcFront:
    """The gateway's gRPC server, with reflection, and health: SERVING means that a request would succeed."""

    def __init__(
        self, config: GatewayConfig, backend: GenerationBackend, tokenizer: Tokenizer, metrics: GatewayMetrics
    ) -> None:
        """Raises ConfigError if the port is taken."""
        self._backend = backend
        servicer = EyasServicer(config, backend, tokenizer, metrics)
        self._server = rpc.server(
            grpc_door.AdmissionInterceptor(SERVICE, servicer.keys), grpc_door.limits(config)
        )
        eyas_pb2_grpc.add_EyasServicer_to_server(servicer, self._server)
        self._health = rpc.Health(self._server, [SERVICE])
        self.port = rpc.bind(self._server, config.host, config.grpc_port)
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serves, and follows the backend's health, until `aclose`."""
        await self._health.set(not self._backend.health().problem)
        await self._server.start()
        self._watch = asyncio.create_task(self._follow_health(), name="grpc health")

    async def aclose(self) -> None:
        """Stops listening, gives running calls `STOP_GRACE_S`, then ends them."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._server.stop(STOP_GRACE_S)

    async def _follow_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            await self._health.set(not self._backend.health().problem)


async def _mark(model: ServedModel, context: Context) -> None:
    """Says in the initial metadata if answers mean nothing."""
    if model.synthetic:
        await context.send_initial_metadata(((rpc.SYNTHETIC, "1"),))


def _options(model: ServedModel, options: eyas_pb2.GenerateOptions) -> GenerationOptions:
    """The message's options. Raises InvalidRequest for `n`; `admit` checks the others."""
    given = {name: getattr(options, name) for name in _SAMPLING if options.HasField(name)}
    params = model.params(
        **given, logit_bias=dict(options.logit_bias), stop_token_ids=tuple(options.stop_token_ids)
    )
    n = options.n if options.HasField("n") else 1
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(f"n must be between 1 and {MAX_CHOICES}", param="n")
    return GenerationOptions(
        params,
        max_tokens=options.max_tokens if options.HasField("max_tokens") else None,
        seed=options.seed if options.HasField("seed") else None,
        n=n,
        speculative=options.speculative if options.HasField("speculative") else True,
    )


def _stops(options: eyas_pb2.GenerateOptions) -> tuple[str, ...]:
    stops = tuple(options.stop)
    if len(stops) > MAX_STOPS or not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise InvalidRequest(
            f"stop must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters", param="stop"
        )
    return stops


def _delta_to_pb(delta: TextDelta) -> eyas_pb2.Delta:
    return eyas_pb2.Delta(
        choice=delta.choice,
        text=delta.text,
        tokens=delta.tokens,
        logprobs=[convert.logprob_to_pb(logprob) for logprob in delta.logprobs],
        finish_reason=delta.finish.value if delta.finish is not None else "",
    )


def _usage_to_pb(usage: UsageCounts) -> eyas_pb2.Usage:
    return eyas_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        accepted_prediction_tokens=usage.accepted,
        rejected_prediction_tokens=usage.rejected,
        verify_steps=usage.verify_steps,
    )
