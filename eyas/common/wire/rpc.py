"""gRPC as every process of Eyas uses it: channels, servers, errors, health, reflection.

It says how a dead peer is noticed, how a message is waited for, and how an `EyasError` crosses the wire with
its class intact.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from eyas.common.cluster.names import join
from eyas.common.config import SHARED_MEMORY
from eyas.common.errors import (
    ConfigError,
    EyasError,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
    Unavailable,
    from_code,
    from_grpc_status,
)
from eyas.common.logging import request_id
from eyas.common.security.tls import AMONG_SERVICES, ChannelTls, ServiceTls, TlsAdvice, explained
from eyas.common.wire.bad_text import bad_text

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MESSAGE_TIMEOUT_S = 30.0

# A stopped peer (SIGSTOP, pulled cable) is noticed within 2 s + 3 s. The ping timeout is part of it: without
# it the transport waits a minute for the missing ping before the keepalive watchdog may end the stream.
Options = dict[str, int]
_OPTIONS: Options = {
    "grpc.keepalive_time_ms": 2000,
    "grpc.keepalive_timeout_ms": 3000,
    "grpc.http2.ping_timeout_ms": 3000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
}
_CHANNEL_OPTIONS = _OPTIONS | {
    "grpc.enable_http_proxy": 0,  # which `http_proxy` would put between a cluster's own processes
    "grpc.initial_reconnect_backoff_ms": 200,
    "grpc.min_reconnect_backoff_ms": 200,
    "grpc.max_reconnect_backoff_ms": 2000,
}
_SERVER_OPTIONS = _OPTIONS | {
    "grpc.http2.min_recv_ping_interval_without_data_ms": 1000,
    "grpc.http2.max_ping_strikes": 0,
    "grpc.so_reuseport": 0,  # a taken port is an error, not a second listener that gets half the calls
}

SYNTHETIC = "eyas-synthetic"
"""In the initial metadata of an answer that means nothing, because drafts were accepted by chance."""

PEER = "eyas-peer"
"""In the initial metadata of a drafter's stream, which no other server sends: the number of the stream."""

_TOO_LARGE = "larger than max"  # gRPC's own words
CODE = "eyas-code"
PARAM = "eyas-param"
REQUEST_ID = "x-request-id"
TRACEPARENT = "traceparent"
RETRY_AFTER = "retry-after"  # seconds
_log = logging.getLogger("eyas.rpc")

Dial = Callable[[str], grpc.aio.Channel]
"""Opens a channel to `host:port`, as `channel` does."""

Unary = Callable[..., Awaitable[Any]]
Stream = Callable[..., AsyncIterator[Any]]


def channel(address: str, tls: ChannelTls | None = None) -> grpc.aio.Channel:
    """A channel to `host:port` that notices a dead or stopped peer within 6 s; the caller closes it."""
    options: list[tuple[str, Any]] = list(_CHANNEL_OPTIONS.items())
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if tls.name:
        options.append(("grpc.ssl_target_name_override", tls.name))
    return grpc.aio.secure_channel(address, tls.credentials, options=options)


def dialer(tls: ServiceTls | None) -> Dial:
    """How a service with these certificates dials the others of its cluster; None: in plain."""
    return channel if tls is None else partial(channel, tls=tls.channel)


class ChannelPool:
    """One channel per address, shared by all callers; `drop` closes some of them, `close` all."""

    def __init__(self, dial: Dial = channel) -> None:
        self._dial = dial
        self._channels: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to this address, opened at the first call."""
        if address not in self._channels:
            self._channels[address] = self._dial(address)
        return self._channels[address]

    def __iter__(self) -> Iterator[str]:
        return iter(self._channels)

    async def drop(self, *addresses: str) -> None:
        """Closes the channels to these addresses."""
        await asyncio.gather(*(self._channels.pop(address).close() for address in addresses))

    async def close(self) -> None:
        """Closes all channels."""
        await self.drop(*self)


def server(
    admission: grpc.aio.ServerInterceptor | None = None, options: Options | None = None
) -> grpc.aio.Server:
    """A server that maps errors by `ErrorInterceptor`; the caller adds servicers, binds it and starts it.

    `admission` sees each call before any message of it is read. `options` add to those of all servers, or
    replace them.
    """
    interceptors = [ErrorInterceptor(), *([admission] if admission else []), MessageInterceptor()]
    all_options = _SERVER_OPTIONS | (options or {})
    return grpc.aio.server(interceptors=interceptors, options=list(all_options.items()))


def bind(
    target: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None
) -> int:
    """Binds a port (any free one for 0) and gives its number. Raises ConfigError if it is taken.

    Without `credentials` it speaks in plain.
    """
    try:
        if credentials is None:
            bound = target.add_insecure_port(join(host, port))
        else:
            bound = target.add_secure_port(join(host, port), credentials)
    except RuntimeError as error:
        raise ConfigError(f"port {port} on {host} cannot be used: {error}", param="port") from error
    if bound == 0:
        raise ConfigError(f"port {port} on {host} cannot be used", param="port")
    return int(bound)


def bind_unnamed(target: grpc.aio.Server) -> int:
    """Binds a Unix socket for this process itself. Gives a descriptor of it, which the caller owns; it is
    dialled as `/proc/self/fd/N`.

    Its name is gone at once: a process that is killed leaves nothing. Raises ConfigError if that fails.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="eyas-grpc-", dir=SHARED_MEMORY) as folder:
            path = f"{folder}/s"
            target.add_insecure_port(f"unix:{path}")
            return os.open(path, os.O_PATH)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"no socket can be made in {SHARED_MEMORY}: {error}") from error


# --- errors ------------------------------------------------------------------------------------------


def _set_status(context: grpc.aio.ServicerContext[Any, Any], error: EyasError) -> None:
    """Makes `error` the status with which the call ends when its handler returns.

    (`context.abort` would raise an exception in a reference cycle with the call and its request: their memory
    would be free only after a garbage collection.)
    """
    metadata = [(CODE, error.code)]
    if error.param:
        metadata.append((PARAM, error.param))
    if isinstance(error, Overloaded):
        metadata.append((RETRY_AFTER, str(error.retry_after_s)))
    if request_id.get():
        metadata.append((REQUEST_ID, request_id.get()))
    context.set_code(grpc.StatusCode[error.grpc_status])
    context.set_details(error.message)
    context.set_trailing_metadata(tuple(metadata))


def as_eyas(error: Exception, where: str) -> EyasError:
    """`error` itself if it is an EyasError; else a bare internal error, and the log gets the traceback."""
    if isinstance(error, EyasError):
        return error
    _log.error("%s failed", where, exc_info=error)
    return EyasError("internal error")


def _unary(behaviour: Unary, method: str) -> Unary:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            _set_status(context, as_eyas(error, method))

    return call


def _streaming(behaviour: Stream, method: str) -> Unary:
    # It writes the messages itself. gRPC lets go of a generator whose caller leaves while a message is sent:
    # that would end when it is collected, in another task and context, and keep its places until then.
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        stream: Any = behaviour(request, context)
        try:
            async with contextlib.aclosing(stream) as messages:
                async for message in messages:
                    await context.write(message)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            _set_status(context, as_eyas(error, method))

    return call


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends a call whose handler raised with the error's gRPC status; the trailer names its class.

    Any other exception than an EyasError is a defect: logged with its traceback, sent as a bare INTERNAL.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler with its errors mapped."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind, served = behaviour(handler)
        # Health's Watch is no generator: it writes its messages itself.
        wrap = _streaming if inspect.isasyncgenfunction(served) else _unary
        return handler._replace(**{kind: wrap(served, handler_call_details.method)})


def behaviour(handler: Any) -> tuple[str, Callable[..., Any]]:
    """(the name of the handler's field that holds its function, that function)."""
    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    return next((kind, function) for kind in kinds if (function := getattr(handler, kind)) is not None)


# --- messages ----------------------------------------------------------------------------------------


class MessageInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Serves every method as one that takes a stream, and reads the single message of unary ones itself.

    gRPC would read it before the handler is called. It would wait for ever for a caller that sends none, and
    treat bytes that do not parse as a defect of the server.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler as one that takes a stream."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        handler = handler._replace(request_deserializer=_parser(handler.request_deserializer))
        if handler.request_streaming:
            return handler
        kind, served = behaviour(handler)
        wrap = _reading_stream if inspect.isasyncgenfunction(served) else _reading_unary
        return handler._replace(
            request_streaming=True, **{kind: None, kind.replace("unary_", "stream_", 1): wrap(served)}
        )


def _parser(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            descriptor = getattr(getattr(parse, "__self__", None), "DESCRIPTOR", None)  # of a FromString
            if descriptor is not None and (field := bad_text(descriptor, data)):
                text = f"{field} is no text in UTF-8, which has no half of a surrogate pair"
                raise InvalidRequest(text, param=field) from None
            raise InvalidRequest("the message is not of this method's type") from None

    return parsed


def _reading_unary(served: Unary) -> Unary:
    async def call(_: Any, context: Any) -> Any:
        return await served(await _message(context), context)

    return call


def _reading_stream(served: Stream) -> Stream:
    async def call(_: Any, context: Any) -> AsyncIterator[Any]:
        stream: Any = served(await _message(context), context)
        async with contextlib.aclosing(stream) as replies:
            async for reply in replies:
                yield reply

    return call


async def _message(context: Any) -> Any:
    """The call's one message. Raises InvalidRequest, or RequestTimeout if it does not come in time."""
    try:
        async with asyncio.timeout(MESSAGE_TIMEOUT_S):
            message = await context.read()
    except TimeoutError:
        raise RequestTimeout(f"the message did not arrive within {MESSAGE_TIMEOUT_S:g} s") from None
    if message is grpc.aio.EOF:
        raise InvalidRequest("the call ended without a message")
    return message


def map_rpc_error(error: grpc.aio.AioRpcError, advice: TlsAdvice = AMONG_SERVICES) -> EyasError:
    """Returns the server's error: the class that its trailer names, else the most general one of the status.

    An Overloaded has the seconds to wait that the trailer says. `advice`: to the caller, where TLS was in the
    way.
    """
    metadata = {key: value for key, value in error.trailing_metadata() or ()}
    known = _named(error, metadata, advice)
    wait_s = str(metadata.get(RETRY_AFTER, ""))
    if isinstance(known, Overloaded) and wait_s.isdecimal():  # a proxy may name a date
        known.retry_after_s = int(wait_s)
    return known


def _named(error: grpc.aio.AioRpcError, metadata: dict[str, Any], advice: TlsAdvice) -> EyasError:
    message = explained(error.details() or f"the call ended with {error.code().name}", advice)
    code = metadata.get(CODE)
    if code is None and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in message:
        return PayloadTooLarge(message)
    if code is not None:
        return from_code(str(code), message, metadata.get(PARAM))
    return from_grpc_status(error.code().name, message)


# --- health and reflection ---------------------------------------------------------------------------


class HealthService:
    """gRPC health v1 of one server: all services, and the server itself (""), have one status."""

    def __init__(self, target: grpc.aio.Server, services: Sequence[str]) -> None:
        self._servicer = health.aio.HealthServicer()
        self._names = ("", *services)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, target)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, target)

    async def set(self, serving: bool) -> None:
        """Reports SERVING or NOT_SERVING from now on."""
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if serving else statuses.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, status)


async def is_serving(target: grpc.aio.Channel, timeout_s: float = 2.0) -> bool:
    """Whether the server behind a channel reports SERVING; False if it does not answer in time."""
    stub = health_pb2_grpc.HealthStub(target)
    try:
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError:
        return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def peer_lost(worker: str) -> Unavailable:
    """The error for a stream that a worker ended without a status."""
    return Unavailable(f"worker {worker} ended the stream")
