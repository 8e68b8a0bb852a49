"""The load client's HTTP: events with the time of their arrival, and errors that say what happened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from eyas.bench.http import Server
from eyas.common.errors import EyasError, Unauthorized, Unavailable

EVENTS = b"""HTTP/1.1 200 OK\r
transfer-encoding: chunked\r
\r
"""


def chunk(text: str) -> bytes:
    return f"{len(text.encode()):x}\r\n{text}\r\n".encode()


@pytest.fixture
async def replies() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that answers every request with the bytes in the list, then hangs up."""
    parts: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", parts


async def events(url: str) -> list[tuple[bytes, float]]:
    found: list[tuple[bytes, float]] = []
    await Server(url).stream("/x", b"{}", lambda data, now: found.append((data, now)))
    return found


async def test_events_are_whole_lines_with_the_time_of_their_end(replies: tuple[str, list[bytes]]) -> None:
    url, parts = replies
    parts += [EVENTS, chunk("data: a\n\n"), chunk("data: b\n\ndata: c"), chunk("d\n\n: no event\n\n")]
    parts += [chunk("data:[DONE]\n\n"), b"0\r\n\r\n"]
    began = time.perf_counter()
    found = await events(url)
    assert [data for data, _ in found] == [b"a", b"b", b"cd", b"[DONE]"]
    times = [at for _, at in found]
    assert times == sorted(times) and began < times[0] and times[-1] < time.perf_counter()
    assert times[2] - times[1] > 0.01, "it was whole a part later"


async def test_an_answer_may_come_in_any_pieces(replies: tuple[str, list[bytes]]) -> None:
    url, parts = replies
    whole = EVENTS + chunk("data: a\n\n") + chunk("data: b\n\n") + b"0\r\n\r\n"
    parts += [whole[:9], whole[9:50], whole[50:66], whole[66:]]
    assert [data for data, _ in await events(url)] == [b"a", b"b"]


async def test_an_answer_that_breaks_off_is_unavailable(replies: tuple[str, list[bytes]]) -> None:
    url, parts = replies
    parts += [EVENTS, chunk("data: a\n\n")]
    with pytest.raises(Unavailable, match="ended the connection"):
        await events(url)


async def test_what_is_no_http_is_told(replies: tuple[str, list[bytes]]) -> None:
    url, parts = replies
    parts += [b"SSH-2.0-x\r\n\r\n"]
    with pytest.raises(Unavailable, match="does not speak HTTP"):
        await events(url)


async def test_what_reading_an_event_raises_ends_the_request(replies: tuple[str, list[bytes]]) -> None:
    url, parts = replies
    parts += [EVENTS, chunk("data: a\n\n"), chunk("data: b\n\n")]

    def refuse(data: bytes, now: float) -> None:
        raise EyasError(f"{data!r} is wrong")

    with pytest.raises(EyasError, match="b'a' is wrong"):
        await Server(url).stream("/x", b"", refuse)


@pytest.mark.parametrize("status", ["429 Too Many", "500 Oh"])
async def test_a_refusal_says_its_status(replies: tuple[str, list[bytes]], status: str) -> None:
    url, parts = replies
    parts += [f"HTTP/1.1 {status}\r\ncontent-length: 4\r\n\r\nbusy".encode()]
    with pytest.raises(EyasError, match=f"HTTP {status[:3]}: busy"):
        await Server(url).get("/health")
    with pytest.raises(EyasError, match=f"HTTP {status[:3]}: busy"):
        await events(url)
    assert await Server(url).get_json("/health") is None


async def test_a_wrong_key_is_told(replies: tuple[str, list[bytes]]) -> None:
    url, parts = replies
    parts += [b"HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n"]
    with pytest.raises(Unauthorized, match="wants an API key"):
        await Server(url).get_json("/v1/models")


async def test_an_address_without_a_server_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="nothing listens"):
        await Server("http://127.0.0.1:1").get("/health")
