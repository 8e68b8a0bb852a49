"""Attacks on HTTP itself: what is dripped, flooded, half sent, lied about, never read, or not said at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections.abc import Iterable, Iterator

from tests.e2e.attacks.attack import HOST, SILENCE, Attack, Tally, Target, attack

MiB = 1 << 20
WAIT_S = 60.0  # an attacker waits for an answer
LONG = {"model": "eyas-nano", "prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True, "stream": True}


def head(target: Target, *lines: str, path: str = "/v1/completions", key: bool = True) -> bytes:
    """A POST's request line and headers, without the empty line at their end."""
    told = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", *lines]
    return "\r\n".join([*told, *([f"authorization: {target.authorization}"] if key else []), ""]).encode()


def whole(target: Target, body: bytes, path: str = "/v1/completions") -> bytes:
    return head(target, f"content-length: {len(body)}", path=path) + b"\r\n" + body


async def say(target: Target, tally: Tally, parts: Iterable[bytes], pause_s: float = 0.0) -> None:
    """One connection that says `parts` with pauses between them, until it is answered; notes the answer."""
    began = time.monotonic()
    try:
        reader, writer = await asyncio.open_connection(HOST, target.port)
    except OSError:
        tally.note("refused", began)
        return
    speaking = asyncio.create_task(_speak(writer, parts, pause_s))
    try:
        async with asyncio.timeout(WAIT_S):
            tally.note(await _status(reader), began)
    except TimeoutError:
        tally.note(SILENCE, began)
    finally:
        speaking.cancel()
        await asyncio.gather(speaking, return_exceptions=True)
        writer.transport.abort()


async def _speak(writer: asyncio.StreamWriter, parts: Iterable[bytes], pause_s: float) -> None:
    with contextlib.suppress(OSError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)


async def _status(reader: asyncio.StreamReader) -> str:
    """The status of the answer; `closed` without one."""
    try:
        line = await reader.readline()
    except OSError:
        line = b""
    return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"


def bytewise(data: bytes) -> Iterator[bytes]:
    return (data[i : i + 1] for i in range(len(data)))


def chunks(data: bytes, size: int) -> bytes:
    """`data` as a chunked body in pieces of `size`, without its end."""
    pieces = (data[i : i + size] for i in range(0, len(data), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


# --- slowly ------------------------------------------------------------------------------------------------


async def dripped_headers(target: Target, tally: Tally) -> None:
    dripped = head(target, *(f"x-{i}: y" for i in range(40)))
    await asyncio.gather(*(say(target, tally, bytewise(dripped), 0.5) for _ in range(500)))


async def dripped_bodies(target: Target, tally: Tally) -> None:
    def parts() -> Iterator[bytes]:
        yield head(target, "content-length: 100000") + b"\r\n"
        yield from bytewise(b" " * 1000)

    await asyncio.gather(*(say(target, tally, parts(), 0.5) for _ in range(300)))


async def silent_connections(target: Target, tally: Tally) -> None:
    await asyncio.gather(*(say(target, tally, [b""]) for _ in range(3000)))


async def half_sent_bodies(target: Target, tally: Tally) -> None:
    """Nearly all of the largest body that is allowed, and then nothing."""
    part = head(target, f"content-length: {2 * MiB}") + b"\r\n" + b" " * (2 * MiB - 1)
    await asyncio.gather(*(say(target, tally, [part]) for _ in range(400)))


async def slow_readers(target: Target, tally: Tally) -> None:
    """Streams of which nothing is read; after a while their callers leave."""

    async def one() -> None:
        began = time.monotonic()
        link = socket.socket()
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.setblocking(False)
        with link:
            await asyncio.get_running_loop().sock_connect(link, (HOST, target.port))
            await asyncio.get_running_loop().sock_sendall(link, whole(target, json.dumps(LONG).encode()))
            await asyncio.sleep(10)
        tally.note("left", began)

    await asyncio.gather(*(one() for _ in range(60)))


# --- too much ----------------------------------------------------------------------------------------------


async def header_floods(target: Target, tally: Tally) -> None:
    kinds = [
        [head(target, *(f"x-{i}: y" for i in range(5000))), b"\r\n"],
        [head(target, "x-long: " + "a" * MiB), b"\r\n"],
        [head(target, path="/" + "a" * MiB), b"\r\n"],
        [head(target, "a" * MiB + ": b"), b"\r\n"],
        [head(target, *("x: " + "y" * 50_000 for _ in range(20))), b"\r\n"],
    ]
    await asyncio.gather(*(say(target, tally, kinds[i % len(kinds)]) for i in range(300)))


async def huge_bodies(target: Target, tally: Tally) -> None:
    megabyte = chunks(b" " * MiB, 1 << 16)
    kinds = [
        [head(target, "content-length: 10000000000"), b"\r\n", b" " * MiB],
        [head(target, "transfer-encoding: chunked"), b"\r\n", *([megabyte] * 20)],
        [head(target, "transfer-encoding: chunked"), b"\r\n", b"ffffffffffffff\r\n", b" " * 4 * MiB],
    ]
    await asyncio.gather(*(say(target, tally, kinds[i % len(kinds)]) for i in range(120)))


async def tiny_chunks(target: Target, tally: Tally) -> None:
    """A body of half a megabyte, each byte in a chunk of its own; and one with huge trailers."""
    tiny = chunks(b" " * (MiB // 2), 1)
    start = head(target, "transfer-encoding: chunked") + b"\r\n"
    trailers = b"0\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(20_000)) + b"\r\n"
    kinds = [
        [start, tiny, b"0\r\n\r\n"],
        [start, trailers],
        [start, b"1;" + b"e" * MiB + b"\r\n \r\n0\r\n\r\n"],
    ]
    await asyncio.gather(*(say(target, tally, kinds[i % len(kinds)]) for i in range(24)))


async def requests_ahead(target: Target, tally: Tally) -> None:
    """Thousands of requests on one connection that does not wait for an answer."""
    ahead = head(target, "content-length: 2") + b"\r\n{}"
    await asyncio.gather(*(say(target, tally, [ahead * 5000]) for _ in range(20)))


async def connections_and_resets(target: Target, tally: Tally) -> None:
    """Connections that are reset at once, before or after half a word."""
    loop, linger = asyncio.get_running_loop(), struct.pack("ii", 1, 0)

    async def one(number: int) -> None:
        began = time.monotonic()
        with socket.socket() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            link.setblocking(False)
            await loop.sock_connect(link, (HOST, target.grpc_port if number % 4 == 3 else target.port))
            if number % 2:
                await loop.sock_sendall(link, b"POST /v1/comp")
        tally.note("left", began)

    for start in range(0, 6000, 100):
        await asyncio.gather(*(one(number) for number in range(start, start + 100)))


async def aborted_streams(target: Target, tally: Tally) -> None:
    """Long streams that their callers leave, at any moment of the first half second."""
    rng, places = random.Random(5), asyncio.Semaphore(24)

    async def one(after_s: float) -> None:
        async with places:
            began = time.monotonic()
            reader, writer = await asyncio.open_connection(HOST, target.port)
            writer.write(whole(target, json.dumps(LONG).encode()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(after_s):
                    while await reader.read(1 << 16):
                        pass
            writer.transport.abort()
            tally.note("left", began)

    await asyncio.gather(*(one(rng.random() / 2) for _ in range(600)))


# --- lies --------------------------------------------------------------------------------------------------


async def broken_http(target: Target, tally: Tally) -> None:
    """What is no HTTP, or is read differently by different servers."""
    body = b'{"model": "eyas-nano", "prompt": "x", "max_tokens": 1}'
    length = f"content-length: {len(body)}"
    broken = [
        head(target, length, "transfer-encoding: chunked") + b"\r\n" + chunks(body, 9) + b"0\r\n\r\n",
        head(target, length, f"content-length: {len(body) - 5}") + b"\r\n" + body,
        head(target, "content-length: -5") + b"\r\n" + body,
        head(target, "content-length: 99999999999999999999999") + b"\r\n" + body,
        head(target, "transfer-encoding: gzip, chunked, identity") + b"\r\n" + body,
        head(target, "transfer-encoding: chunked") + b"\r\n" + b"-5\r\n" + body,
        head(target, "transfer-encoding: chunked") + b"\r\n" + b"1ffffffffffffffff\r\n" + body,
        head(target, "x: a\0b", length) + b"\r\n" + body,
        head(target, " folded: y", length) + b"\r\n" + body,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),  # TLS where none is spoken
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(500),
        b"\0" * 5000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/9.9\r\n\r\n",
        b"\r\n" * 30_000,
    ]
    await asyncio.gather(*(say(target, tally, [broken[i % len(broken)]]) for i in range(280)))


SOCKETS: list[Attack] = [
    attack("500 headers dripped", dripped_headers, "408", 15),
    attack("300 bodies dripped", dripped_bodies, "408", 38),
    attack("3,000 silent connections", silent_connections, "closed", 20),
    attack("400 bodies of 2 MiB, half sent", half_sent_bodies, "408 429 503", 40),
    attack("60 unread streams", slow_readers, "left", 15),
    attack("300 floods of headers", header_floods, "431 closed", 15),
    attack("120 bodies without an end", huge_bodies, "413 429 closed", 15),
    attack("24 bodies of tiny chunks", tiny_chunks, "400 413 431 closed", 30),
    attack("20 x 5,000 requests sent ahead", requests_ahead, "400 closed", 15),
    attack("6,000 connections reset", connections_and_resets, "left", 10),
    attack("600 streams left", aborted_streams, "left", 20),
    attack("280 requests of broken HTTP", broken_http, "200 400 408 413 431 501 505 closed", 40),
]
