"""The load client's HTTP: events with the time of their arrival, and errors that say what happened."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator

import pytest

from eyas.bench import http
from eyas.bench.http import MeasuredServer
from eyas.common.errors import DeadlineExceeded, EyasError, Unauthorized, Unavailable

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
    await MeasuredServer(url).stream("/x", b"{}", lambda data, now: found.append((data, now)))
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
        await MeasuredServer(url).stream("/x", b"", refuse)


@pytest.mark.parametrize("status", ["429 Too Many", "500 Oh"])
async def test_a_refusal_says_its_status(replies: tuple[str, list[bytes]], status: str) -> None:
    url, parts = replies
    parts += [f"HTTP/1.1 {status}\r\ncontent-length: 4\r\n\r\nbusy".encode()]
    with pytest.raises(EyasError, match=f"HTTP {status[:3]}: busy"):
        await MeasuredServer(url).get("/health")
    with pytest.raises(EyasError, match=f"HTTP {status[:3]}: busy"):
        await events(url)
    assert await MeasuredServer(url).get_json("/health") is None


async def test_a_wrong_key_is_told(replies: tuple[str, list[bytes]]) -> None:
    url, parts = replies
    for key, told in ((None, "wants an API key"), ("old", "refuses the API key")):
        parts[:] = [b"HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n"]
        with pytest.raises(Unauthorized, match=told):
            await MeasuredServer(url, key).get_json("/v1/models")


async def test_an_address_without_a_server_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="nothing listens"):
        await MeasuredServer("http://127.0.0.1:1").get("/health")


async def test_a_body_without_a_length_ends_with_the_connection(replies: tuple[str, list[bytes]]) -> None:
    url, parts = replies
    parts += [b"HTTP/1.0 200 OK\r\n\r\n", b"data: a\n\n", b"data: [DONE]\n\n"]
    assert [data for data, _ in await events(url)] == [b"a", b"[DONE]"]


async def test_the_addresss_path_comes_before_every_other() -> None:
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await MeasuredServer(f"http://127.0.0.1:{port}/inner").get("/v1/models")
    assert asked == [b"GET /inner/v1/models HTTP/1.1\r\n"]


async def test_a_server_that_never_answers_has_a_deadline(
    replies: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, parts = replies
    parts += [b""] * 500
    monkeypatch.setattr(http, "GET_S", 0.1)
    monkeypatch.setattr(http, "STREAM_S", 0.2)
    with pytest.raises(DeadlineExceeded, match=f"{url} did not answer within 0.1 s"):
        await MeasuredServer(url).get_json("/v1/models")
    with pytest.raises(DeadlineExceeded, match="within 0.2 s"):
        await events(url)


async def test_too_many_open_files_are_not_a_server_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refuse)
    with pytest.raises(Unavailable, match="no connection to http://127.0.0.1:1: .*Too many open files"):
        await MeasuredServer("http://127.0.0.1:1").get("/health")
