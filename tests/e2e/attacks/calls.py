"""Attacks on gRPC: calls and messages by the library, and HTTP/2 frames that no library would send."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import struct
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc

from protos import eyas_pb2
from tests.e2e.attacks.attack import HOST, SILENCE, Attack, Tally, Target, attack

MiB = 1 << 20
WAIT_S = 90.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
END_HEADERS = 4
CHAT, GENERATE = "/eyas.v1.Eyas/Chat", "/eyas.v1.Eyas/Generate"


def generate(tokens: int = 8, **more: Any) -> bytes:
    """A call's message."""
    options = eyas_pb2.GenerateOptions(max_tokens=tokens, ignore_eos=True)
    request = eyas_pb2.GenerateRequest(ids=eyas_pb2.TokenIds(ids=[5, 6, 7]), options=options, **more)
    message: bytes = request.SerializeToString()
    return message


class Caller:
    """Calls on one connection; notes the code of each."""

    def __init__(self, channel: grpc.aio.Channel, target: Target, tally: Tally) -> None:
        self._channel = channel
        self._metadata = (("authorization", target.authorization),)
        self._tally = tally

    async def call(self, message: bytes, method: str = GENERATE, **more: Any) -> None:
        began = time.monotonic()
        more = {"timeout": WAIT_S, "metadata": self._metadata} | more
        try:
            one = self._channel.unary_stream(method)(message, **more)
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in one:
                    pass
            self._tally.note((await one.code()).name, began)
        except (grpc.aio.UsageError, ValueError):  # what the library itself does not send
            self._tally.note("unsendable", began)

    async def leave(self, message: bytes, after_s: float) -> None:
        """A call that its caller cancels."""
        began = time.monotonic()
        one = self._channel.unary_stream(GENERATE)(message, metadata=self._metadata)
        reading = asyncio.create_task(one.read())
        await asyncio.sleep(after_s)
        one.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        self._tally.note("left", began)


Calls = Callable[[Caller], Iterable[Awaitable[None]]]


def calling(calls: Calls) -> Callable[[Target, Tally], Awaitable[None]]:
    """An attack of all these calls at once, on one connection."""

    async def run(target: Target, tally: Tally) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.max_metadata_size", 8 * MiB)]
        async with grpc.aio.insecure_channel(target.address, options=options) as channel:
            await asyncio.gather(*calls(Caller(channel, target, tally)))

    return run


def many_streams(caller: Caller) -> Iterable[Awaitable[None]]:
    return (caller.call(generate(64)) for _ in range(3000))


def left_calls(caller: Caller) -> Iterable[Awaitable[None]]:
    rng = random.Random(6)
    return (caller.leave(generate(900), 5 * rng.random()) for _ in range(1000))


def oversized(caller: Caller) -> Iterable[Awaitable[None]]:
    return (caller.call(bytes([0x1A]) + bytes(size)) for size in [3 * MiB, 30 * MiB] * 4)


def compressed_bombs(caller: Caller) -> Iterable[Awaitable[None]]:
    """Zeros, which have a thousandth of their size on the wire."""
    return (caller.call(bytes(64 * MiB), compression=grpc.Compression.Gzip) for _ in range(3))


def bad_messages(caller: Caller) -> Iterable[Awaitable[None]]:
    rng = random.Random(7)
    deep = b"\x0a\x02" * 20_000
    kinds = [b"", deep, b"\xff" * 1000, rng.randbytes(1 << 20), generate() + b"\x0a\xff\xff\xff\xff\x0f"]
    flipped = [bytes(b ^ (rng.random() < 0.05) for b in generate()) for _ in range(100)]
    return (caller.call(m, method) for m in [*kinds * 5, *flipped] for method in (CHAT, GENERATE))


def bad_metadata(caller: Caller) -> Iterable[Awaitable[None]]:
    key = ("authorization", "Bearer x")
    kinds: list[list[tuple[str, Any]]] = [
        [],
        [key],
        [("authorization", "Bearer " + "x" * 12_000)],
        [("authorization", "Basic \x7f")],
        [("x-long", "a" * 100_000)],
        [("x-long", "a" * 3 * MiB)],
        [(f"x-{i}", "y") for i in range(5000)],
        [("x-bin", bytes(range(256)) * 40)],
        [key] * 300,
        [("grpc-timeout", "99999999999H")],
        [("traceparent", "00-" + "f" * 8000)],
        [("x-request-id", "a" * 5000)],
    ]
    return (caller.call(generate(), metadata=tuple(kind)) for kind in kinds * 8)


# --- frames ------------------------------------------------------------------------------------------------


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header in HPACK, written out."""
    parts = (text.encode() for text in (name, value))
    return b"\0" + b"".join(bytes([len(part)]) + part for part in parts)  # shorter than 127 bytes each


def headers(target: Target, method: str = GENERATE) -> bytes:
    told = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "x", "te": "trailers"}
    told |= {"content-type": "application/grpc", "authorization": target.authorization}
    return b"".join(literal(name, value) for name, value in told.items())


def streams() -> Iterable[int]:
    return itertools.count(1, 2)


def data(message: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(message)) + message


def resets(target: Target) -> Iterable[bytes]:
    """Calls that are opened and reset at once, 40,000 of them."""
    for first in range(0, 40_000, 100):
        yield b"".join(
            frame(HEADERS, END_HEADERS, 2 * i + 1, headers(target))
            + frame(RST_STREAM, 0, 2 * i + 1, bytes(4))
            for i in range(first, first + 100)
        )


def calls_and_resets(target: Target) -> Iterable[bytes]:
    """The same with whole messages, so that each call begins."""
    message = data(generate(900))
    for first in range(0, 4000, 20):
        yield b"".join(
            frame(HEADERS, END_HEADERS, 2 * i + 1, headers(target))
            + frame(DATA, 1, 2 * i + 1, message)
            + frame(RST_STREAM, 0, 2 * i + 1, struct.pack(">I", 8))
            for i in range(first, first + 20)
        )


def pings(target: Target) -> Iterable[bytes]:
    return (frame(PING, 0, 0, bytes(8)) * 1000 for _ in range(100))


def settings(target: Target) -> Iterable[bytes]:
    return (frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65535 + i)) * 500 for i in range(100))


def endless_header(target: Target) -> Iterable[bytes]:
    """A header that goes on in frame after frame."""
    yield frame(HEADERS, 0, 1, headers(target))
    yield from (frame(CONTINUATION, 0, 1, literal("x-a", "b" * 100) * 150) for _ in range(2000))


def acknowledged_header(target: Target) -> Iterable[bytes]:
    """The same from a caller who knows the server's limit."""
    yield frame(SETTINGS, 1, 0)
    yield from endless_header(target)


def small_frames(target: Target) -> Iterable[bytes]:
    """Empty data, windows and priorities of a call that never says what it asks."""
    yield frame(HEADERS, END_HEADERS, 1, headers(target))
    window = frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 1))
    priority = frame(PRIORITY, 0, 1, struct.pack(">IB", 3, 9))
    yield from ((frame(DATA, 0, 1) + window + priority) * 300 for _ in range(200))


def half_messages(target: Target) -> Iterable[bytes]:
    """A thousand calls that say the half of 64 KB each, as much as a connection may before it is read."""
    for stream in itertools.islice(streams(), 1000):
        yield frame(HEADERS, END_HEADERS, stream, headers(target)) + frame(
            DATA, 0, stream, b"\0\0\0\xff\xff" + bytes(50)
        )


def framing(
    say: Callable[[Target], Iterable[bytes]], connections: int, stay_s: float
) -> Callable[[Target, Tally], Awaitable[None]]:
    """An attack of connections that say these frames: `closed` by the server, or `left` after `stay_s`."""

    async def one(target: Target, tally: Tally) -> None:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection(HOST, target.grpc_port)
        answer = "left"
        drain = asyncio.create_task(_until_closed(reader))
        with contextlib.suppress(OSError):
            writer.write(PREFACE + frame(SETTINGS, 0, 0))
            try:
                async with asyncio.timeout(WAIT_S):
                    for part in say(target):
                        writer.write(part)
                        await writer.drain()
            except TimeoutError:
                answer = SILENCE
        await asyncio.wait([drain], timeout=stay_s)
        tally.note("closed" if drain.done() else answer, began)
        drain.cancel()
        writer.transport.abort()

    async def run(target: Target, tally: Tally) -> None:
        await asyncio.gather(*(one(target, tally) for _ in range(connections)))

    return run


async def _until_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(1 << 16):
            pass


REFUSED = "INVALID_ARGUMENT NOT_FOUND RESOURCE_EXHAUSTED UNAVAILABLE INTERNAL UNKNOWN CANCELLED UNIMPLEMENTED"

CALLS: list[Attack] = [
    attack("3,000 calls at once", calling(many_streams), "OK RESOURCE_EXHAUSTED DEADLINE_EXCEEDED", 95),
    attack("1,000 calls left", calling(left_calls), "left", 15),
    attack("8 messages of 3 and 30 MiB", calling(oversized), "RESOURCE_EXHAUSTED", 10),
    attack("3 messages that inflate to 64 MiB", calling(compressed_bombs), REFUSED, 15),
    attack("250 broken messages", calling(bad_messages), f"OK {REFUSED}", 15),
    attack("96 calls with bad metadata", calling(bad_metadata), f"UNAUTHENTICATED unsendable {REFUSED}", 15),
    attack("3 x 40,000 calls reset", framing(resets, 3, 5), "left closed", 30),
    attack("3 x 4,000 calls begun and reset", framing(calls_and_resets, 3, 5), "left closed", 60),
    attack("4 x 100,000 pings", framing(pings, 4, 5), "closed left", 20),
    attack("4 x 50,000 settings", framing(settings, 4, 5), "closed left", 20),
    attack("4 headers of 32 MB", framing(endless_header, 4, 5), "closed", 30),
    attack("4 headers of 32 MB, acknowledged", framing(acknowledged_header, 4, 5), "closed left", 30),
    attack("4 x 180,000 small frames", framing(small_frames, 4, 5), "closed left", 30),
    attack("20 x 1,000 half messages", framing(half_messages, 20, 12), "left closed", 30),
    attack("1,000 silent gRPC connections", framing(lambda _: (), 1000, 15), "left closed", 25),
]
