"""The HTTP front: routes of OpenAI's API and a few of its own, for a backend that makes tokens.

A call is parsed, admitted, and answered whole or as server-sent events. The status line is written only
after the backend has admitted every prompt, so that a refusal is a real status, streaming or not.
It refuses to know how tokens are made and routed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from importlib.resources import files

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Send

from eyas.common.config import GatewayConfig
from eyas.common.errors import DeadlineExceeded, EyasError, InvalidRequest, Unauthorized, Unavailable
from gateway.admission import ServedModel, check_model, is_synthetic, served_model
from gateway.answer import Answer, admitted, joined
from gateway.backend import Backend
from gateway.metrics import GatewayMetrics, Meter
from gateway.openai_reply import ChatFormat, Format, TextFormat, error_event
from gateway.openai_request import Call, chat_call, text_call
from gateway.schema import ChatBody, DetokenizeBody, TextBody, TokenizeBody, parse
from gateway.sglang_reply import SglangFormat
from gateway.sglang_request import GenerateBody, generate_call
from gateway.text import Delta
from gateway.tokenizer import Tokenizer
from gateway.wire import (
    Doorkeeper,
    WhileConnected,
    on_eyas_error,
    on_http_exception,
    read_body,
)

LAST_SEND_TIMEOUT_S = 10.0
Endpoint = Callable[[Request], Awaitable[Response]]
_JSON = [(b"content-type", b"application/json")]
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_log = logging.getLogger("eyas.gateway")


def create_app(
    config: GatewayConfig, backend: Backend, tokenizer: Tokenizer, metrics: GatewayMetrics
) -> Starlette:
    """The application. Its owner starts and stops `backend`."""
    metrics.serving.set_function(lambda: float(not backend.health().problem))
    metrics.synthetic.set_function(lambda: float(is_synthetic(link.info for link in backend.links())))
    front = Front(config, backend, tokenizer, metrics)
    app = Starlette(routes=front.routes())
    app.add_middleware(Doorkeeper, metrics=metrics)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_exception_handler(EyasError, on_eyas_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    return app


class Front:
    """The endpoints. Each is a coroutine from a request to a response; errors go to the handlers."""

    def __init__(
        self, config: GatewayConfig, backend: Backend, tokenizer: Tokenizer, metrics: GatewayMetrics
    ) -> None:
        self._config = config
        self._backend = backend
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._console = (files("gateway") / "static" / "console.html").read_bytes()
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """Every path; all but the server's own ask for the key."""
        keyed: list[tuple[str, str, Endpoint]] = [
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/generate", self.generate),
            ("GET", "/get_model_info", self.model_info),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/cluster", self.cluster),
        ]
        return [
            *(Route(path, self._keyed(endpoint), methods=[method]) for method, path, endpoint in keyed),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics_page, methods=["GET"]),
            Route("/", self.console, methods=["GET"]),
        ]

    def _keyed(self, endpoint: Endpoint) -> Endpoint:
        """Raises Unauthorized unless the request carries the key (if one is configured)."""

        async def authorized(request: Request) -> Response:
            key = self._config.api_key
            given = request.headers.get("authorization", "")
            if key is not None and not secrets.compare_digest(given.encode(), f"Bearer {key}".encode()):
                raise Unauthorized("the API key is missing or wrong: send it as 'Authorization: Bearer KEY'")
            return await endpoint(request)

        return authorized

    # --- generation ----------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        body = parse(ChatBody, await self._body(request))
        call = await chat_call(self._config, await self._served(), self._tokenizer, body)
        return WhileConnected(partial(self._answer, call, partial(ChatFormat, call, self._tokenizer.table)))

    async def completions(self, request: Request) -> Response:
        body = parse(TextBody, await self._body(request))
        call = await text_call(self._config, await self._served(), self._tokenizer, body)
        return WhileConnected(partial(self._answer, call, partial(TextFormat, call, self._tokenizer.table)))

    async def generate(self, request: Request) -> Response:
        body = parse(GenerateBody, await self._body(request))
        call = await generate_call(self._config, await self._served(), self._tokenizer, body)
        shape = partial(SglangFormat, call, body.shape, self._tokenizer.table)
        return WhileConnected(partial(self._answer, call, shape))

    async def _answer(self, call: Call, shape: Callable[[Answer], Format], send: Send) -> None:
        """Runs the call and writes its response, all within the request's deadline."""
        deadline = asyncio.get_running_loop().time() + call.timeout_s
        with self._metrics.meter() as meter:
            async with contextlib.AsyncExitStack() as owned:
                async with _until(deadline):
                    answer = await owned.enter_async_context(admitted(self._backend, self._tokenizer, call))
                owned.callback(lambda: meter.ended(answer.usage, answer.courses))
                owned.callback(lambda: _log_end(call, answer))
                format = shape(answer)
                if call.stream:
                    await _stream(answer, format, meter, deadline, send)
                else:
                    async with _until(deadline):
                        choices = await _collect(answer, call.choices, meter)
                    await _send_json(format.whole(choices), send)

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self._config.max_body_bytes)

    async def _served(self) -> ServedModel:
        return served_model(self._config, await self._backend.models())

    # --- models and tokens ---------------------------------------------------------------------------

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._describe(await self._served())]})

    async def model(self, request: Request) -> Response:
        check_model(self._config, request.path_params["name"])
        return _json(self._describe(await self._served()))

    async def model_info(self, _: Request) -> Response:
        """The same model as SGLang describes one."""
        model = await self._served()
        return _json(
            {
                "model_path": self._config.model,
                "tokenizer_path": self._config.model,
                "served_model_name": model.id,
                "is_generation": True,
                "preferred_sampling_params": None,
                "max_model_len": model.context_length,
                "vocab_size": model.vocab_size,
                **_mark(model),
            }
        )

    def _describe(self, model: ServedModel) -> dict[str, object]:
        return {
            "id": model.id,
            "object": "model",
            "created": self._created,
            "owned_by": "eyas",
            "max_model_len": model.context_length,
            **_mark(model),
        }

    async def tokenize(self, request: Request) -> Response:
        body = parse(TokenizeBody, await self._body(request))
        if body.messages is not None:
            ids = await self._tokenizer.encode_chat([m.as_dict() for m in body.messages])
        else:
            ids = await self._tokenizer.encode_prompt(body.prompt or "")
        return _json({"tokens": ids, "count": len(ids)})

    async def detokenize(self, request: Request) -> Response:
        body = parse(DetokenizeBody, await self._body(request))
        known = len(self._tokenizer.table)
        if not all(0 <= id < known for id in body.tokens):
            raise InvalidRequest(f"tokens holds an id outside 0 .. {known - 1}", param="tokens")
        return _json({"prompt": self._tokenizer.decode(body.tokens)})

    # --- the server itself ---------------------------------------------------------------------------

    async def health(self, _: Request) -> Response:
        health = self._backend.health()
        if health.problem:
            raise Unavailable(health.problem)
        return _json(
            {"status": "degraded", "reason": health.degraded} if health.degraded else {"status": "ok"}
        )

    async def cluster(self, _: Request) -> Response:
        """Who is behind this gateway, as `eyas doctor` shows it."""
        health = self._backend.health()
        workers = [
            {
                **msgspec.structs.asdict(link.info),
                "epoch": str(link.info.epoch),  # 64 bits are too many for some readers of JSON
                "connected": link.connected,
                "in_flight": link.in_flight,
            }
            for link in self._backend.links()
        ]
        return _json({"model": self._config.served_model, "health": health, "workers": workers})

    async def metrics_page(self, _: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def console(self, _: Request) -> Response:
        return Response(self._console, media_type="text/html; charset=utf-8")


def _mark(model: ServedModel) -> dict[str, bool]:
    """What a description of the model adds if its answers mean nothing."""
    return {"synthetic": True} if model.synthetic else {}


def _log_end(call: Call, answer: Answer) -> None:
    """The line that ties a caller's request id to the id that the workers know."""
    tokens, seconds = answer.usage.completion_tokens, time.monotonic() - call.began
    _log.info("%s ended after %d tokens, %.3f s", call.id, tokens, seconds)


async def _stream(answer: Answer, format: Format, meter: Meter, deadline: float, send: Send) -> None:
    """Events as the deltas come; a failure after the first byte can only be told as an event."""
    await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
    try:
        async with _until(deadline):
            await _send_events(format.opening(), send)
            async with contextlib.aclosing(answer.deltas()) as deltas:
                async for delta in deltas:
                    meter.delta(delta)
                    await _send_events(format.event(delta), send)
        last = format.closing()
    except EyasError as error:
        last = error_event(error)
    except Exception:
        _log.exception("a stream failed")
        last = error_event(EyasError("internal error"))
    await _send_last(last, send)


async def _collect(answer: Answer, choices: int, meter: Meter) -> list[Delta]:
    """The whole text of each choice, in order."""
    parts: list[list[Delta]] = [[] for _ in range(choices)]
    async with contextlib.aclosing(answer.deltas()) as deltas:
        async for delta in deltas:
            meter.delta(delta)
            parts[delta.choice].append(delta)
    return [joined(deltas) for deltas in parts]


@contextlib.asynccontextmanager
async def _until(deadline: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded("the request took longer than its timeout") from error


async def _send_events(events: bytes, send: Send) -> None:
    if events:
        await send({"type": "http.response.body", "body": events, "more_body": True})


async def _send_json(body: bytes, send: Send) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [*_JSON, length]})
    await _send_last(body, send)


async def _send_last(body: bytes, send: Send) -> None:
    """Ends the response. A client that does not read must not keep its generation: it is given up."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_SEND_TIMEOUT_S):
            await send({"type": "http.response.body", "body": body, "more_body": False})


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
