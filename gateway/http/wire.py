"""Shared parts of all HTTP routes: bounded bodies, clients that disconnect, request ids, error bodies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from itertools import islice

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.common.errors import (
    Cancelled,
    EyasError,
    InvalidRequest,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
)
from eyas.common.logging import known_as, request_id, traceparent
from eyas.common.machine.memory import give_back
from gateway.backends.answer import PARTS, BodyParts
from gateway.formats.anthropic_reply import anthropic_error
from gateway.formats.openai_reply import error_body
from gateway.limits import quotas
from gateway.observe.metrics import GatewayMetrics
from gateway.observe.tracing import current

BODY_TIMEOUT_S = 30.0
LEAST_BODY_BYTES = 2 << 20  # of the most that a body may have
BODY_BYTES_PER_TOKEN = 16  # texts have 3 to 4, lists of ids 7, escaped texts up to 12
MAX_ARRIVING_BYTES = 128 << 20  # of all bodies that are not complete
BURST_BYTES = 32 << 20  # a peak above this makes the process return the memory to the system
LAST_SEND_TIMEOUT_S = 10.0
_RATES = [
    f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")
]
EXPOSED = (
    "x-request-id",
    "x-eyas-ignored",
    "retry-after",
    "traceparent",
    *_RATES,
)  # headers that pages may read
_JSON_HEADERS = [(b"content-type", b"application/json")]
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_UNSAFE = re.compile(r"[^\x21-\x2b\x2d-\x7e]")  # not allowed in a header that lists names
_MAX_NAMED, _MAX_NAME = 32, 64
HTML = "text/html"
ANTHROPIC = "/v1/messages"  # where errors have that API's shape
_log = logging.getLogger("eyas.gateway")


class PendingBodies:
    """Bounds the memory of bodies that are still being received. Beyond the bound the oldest body is refused:
    its client is the most likely to be slow or silent.
    """

    def __init__(self) -> None:
        self._pending_bytes = self._peak = 0
        self._bodies: dict[asyncio.Timeout, int] = {}  # bytes of each; the oldest first

    @contextlib.asynccontextmanager
    async def receive(self) -> AsyncIterator[Callable[[int], None]]:
        """Accounts for one body; yields a function that counts its bytes. Raises Overloaded if it is
        refused.
        """
        async with asyncio.timeout(None) as body:
            self._bodies[body] = 0
            try:
                yield partial(self._count, body)
            except asyncio.CancelledError:
                if body.expired():
                    raise Overloaded("too many bodies arrive at once, and this one is the slowest") from None
                raise
            finally:
                self._pending_bytes -= self._bodies.pop(body, 0)
                if not self._bodies and self._peak > BURST_BYTES:
                    self._peak = 0
                    asyncio.get_running_loop().run_in_executor(None, give_back)

    def _count(self, body: asyncio.Timeout, size: int) -> None:
        if body not in self._bodies:
            return  # it was refused: its timeout expires next
        self._bodies[body] += size
        self._pending_bytes += size
        self._peak = max(self._peak, self._pending_bytes)
        while self._pending_bytes > MAX_ARRIVING_BYTES:
            oldest = next(iter(self._bodies))
            self._pending_bytes -= self._bodies.pop(oldest)
            oldest.reschedule(asyncio.get_running_loop().time())


def body_limit(context: int) -> int:
    """The most bytes of a request to a model with a context of this number of tokens."""
    return max(LEAST_BODY_BYTES, BODY_BYTES_PER_TOKEN * context)


async def read_body(request: Request, limit: int, arriving: PendingBodies) -> bytes:
    """Reads the whole body. Raises PayloadTooLarge as soon as it is known to have more than `limit` bytes,
    RequestTimeout if it does not arrive within `BODY_TIMEOUT_S`, Overloaded if the bodies being received take
    too much memory, Cancelled if the client disconnects, InvalidRequest if it is compressed.
    """
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise InvalidRequest(f"content-encoding must be left out: a body is not read as {coding!r:.40}")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise PayloadTooLarge(f"the body has {declared} bytes, more than the {limit} allowed")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S), arriving.receive() as count:
            return await _bounded(request, limit, count)
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise Cancelled("the client left before its request was complete") from None


async def _bounded(request: Request, limit: int, count: Callable[[int], None]) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        count(len(chunk))
        body += chunk
        if len(body) > limit:
            raise PayloadTooLarge(f"the body has more than the {limit} bytes allowed")
    return bytes(body)


class WireReply:
    """Writes one response, as one body or as events; by `BodyParts` if the server offers them."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self.parts: BodyParts | None = scope.get("extensions", {}).get(PARTS)

    async def whole(self, body: bytes) -> None:
        """Writes the whole response, a JSON object."""
        length = (b"content-length", str(len(body)).encode())
        await self._send({"type": "http.response.start", "status": 200, "headers": [*_JSON_HEADERS, length]})
        await self.end(body)

    async def begin_events(self) -> None:
        """Writes the status line and headers of a stream of events."""
        await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})

    async def write(self, part: bytes) -> None:
        """Writes more of the body, if any; waits while the client reads slowly."""
        if not part:
            return
        if self.parts is None:
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
            return
        self.parts.write(part)
        if self.parts.blocked:
            await self.parts.drain()

    async def end(self, last: bytes) -> None:
        """Writes the end of the body; stops waiting for a slow client after `LAST_SEND_TIMEOUT_S`."""
        if self.parts is not None:
            self.parts.flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_SEND_TIMEOUT_S):
                await self._send({"type": "http.response.body", "body": last, "more_body": False})


class WhileConnected(Response):
    """A response written by `work(reply)`, which is cancelled when the client disconnects.

    The request's body must have been read: the next message can then only be the disconnect. An error of
    `work` before the first byte reaches the application's error handlers.
    """

    def __init__(self, work: Callable[[WireReply], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(WireReply(scope, send)))
        disconnect = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((work, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        finally:
            work.cancel()
            disconnect.cancel()
            await asyncio.gather(work, disconnect, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Waits until the client disconnects. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class AuthorizationCors(CORSMiddleware):
    """Starlette's middleware, which also allows `Authorization`: `*` does not cover that header.

    It answers preflight requests before they reach `RequestMiddleware`, so it adds their request id itself.
    """

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a preflight request."""
        response = super().preflight_response(request_headers)
        if response.status_code == 400:
            response.body = error_body(InvalidRequest(bytes(response.body).decode()))
            response.headers["content-length"] = str(len(response.body))
            response.headers["content-type"] = "application/json"
        response.headers.setdefault("access-control-allow-headers", "Authorization, Content-Type")
        response.headers["x-request-id"] = known_as(request_headers.get("x-request-id", ""))
        return response


class RequestMiddleware:
    """Middleware around every request: adds the X-Request-Id and a header that names ignored fields, counts
    the response by route and status, and traces it.

    An exception without a handler is a defect: it is logged with its traceback and answered with a 500.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        known_id = known_as(headers.get("x-request-id", ""))
        named = request_id.set(known_id)
        tracer = self._metrics.tracer
        try:
            with quotas.MeteredCall():
                if tracer is None:
                    await self._serve(known_id, scope, receive, send)
                else:
                    with tracer.call(scope["method"], headers):
                        await self._serve(known_id, scope, receive, send)
        finally:
            request_id.reset(named)

    async def _serve(self, known_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def marked(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = known_id
                if scope["path"].startswith("/v1/messages"):
                    headers["request-id"] = known_id  # where Anthropic's clients look
                if names := _names(scope.get("state", {}).get("ignored", ())):
                    headers["x-eyas-ignored"] = names
                # The route's path, not the request's: callers must not be able to create label values.
                path = getattr(scope.get("route"), "path", "other")
                self._metrics.responses.labels(path, message["status"]).inc()
                if message["status"] >= 400:
                    error = scope.get("state", {}).get("error")
                    self._metrics.timeline.failed(path, message["status"], error)
                if rates := quotas.headers():
                    headers.update(rates)
                if (span := current.get()) is not None:
                    if traceparent.get():
                        headers["traceparent"] = traceparent.get()
                    span.responds(scope["method"], path, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, marked)
        except Exception:
            _log.exception("%s failed (request %s)", scope["path"], known_id)
            if started:
                raise
            await error_response(EyasError("internal error"), scope["path"])(scope, receive, marked)


def _names(names: Iterable[str]) -> str:
    """Lists names for a header, bounded in number and length because callers choose them."""
    first = list(islice(names, _MAX_NAMED + 1))
    listed = [_UNSAFE.sub("?", name[:_MAX_NAME]) for name in first[:_MAX_NAMED]]
    return ", ".join([*listed, *(["..."] if len(first) > _MAX_NAMED else [])])


def error_response(error: EyasError, path: str) -> Response:
    """The error's status, headers and JSON body, in the shape of the API that `path` belongs to."""
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after_s)
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    body = anthropic_error(error) if path.startswith(ANTHROPIC) else error_body(error)
    return Response(body, error.http_status, headers, "application/json")


async def on_eyas_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for every EyasError. The 401 of a browser makes it ask its user for a key."""
    assert isinstance(error, EyasError)
    response = error_response(error, request.url.path)
    request.state.error = error
    if error.http_status == 401 and HTML in request.headers.get("accept", ""):
        response.headers["www-authenticate"] = 'Basic realm="Eyas: the password is an API key"'
    return response


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's handler for its own errors (no such path, wrong method), with the body of all errors."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    known: EyasError = NotFound(f"{where} does not exist")
    if error.status_code != 404:
        known = InvalidRequest(f"{where}: {error.detail}")
    response = error_response(known, request.url.path)
    response.status_code = error.status_code
    response.headers.update(error.headers or {})  # Allow, where the method is wrong
    return response
