"""What a gRPC call passes before any of it is read: the key, a place, and the limits of its connection.

It knows connections, calls and keys. It refuses to know what a message says.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from eyas.common import rpc
from eyas.common.config import GatewayConfig
from eyas.common.errors import Overloaded
from eyas.common.logging import Rarely
from gateway.keys import Keys

MAX_CALLS = 1024  # of callers, at a time
MAX_OPEN_CALLS = 128  # of services that ask for no key (health, reflection), at a time
_log = logging.getLogger("eyas.gateway")


def limits(config: GatewayConfig) -> rpc.Options:
    """Of connections, for the server's options. (A header has at most 16 KiB: gRPC's own limit.)"""
    return {
        "grpc.max_allowed_incoming_connections": config.max_connections,
        "grpc.server_handshake_timeout_ms": 10_000,  # for a connection's first words
        "grpc.max_connection_idle_ms": 60_000,  # without a call
        "grpc.max_concurrent_streams": MAX_CALLS + MAX_OPEN_CALLS,
        "grpc.max_receive_message_length": config.max_body_bytes,
    }


class Door(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Decides about a call before any of its message is read: until then gRPC holds little of it.

    `service` asks for a key, all others do not. Every method that it sees takes a stream (see `rpc`).
    """

    def __init__(self, service: str, keys: Keys) -> None:
        self._keyed = f"/{service}/"
        self._keys = keys
        self._calls = _Places(MAX_CALLS)
        self._open_calls = _SharedPlaces(MAX_OPEN_CALLS)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        keyed = handler_call_details.method.startswith(self._keyed)
        kind, behaviour = rpc.behaviour(handler)
        wrap = _streaming if inspect.isasyncgenfunction(behaviour) else _unary
        admit = self._admit_caller if keyed else self._admit_anybody
        return handler._replace(**{kind: wrap(behaviour, admit)})

    def _admit_caller(self, context: Any) -> contextlib.AbstractAsyncContextManager[None]:
        """Raises Unauthorized or Overloaded."""
        caller_of(context, self._keys)
        return self._calls.one()

    def _admit_anybody(self, context: Any) -> contextlib.AbstractAsyncContextManager[None]:
        return self._open_calls.one()


def caller_of(context: Any, keys: Keys) -> str:
    """Who makes the call, as `keys` name it. Raises Unauthorized."""
    return keys.caller(dict(context.invocation_metadata() or ()).get("authorization"))


class _Places:
    """A number of places, each taken by a call until it ends."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._taken: dict[asyncio.Timeout, None] = {}  # the longest comes first
        self._alarm = Rarely(_log)

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Raises Overloaded if there is none, or if it is taken back."""
        if len(self._taken) >= self._number:
            self._alarm.warning("%d gRPC calls are open: there is no place for more", len(self._taken))
            self._make_room()
        async with asyncio.timeout(None) as place:
            self._taken[place] = None
            try:
                yield
            except asyncio.CancelledError:
                if place.expired():
                    raise Overloaded("a newer call took the place of this one") from None
                raise
            finally:
                self._taken.pop(place, None)

    def _make_room(self) -> None:
        raise Overloaded(f"{self._number} calls are open already")


class _SharedPlaces(_Places):
    """One call too many takes the place of the one that has had its own longest.

    So strangers who hold on to theirs keep no health check from its answer.
    """

    def _make_room(self) -> None:
        longest = next(iter(self._taken))
        del self._taken[longest]
        longest.reschedule(asyncio.get_running_loop().time())


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
