"""Hostile gRPC: every method of every service, with random messages and with bytes that are none.

It finds the methods in the protos. It knows which statuses are an answer and which are a crash.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
from google.protobuf.message_factory import GetMessageClass

from protos import decode_pb2, draft_pb2, eyas_pb2, prefill_pb2, transfer_pb2, worker_pb2
from tests.fuzz.values import fill

FILES = (decode_pb2, draft_pb2, eyas_pb2, prefill_pb2, transfer_pb2, worker_pb2)
CALL_S = 2.0
CRASHES = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}


@dataclass(frozen=True)
class Method:
    """One rpc; `message` is the class of what it takes."""

    path: str
    streams_up: bool
    message: type


def methods() -> list[Method]:
    """Every method of every service."""
    found = []
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                found.append(Method(path, method.client_streaming, GetMessageClass(method.input_type)))
    return found


class GrpcFuzz:
    """`attack` makes one random call to one of `addresses`. `calls` counts (method, status)."""

    def __init__(self, addresses: list[str], seed: int) -> None:
        self._rng = random.Random(f"grpc/{seed}")
        self._channels = [grpc.aio.insecure_channel(address) for address in addresses]
        self._methods = methods()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []

    async def aclose(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def attack(self) -> None:
        rng, method = self._rng, self._rng.choice(self._methods)
        bare = rng.random() < 0.15
        sent = [
            self._bytes(method) if bare else self._message(method) for _ in range(rng.choice((0, 1, 1, 2, 6)))
        ]
        call = rng.choice(self._channels).stream_stream(method.path)
        if not method.streams_up:
            sent = sent[:1]
        status, details = await self._exchange(call, sent)
        self.calls[method.path, status.name] += 1
        if status in CRASHES and not bare:
            self.wrong.append(
                f"{method.path} -> {status.name} {details[:200]!r} for {[s[:300] for s in sent]}"
            )

    def _message(self, method: Method) -> bytes:
        return bytes(fill(self._rng, method.message()).SerializeToString())

    def _bytes(self, method: Method) -> bytes:
        rng, right = self._rng, self._message(method)
        cut = right[: rng.randrange(len(right) + 1)]
        return rng.choice((cut, rng.randbytes(rng.choice((1, 9, 500))), right + rng.randbytes(4)))

    async def _exchange(
        self, method: grpc.aio.StreamStreamMultiCallable, sent: list[bytes]
    ) -> tuple[grpc.StatusCode, str]:
        """Sends all, half-closes, reads to the end or to the deadline; sometimes leaves in the middle."""
        leaves = self._rng.random() < 0.1

        async def up() -> AsyncIterator[bytes]:
            for message in sent:
                yield message
                await asyncio.sleep(0.01)

        call = method(up(), timeout=CALL_S)
        try:
            async for _ in call:
                if leaves:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        except asyncio.CancelledError:
            if not leaves:
                raise
            return grpc.StatusCode.CANCELLED, ""
        return grpc.StatusCode.OK, ""
