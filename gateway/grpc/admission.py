"""Checks a gRPC call before any message of it is read: its key, number of open calls, connection limits."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import grpc

from eyas.common.config import GatewayConfig
from eyas.common.errors import EyasError, Overloaded
from eyas.common.logging import RateLimitedLogger, known_as, request_id
from eyas.common.wire import rpc
from gateway.limits.keys import ApiCaller, KeyRing
from gateway.limits.quotas import CallerQuotas, MeteredCall
from gateway.observe.tracing import RequestTracer, failed

MAKE_TOKENS = ("/Chat", "/Generate")
MAX_CALLS = 2048  # open at a time, of services that ask for a key; half of them at most of one key
MAX_MESSAGE_BYTES = (
    16 << 20
)  # a prompt of a million tokens; HTTP's limit follows the context (`gateway.http.wire`)
MAX_PUBLIC_CALLS = 128  # open at a time, of services that ask for none (health, reflection)
_log = logging.getLogger("eyas.gateway")


def limits(config: GatewayConfig) -> rpc.Options:
    """The server options that bound connections, their calls and their messages.

    (gRPC itself bounds a header to 16 KiB, in force from a caller's first byte by `gateway.grpc.relay`.)
    """
    return {
        "grpc.max_allowed_incoming_connections": config.max_connections,
        "grpc.server_handshake_timeout_ms": 10_000,  # until a new connection has said what it is
        "grpc.max_connection_idle_ms": 60_000,  # without a call
        "grpc.max_concurrent_streams": MAX_CALLS + MAX_PUBLIC_CALLS,
        "grpc.max_receive_message_length": config.max_body_bytes or MAX_MESSAGE_BYTES,
    }


class AdmissionInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Admits or refuses a call before its message is read, so that a refused call costs little memory.

    `service` asks for a key, all others do not. Every method that it sees takes a stream (see
    `rpc.MessageInterceptor`).
    """

    def __init__(
        self, service: str, keys: KeyRing, quotas: CallerQuotas, tracer: RequestTracer | None
    ) -> None:
        self._keyed = f"/{service}/"
        self._keys = keys
        self._quotas = quotas
        self._tracer = tracer
        self._calls = _CallLimit(MAX_CALLS)
        self._own_calls = _CallsOfKeys(MAX_CALLS // 2)
        self._public_calls = _ReplaceableCalls(MAX_PUBLIC_CALLS)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, wrapped so that every call is checked first."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        kind, behaviour = rpc.behaviour(handler)
        wrap = _streaming if inspect.isasyncgenfunction(behaviour) else _unary
        keyed = method.startswith(self._keyed)
        admit = partial(self._admit_keyed, method.lstrip("/")) if keyed else self._admit_public
        return handler._replace(**{kind: wrap(behaviour, admit)})

    @contextlib.asynccontextmanager
    async def _admit_keyed(self, method: str, context: Any) -> AsyncIterator[None]:
        """Raises Unauthorized, RateLimited or Overloaded."""
        _name(context)
        with (
            contextlib.nullcontext()
            if self._tracer is None
            else _traced(self._tracer, method, _metadata(context))
        ):
            caller = caller_of(context, self._keys)
            with MeteredCall():
                if method.endswith(MAKE_TOKENS):
                    self._quotas.use(caller.name).serve()
                async with self._calls.one(), self._own_calls.one(caller):
                    yield

    def _admit_public(self, context: Any) -> contextlib.AbstractAsyncContextManager[None]:
        _name(context)
        return self._public_calls.one()


def caller_of(context: Any, keys: KeyRing) -> ApiCaller:
    """Returns the caller by its key. Raises Unauthorized."""
    return keys.caller(_metadata(context))


@contextlib.contextmanager
def _traced(tracer: RequestTracer, method: str, metadata: dict[str, Any]) -> Iterator[None]:
    with tracer.call(method, metadata) as span:
        span.is_rpc(method)
        try:
            yield
        except EyasError as error:
            failed(error)
            raise


def _name(context: Any) -> None:
    """Names the call in logs from here on: each call has a task, and so a context, of its own."""
    request_id.set(known_as(_metadata(context).get(rpc.REQUEST_ID, "")))


def _metadata(context: Any) -> dict[str, Any]:
    return dict(context.invocation_metadata() or ())


class _CallLimit:
    """A limit of `number` calls at a time."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._running: dict[asyncio.Timeout, None] = {}  # the oldest call first
        self._alarm = RateLimitedLogger(_log)

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Counts one call. Raises Overloaded if there are too many, or if a newer call replaces this one."""
        if len(self._running) >= self._number:
            self._alarm.warning("%d gRPC calls are open, and no more are taken", len(self._running))
            self._make_space()
        async with asyncio.timeout(None) as call:
            self._running[call] = None
            try:
                yield
            except asyncio.CancelledError:
                if call.expired():
                    raise Overloaded("a newer call took the place of this one") from None
                raise
            finally:
                self._running.pop(call, None)

    def _make_space(self) -> None:
        raise Overloaded(f"{self._number} calls are open already")


class _CallsOfKeys:
    """A limit of `number` calls of one key at a time, so that none keeps out all others."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._running: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def one(self, caller: ApiCaller) -> AsyncIterator[None]:
        """Counts one call. Raises Overloaded if its key has too many. Without keys all callers are one."""
        if caller.name and self._running[caller.name] >= self._number:
            raise Overloaded(f"{self._number} calls of this key are open already")
        self._running[caller.name] += 1
        try:
            yield
        finally:
            self._running -= Counter([caller.name])  # a key with none is not kept


class _ReplaceableCalls(_CallLimit):
    """One call too many ends the oldest one, so that callers who stay cannot lock out health checks."""

    def _make_space(self) -> None:
        oldest = next(iter(self._running))
        del self._running[oldest]
        oldest.reschedule(asyncio.get_running_loop().time())


Admit = Callable[[Any], contextlib.AbstractAsyncContextManager[None]]


def _unary(behaviour: rpc.Unary, admit: Admit) -> rpc.Unary:
    async def call(messages: Any, context: Any) -> Any:
        async with admit(context):
            return await behaviour(messages, context)

    return call


def _streaming(behaviour: rpc.Stream, admit: Admit) -> rpc.Stream:
    async def call(messages: Any, context: Any) -> AsyncIterator[Any]:
        async with admit(context):
            stream: Any = behaviour(messages, context)
            async with contextlib.aclosing(stream) as replies:
                async for reply in replies:
                    yield reply

    return call
