"""What goes over wires for one answer: gRPC between client, gateway and workers, HTTP, commands to Redis.

The services are real and in one process; their engines are fake and say one token per step. A gRPC message is
counted where the caller writes or reads it; heartbeats and looks at the registry come by the clock, so they
are left out. It knows no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import grpc.aio
import httpx
import msgspec
from prometheus_client import CollectorRegistry

from eyas.client import AsyncClient
from eyas.common.cluster.discovery import REFRESH_S, WorkerKeys, registry
from eyas.common.cluster.roster import POLL_S
from eyas.common.config import GatewayConfig
from eyas.common.types import Role
from gateway.backends.generate import ClusterBackend
from gateway.grpc.front import GrpcFront
from gateway.http.front import create_app
from gateway.observe.metrics import GatewayMetrics
from gateway.routing.cluster import Cluster
from tests.rpc.fake_engine import worker
from tests.rpc.redis_server import redis_server
from tests.rpc.scripted_backend import INFO, ScriptedBackend, nano_tokenizer

TOKENS = 16
SOON_S = 60.0
MINUTE_S = 60.0
LAYOUTS = {
    "unified": ((Role.PREFILL, Role.DECODE, Role.DRAFT),),
    "split": ((Role.PREFILL,), (Role.DECODE,)),
}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "eyas-nano", "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"model": "eyas-nano", "prompt": "Hi"},
    "/generate": {"text": "Hi"},
}
FRACTION = re.compile(rb"\d+\.\d+(e-?\d+)?")  # a time, which has as many digits as chance gives it
BY_THE_CLOCK = ("heartbeat", "InfoRequest", "InfoResponse", "HealthCheckRequest", "HealthCheckResponse")
OPENERS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")  # of a channel


class Traffic:
    """Messages and their bytes, by kind, of all calls that are opened while it is `watched`."""

    def __init__(self) -> None:
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def clear(self) -> None:
        """Forgets what was counted so far."""
        self.messages.clear()
        self.bytes.clear()

    @contextlib.contextmanager
    def watched(self) -> Iterator[Traffic]:
        with contextlib.ExitStack() as stack:
            for name in OPENERS:
                stack.enter_context(patch.object(grpc.aio._channel.Channel, name, self._counted(name)))
            yield self

    def _counted(self, name: str) -> Callable[..., Any]:
        opened = getattr(grpc.aio._channel.Channel, name)

        def opener(channel: Any, method: str, **how: Any) -> Any:
            write, read = how.get("request_serializer"), how.get("response_deserializer")
            if write is None or read is None:  # KV bytes, which engines count
                return opened(channel, method, **how)

            def written(message: Any) -> bytes:
                data: bytes = write(message)
                self._note(message, len(data))
                return data

            def heard(data: bytes) -> Any:
                message = read(data)
                self._note(message, len(data))
                return message

            how |= {"request_serializer": written, "response_deserializer": heard}
            return opened(channel, method, **how)

        return opener

    def _note(self, message: Any, size: int) -> None:
        kind = message.DESCRIPTOR.name
        for group in ("message", "event"):
            if group in message.DESCRIPTOR.oneofs_by_name:
                kind = f"{kind} {message.WhichOneof(group)}"
        if not kind.endswith(BY_THE_CLOCK):
            self.messages[kind] += 1
            self.bytes[kind] += size


async def counts() -> dict[str, int | float]:
    """Of one answer in each layout, of answers over HTTP, and of a worker that is in a Redis registry."""
    found: dict[str, int | float] = {}
    async with asyncio.timeout(SOON_S):
        for layout, roles in LAYOUTS.items():
            traffic = await answer(*roles)
            for kind in traffic.messages:
                found[f"gRPC, {layout}, {kind}: messages"] = traffic.messages[kind]
                found[f"gRPC, {layout}, {kind}: bytes"] = traffic.bytes[kind]
        for route, body in ROUTES.items():
            for way, stream in (("whole", False), ("streamed", True)):
                parts = await _http(route, body | {"stream": stream})
                found[f"HTTP {route}, {way}: parts"] = len(parts)
                found[f"HTTP {route}, {way}: bytes"] = sum(len(FRACTION.sub(b"0.0", part)) for part in parts)
        return found | await _redis()


# --- gRPC ------------------------------------------------------------------------------------------------


async def answer(*workers: tuple[Role, ...]) -> Traffic:
    """An answer of `TOKENS` tokens to a client of the gateway, by workers with these roles."""
    traffic = Traffic()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(traffic.watched())
        known = "static:"
        for roles in workers:
            started = await stack.enter_async_context(worker(*roles, registry=known))
            known = f"static:{started.address}" if known == "static:" else f"{known},{started.address}"
        client = await _client(stack, known)
        traffic.clear()
        completion = await client.generate((1, 2, 3), timeout_s=SOON_S, max_tokens=TOKENS, seed=1)
        assert completion.usage.completion_tokens == TOKENS
    return traffic


async def _client(stack: contextlib.AsyncExitStack, known: str) -> AsyncClient:
    """Of a gateway that is connected to every worker in the registry."""
    cluster = Cluster(registry(known))
    await cluster.start()
    stack.push_async_callback(cluster.aclose)
    while not all(one.connected for one in cluster.candidates() if Role.DECODE in one.info.roles):
        await asyncio.sleep(0.01)
    metrics = GatewayMetrics(CollectorRegistry())
    front = GrpcFront(GatewayConfig(grpc_port=0), ClusterBackend(cluster), nano_tokenizer(), metrics)
    await front.start()
    stack.push_async_callback(front.aclose)
    return await stack.enter_async_context(AsyncClient(f"127.0.0.1:{front.port}", retries=0))


# --- HTTP ------------------------------------------------------------------------------------------------


async def _http(route: str, body: dict[str, Any]) -> list[bytes]:
    """The parts in which the body of an answer leaves."""
    backend = ScriptedBackend(nano_tokenizer(), stride=1)
    app = create_app(GatewayConfig(), backend, backend.tokenizer, GatewayMetrics(CollectorRegistry()))
    parts: list[bytes] = []

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        async def note(message: Any) -> None:
            if part := message.get("body"):
                parts.append(part)
            await send(message)

        await app(scope, receive, note)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(counted), base_url="http://gateway") as client:
        (await client.post(route, json=body)).raise_for_status()
    return parts


# --- Redis -----------------------------------------------------------------------------------------------


async def _redis() -> dict[str, int | float]:
    """Commands per minute: to write the own key, and to read those of others."""
    async with redis_server() as server:
        keys = WorkerKeys(server.url, "going on")
        try:
            await keys.write(INFO)  # connects

            async def commands(step: Callable[[], Any], pause_s: float) -> int:
                before = await _commands(server.client)
                await step()
                return round((await _commands(server.client) - before) * MINUTE_S / pause_s)

            other = msgspec.structs.replace(INFO, worker="127.0.0.1:2")
            return {
                "Redis, to be found: commands per minute": await commands(
                    lambda: keys.write(other), REFRESH_S
                ),
                "Redis, to find others: commands per minute": await commands(keys.read, POLL_S),
            }
        finally:
            await keys.aclose()


async def _commands(client: Any) -> int:
    """How many the server has had, but for those that ask for this."""
    stats: dict[str, dict[str, int]] = await client.info("commandstats")
    return sum(one["calls"] for name, one in stats.items() if name != "cmdstat_info")
