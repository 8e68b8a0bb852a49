"""The HTTP front: serves OpenAI's, Anthropic's and SGLang's routes for generation on a backend.

A call is parsed, admitted, and answered as one JSON body or as server-sent events. The status line is written
only after the backend has admitted every prompt, so that a refused call has an error status, streaming or
not.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from asyncio import to_thread
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from eyas.common.config import GatewayConfig
from eyas.common.errors import EyasError, InvalidRequest
from eyas.common.logging import request_id
from gateway.backends.admission import ServedModel, called, is_synthetic, serving
from gateway.backends.answer import CallAnswer, admitted, joined
from gateway.backends.base import GenerationBackend
from gateway.backends.routed import with_experts
from gateway.backends.running import CallLifetime, RunningCalls
from gateway.formats.anthropic_reply import AnthropicFormat
from gateway.formats.anthropic_request import FIELDS as ANTHROPIC_FIELDS
from gateway.formats.anthropic_request import CountBody, MessagesBody, skipped_tools
from gateway.formats.anthropic_request import as_chat as as_anthropic_chat
from gateway.formats.chat_request import ChatModel, chat_call, chat_prompt
from gateway.formats.fields import RequestBody, ignored, parse
from gateway.formats.openai_message import MessageFormat
from gateway.formats.openai_reply import AnswerFormat, ChatFormat, TextFormat
from gateway.formats.openai_request import ApiCall, named, text_call
from gateway.formats.responses_reply import ResponsesFormat
from gateway.formats.responses_request import FIELDS, ResponsesBody, as_chat
from gateway.formats.schema import AbortBody, ChatBody, DetokenizeBody, TextBody, TokenizeBody
from gateway.formats.sglang import GenerateBody, SglangFormat, generate_call
from gateway.http.adapters import AdapterEndpoints
from gateway.http.control import ControlEndpoints
from gateway.http.loads import LoadEndpoints
from gateway.http.openapi import EVENTS, JSON, Answerer, HttpEndpoint, described
from gateway.http.pages import AdminEndpoints, ReadEndpoints, json_response
from gateway.http.weights import WeightEndpoints
from gateway.http.wire import (
    EXPOSED,
    AuthorizationCors,
    PendingBodies,
    RequestMiddleware,
    WhileConnected,
    WireReply,
    body_limit,
    disconnected,
    on_eyas_error,
    on_http_exception,
    read_body,
)
from gateway.limits.keys import KeyRing
from gateway.limits.quotas import CallerQuotas, pay
from gateway.observe.console import ConsoleEndpoints
from gateway.observe.metrics import CallMeter, GatewayMetrics, GatewayPage
from gateway.observe.tracing import failed
from gateway.text.entries import TextDelta
from gateway.text.tokenizer import Tokenizer

B = TypeVar("B", bound=RequestBody)
VECTORS = {
    "/v1/embeddings": "makes no embeddings",
    "/v1/rerank": "ranks no texts",
    "/v1/score": "scores no pairs of texts",
    "/rerank": "ranks no texts",
    "/score": "scores no pairs of texts",
    "/pooling": "makes no embeddings",
    "/classify": "sorts no texts into classes",
    "/encode": "makes no embeddings",
}
"""Routes for models that generate no text, with the reason for which they are refused."""
MANY_QUOTES = 8192
"""A body with this number of quotes, as of a thousand messages, is parsed in a thread: it takes 10 ms."""
_log = logging.getLogger("eyas.gateway")


def create_app(
    config: GatewayConfig,
    backend: GenerationBackend,
    tokenizer: Tokenizer,
    metrics: GatewayMetrics,
    quotas: CallerQuotas | None = None,
) -> Starlette:
    """Makes the ASGI application. The caller owns `backend`, starts and stops it. `quotas` None: no
    limits.
    """
    metrics.serving.set_function(lambda: float(not backend.health().problem))
    metrics.synthetic.set_function(lambda: float(is_synthetic(link.info for link in backend.links())))
    metrics.exported = GatewayPage(
        metrics.registry,
        config.served_model,
        lambda: (link.info for link in backend.links()),
        vllm=config.vllm_metrics,
    )
    front = HttpFront(config, backend, tokenizer, metrics, quotas or CallerQuotas())
    pages = [
        *ReadEndpoints(config, backend, metrics).endpoints(),
        *LoadEndpoints(backend, metrics).endpoints(),
        *AdminEndpoints(backend).endpoints(),
        *WeightEndpoints(backend, keyed=front.keyed).endpoints(),
        *ControlEndpoints(backend, keyed=front.keyed).endpoints(),
        *AdapterEndpoints(config, backend).endpoints(),
        *ConsoleEndpoints(metrics).endpoints(),
    ]
    endpoints = described([*front.endpoints(), *pages], keys=front.keyed, root=config.root_path)
    app = Starlette(routes=front.routes(endpoints))
    app.router.redirect_slashes = False  # the redirect would contain the Host header, which callers choose
    app.add_middleware(RequestMiddleware, metrics=metrics)
    if config.cors_origins:
        app.add_middleware(
            AuthorizationCors,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )
    app.add_exception_handler(EyasError, on_eyas_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    return app


class HttpFront:
    """The endpoints that take text. Each turns a request into a response; `wire` handles their errors."""

    def __init__(
        self,
        config: GatewayConfig,
        backend: GenerationBackend,
        tokenizer: Tokenizer,
        metrics: GatewayMetrics,
        quotas: CallerQuotas,
    ) -> None:
        self._config = config
        self._quotas = quotas
        self._keys = KeyRing(config)
        self._backend = backend
        self._tokenizer = tokenizer
        self._chats = ChatModel.of(config, tokenizer)
        self._metrics = metrics
        self._arriving = PendingBodies()
        self._running = RunningCalls(metrics.siblings)

    def endpoints(self) -> list[HttpEndpoint]:
        """The rows of the route table that this class serves."""
        streams = (JSON, EVENTS)
        return [
            HttpEndpoint(
                "POST", "/v1/chat/completions", self.chat, "Answers a chat", ChatBody, gives=streams
            ),
            HttpEndpoint(
                "POST", "/v1/responses", self.responses, "Answers items", ResponsesBody, gives=streams
            ),
            *(
                HttpEndpoint("POST", path, self.vectors, "Refused: the model writes text", gives=())
                for path in VECTORS
            ),
            HttpEndpoint(
                "POST",
                "/v1/messages",
                self.messages,
                "Answers a chat, as Anthropic",
                MessagesBody,
                gives=streams,
            ),
            HttpEndpoint(
                "POST", "/v1/messages/count_tokens", self.count_tokens, "Counts a chat's tokens", CountBody
            ),
            HttpEndpoint(
                "POST", "/v1/completions", self.completions, "Continues text", TextBody, gives=streams
            ),
            HttpEndpoint(
                "POST", "/generate", self.generate, "Continues text, as SGLang", GenerateBody, gives=streams
            ),
            HttpEndpoint("POST", "/abort_request", self.abort, "Ends running requests, as SGLang", AbortBody),
            HttpEndpoint("POST", "/tokenize", self.tokenize, "Text or a chat to token ids", TokenizeBody),
            HttpEndpoint("POST", "/detokenize", self.detokenize, "Token ids to text", DetokenizeBody),
        ]

    def routes(self, endpoints: Sequence[HttpEndpoint]) -> list[Route]:
        """Makes Starlette's routes of the endpoints, with a check of the API key where an endpoint needs one.

        A path whose methods share one function is one route, so that its 405 names them all.
        """
        methods: dict[tuple[str, Answerer], list[str]] = {}
        for endpoint in endpoints:
            methods.setdefault((endpoint.path, endpoint.answer), []).append(endpoint.method)
        first = {(endpoint.path, endpoint.answer): endpoint for endpoint in reversed(endpoints)}
        return [
            Route(path, self._guarded(first[path, answer]), methods=methods[path, answer])
            for path, answer in methods
        ]

    @property
    def keyed(self) -> bool:
        """Whether callers need a key."""
        return self._keys.needed

    def _guarded(self, endpoint: HttpEndpoint) -> Answerer:
        return self._keyed(endpoint.answer, endpoint.generates) if endpoint.keyed else endpoint.answer

    def _keyed(self, endpoint: Answerer, generates: bool) -> Answerer:
        """Wraps an endpoint: checks the key, records the caller and, if it `generates`, applies its quota.

        The wrapper raises Unauthorized or RateLimited before the body is read.
        """

        async def authorized(request: Request) -> Response:
            caller = request.state.caller = self._keys.reader(request.headers, request.method)
            if generates:
                self._quotas.use(caller.name).serve()
            return await endpoint(request)

        return authorized

    # --- generation ----------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """Answers a chat, as OpenAI's /v1/chat/completions."""
        body = await self._body(ChatBody, request)
        served = await self._served(body.model, body.lora_path)
        call = await chat_call(self._config, served, self._chats, body)
        format = ChatFormat if call.reading is None else MessageFormat
        return self._run(request, call, partial(format, call, self._tokenizer.table))

    async def responses(self, request: Request) -> Response:
        """Answers the items of a chat, as OpenAI's /v1/responses without stored responses."""
        body = await self._body(ResponsesBody, request)
        with named(FIELDS, "input"):
            served = await self._served(body.model)
            call = await chat_call(self._config, served, self._chats, as_chat(body))
        if call.logprobs and call.reading is not None:
            raise InvalidRequest("top_logprobs is not told beside tools or reasoning", param="top_logprobs")
        field = call.grammar_field.replace("response_format", "text.format")
        call = dataclasses.replace(call, id=f"resp_{call.requests[0].id}", grammar_field=field)
        return self._run(request, call, partial(ResponsesFormat, call, body, self._tokenizer.table))

    async def messages(self, request: Request) -> Response:
        """Answers a chat, as Anthropic's /v1/messages."""
        body = await self._body(MessagesBody, request)
        request.state.ignored = [*request.state.ignored, *skipped_tools(body)]
        chat = as_anthropic_chat(body, self._chats.dialect.reads)
        with named(ANTHROPIC_FIELDS, "messages"):
            served = await self._served(body.model)
            call = await chat_call(self._config, served, self._chats, chat, cut_to_fit=True)
        call = dataclasses.replace(call, id=f"msg_{call.requests[0].id}")
        return self._run(request, call, partial(AnthropicFormat, call))

    async def count_tokens(self, request: Request) -> Response:
        """Counts the tokens of a chat, as Anthropic's /v1/messages/count_tokens."""
        body = await self._body(CountBody, request)
        called(await self._served(body.model), self._config, body.model)
        chat = as_anthropic_chat(body, self._chats.dialect.reads)
        _, ids = await chat_prompt(self._chats, chat.messages, chat)
        return json_response({"input_tokens": len(ids)})

    async def vectors(self, request: Request) -> Response:
        """Refuses a route of `VECTORS`."""
        raise InvalidRequest(
            f"{request.url.path}: the model writes text, it {VECTORS[request.url.path]}", param="model"
        )

    async def completions(self, request: Request) -> Response:
        """Continues prompts, as OpenAI's /v1/completions."""
        body = await self._body(TextBody, request)
        served = await self._served(body.model, body.lora_path)
        call = await text_call(self._config, served, self._tokenizer, body)
        return self._run(request, call, partial(TextFormat, call, self._tokenizer.table))

    async def generate(self, request: Request) -> Response:
        """Continues prompts, as SGLang's /generate."""
        body = await self._body(GenerateBody, request)
        served = await self._served(body.model, *body.adapters)
        call = await generate_call(self._config, served, self._tokenizer, body)
        return self._run(request, call, partial(SglangFormat, call, body.shape, self._tokenizer.table))

    def _run(
        self, request: Request, call: ApiCall, make_format: Callable[[CallAnswer], AnswerFormat]
    ) -> Response:
        caller = request.state.caller.name
        life = CallLifetime(
            request.state.arrived_at + call.timeout_s, caller, [request_id.get(), call.id, *call.names]
        )
        return WhileConnected(partial(self._answer, call.of(caller), life, make_format))

    async def _answer(
        self,
        call: ApiCall,
        life: CallLifetime,
        make_format: Callable[[CallAnswer], AnswerFormat],
        reply: WireReply,
    ) -> None:
        """Runs the call and writes its response, within the lifetime of the call."""
        with self._metrics.meter() as meter, self._running.registered(life):
            async with contextlib.AsyncExitStack() as owned:
                async with life.limit():
                    answer = await owned.enter_async_context(admitted(self._backend, self._tokenizer, call))
                pay(answer.usage.prompt_tokens)
                _log_begin(call, answer)
                owned.callback(lambda: pay(answer.usage.completion_tokens))
                owned.callback(lambda: meter.ended(answer.usage, answer.traces))
                owned.callback(lambda: _log_end(call, answer))
                format = make_format(answer)
                if call.stream:
                    await _stream(call, answer, format, meter, life, reply)
                else:
                    async with life.limit():
                        choices = await _collect(answer, call.choices, meter)
                        if call.experts:
                            choices = await with_experts(self._backend, call.requests, call.n, choices)
                        long = call.prompt_logprobs
                        body = await to_thread(format.whole, choices) if long else format.whole(choices)
                    await reply.whole(body)

    async def abort(self, request: Request) -> Response:
        """Aborts the caller's requests with an id, or all of them, as SGLang's /abort_request, in every
        process of the gateway.
        """
        body = await self._body(AbortBody, request)
        id = None if body.abort_all else body.rid
        return json_response({"aborted": await self._running.abort(request.state.caller.name, id)})

    async def _body(self, kind: type[B], request: Request) -> B:
        """Reads the request's body as `kind`; the response's headers will name its ignored fields."""
        raw = await read_body(request, await self._body_limit(), self._arriving)
        request.state.arrived_at = asyncio.get_running_loop().time()
        left = partial(disconnected, request.receive)
        await self._quotas.pace.enter(request.state.caller.name, len(raw), left)
        read = partial(_read, kind, raw)
        is_long = raw.count(b'"') >= MANY_QUOTES
        body, request.state.ignored = await self._quotas.pace.aside(read) if is_long else read()
        return body

    async def _body_limit(self) -> int:
        """The most bytes of a body: as configured, or enough for a prompt that fills the model's context."""
        if self._config.max_body_bytes is not None:
            return self._config.max_body_bytes
        contexts = [worker.context_length for worker in await self._backend.models() if worker.runs_target]
        return body_limit(max(contexts, default=0))

    async def _served(self, *names: str | None) -> ServedModel:
        """The served model with its adapters; see `serving`."""
        return await serving(self._config, self._backend, *(name or "" for name in names))

    # --- tokens --------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """Returns the token ids of a text or a chat."""
        body = await self._body(TokenizeBody, request)
        if body.messages is not None:
            special = bool(body.add_special_tokens)
            _, ids = await chat_prompt(self._chats, body.messages or (), body, special=special)
        else:
            special = body.add_special_tokens is not False
            ids = await self._tokenizer.encode_prompt(body.prompt or "", add_special_tokens=special)
        return json_response({"tokens": ids, "count": len(ids)})

    async def detokenize(self, request: Request) -> Response:
        """Returns the text of token ids. Raises InvalidRequest for an id outside the vocabulary."""
        body = await self._body(DetokenizeBody, request)
        known = len(self._tokenizer.table)
        if not all(0 <= id < known for id in body.tokens):
            raise InvalidRequest(f"tokens holds an id outside 0 .. {known - 1}", param="tokens")
        text = self._tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return json_response({"prompt": text})


def _read(kind: type[B], raw: bytes) -> tuple[B, list[str]]:
    """Parses a body; returns it and the names of its ignored fields."""
    body = parse(kind, raw)
    return body, list(ignored(body))


def _log_begin(call: ApiCall, answer: CallAnswer) -> None:
    """Logs the sizes of a call, never its content."""
    prompt_tokens, most = answer.usage.prompt_tokens, call.requests[0].params.max_tokens
    text = "%s (%s) has %d prompt tokens and %d choices of at most %d tokens"
    _log.debug(text, call.id, call.requests[0].id, prompt_tokens, call.n * len(call.requests), most)


def _log_end(call: ApiCall, answer: CallAnswer) -> None:
    """Logs the end of a call, with the caller's request id and the id that the workers use."""
    tokens, seconds = answer.usage.completion_tokens, time.monotonic() - call.began
    _log.info("%s (%s) ended after %d tokens, %.3f s", call.id, call.requests[0].id, tokens, seconds)


async def _stream(
    call: ApiCall,
    answer: CallAnswer,
    format: AnswerFormat,
    meter: CallMeter,
    life: CallLifetime,
    reply: WireReply,
) -> None:
    """Sends events as deltas arrive. After the first byte an error can only be sent as an event."""
    await reply.begin_events()

    def events(deltas: Sequence[TextDelta]) -> bytes:
        return b"".join([format.event(delta) for delta in deltas])

    try:
        async with life.limit():
            await reply.write(format.opening())
            if reply.parts is not None and not (call.logprobs or call.prompt_logprobs):
                answer.use_lanes(format, meter, reply.parts)
            while deltas := await answer.take():
                meter.deltas(deltas)
                part = await to_thread(events, deltas) if call.prompt_logprobs else events(deltas)
                await reply.write(part)
        last = format.closing()
    except EyasError as error:
        failed(error)
        meter.failed(error)
        last = format.failure(error)
    except Exception:
        _log.exception("a stream failed")
        last = format.failure(EyasError("internal error"))
    finally:
        answer.leave_lanes()
    await reply.end(last)


async def _collect(answer: CallAnswer, choices: int, meter: CallMeter) -> list[TextDelta]:
    """Reads the answer to its end; returns one delta per choice, in order, with the whole text."""
    parts: list[list[TextDelta]] = [[] for _ in range(choices)]
    while deltas := await answer.take():
        meter.deltas(deltas)
        for delta in deltas:
            parts[delta.choice].append(delta)
    return [joined(part) for part in parts]
