"""The HTTP server and clients that stretch what they may: headers, time, connections, requests sent ahead."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json

import pytest

from gateway.http.protocol import HttpLimits
from tests.rpc.http_wire import SOON_S, door

PATIENT = HttpLimits()
GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /early HTTP/1.1\r\nhost: x\r\n"


def code(body: bytes) -> str:
    """That of OpenAI's error object."""
    return str(json.loads(body)["error"]["code"])


# --- headers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        b"x: " + b"a" * 66_000 + b"\r\n\r\n",
        b"x: " + b"a" * 8_000_000,  # never ends; the answer comes while it is sent
        b"".join(b"x-%d: %s\r\n" % (i, b"a" * 1000) for i in range(70)) + b"\r\n",
        b"x: y\r\n" * 101 + b"\r\n",
    ],
    ids=["long", "endless", "long together", "many"],
)
async def test_large_headers_are_refused(header: bytes) -> None:
    async with door(PATIENT) as d:
        wire = await d.wire()
        wire.say(GET + header)
        status, body = await wire.answer()
        assert (status, code(body)) == (431, "headers_too_large")
        fair = await d.wire()
        fair.say(GET + b"x: " + b"a" * 60_000 + b"\r\n\r\n")
        assert await fair.answer() == (200, b"/")


async def test_a_long_url_is_a_large_header() -> None:
    async with door(PATIENT) as d:
        wire = await d.wire()
        wire.say(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n")
        assert (await wire.answer())[0] == 431


async def test_what_follows_a_body_is_a_header_too() -> None:
    async with door(PATIENT) as d:
        wire = await d.wire()
        wire.say(POST.replace(b"/early", b"/") + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nx: ")
        wire.say(b"a" * 500_000)
        assert (await wire.answer())[0] == 431


async def test_half_a_header_is_not_waited_for() -> None:
    async with door() as d:
        half, silent = await d.wire(), await d.wire()
        half.say(GET + b"x-half: ")
        status, body = await half.answer()
        assert (status, code(body)) == (408, "request_timeout")
        assert await half.end() == await silent.end() == b""


async def test_single_bytes_do_not_prolong_a_header() -> None:
    async with door() as d:
        wire = await d.wire()
        wire.say(GET)

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    wire.say(b"x: y\r\n")
                    await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        assert (await wire.answer())[0] == 408
        dripping.cancel()


async def test_a_broken_body_is_answered() -> None:
    async with door() as d:
        wire = await d.wire()
        wire.say(POST.replace(b"/early", b"/") + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\nworm\r\n")
        status, body = await wire.answer()
        assert (status, code(body)) == (400, "invalid_request")
        assert await wire.end() == b""


@pytest.mark.parametrize(("count", "status"), [(8192, 200), (8193, 413)])
async def test_chunks_are_bounded_in_number(count: int, status: int) -> None:
    """Each costs the parser as much as some hundred bytes."""
    async with door() as d:
        wire = await d.wire()
        body = b"1\r\nx\r\n" * (count - 1)  # the last one, of no bytes, is one too
        wire.say(POST.replace(b"/early", b"/") + b"transfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n")
        assert (await wire.answer())[0] == status


async def test_a_broken_body_is_not_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """The client waits for a word before it sends its body, and sends some that is no body all the same."""
    async with door() as there:
        wire = await there.wire()
        wire.say(
            POST.replace(b"/early", b"/")
            + b"expect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"
        )
        assert (await wire.answer())[0] == 400
        await wire.end()
    assert caplog.text == ""


@pytest.mark.parametrize("words", [b"\x16\x03\x01 hello\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"])
async def test_bytes_that_are_not_http_get_an_error_object(words: bytes) -> None:
    async with door() as d:
        wire = await d.wire()
        wire.say(words)
        status, body = await wire.answer()
        assert (status, code(body)) == (400, "invalid_request")
        assert await wire.end() == b""


# --- connections ------------------------------------------------------------------------------------------


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    async with door() as d:
        idle, busy = await d.wire(), await d.wire()
        idle.say(GET + b"\r\n")
        busy.say(GET.replace(b"/ ", b"/held ") + b"\r\n")
        assert await idle.answer() == (200, b"/")
        assert await idle.end() == b""
        d.app.let_go.set()
        assert await busy.answer() == (200, b"/held")


async def test_a_connection_too_many_replaces_the_longest_idle_one(caplog: pytest.LogCaptureFixture) -> None:
    async with door(dataclasses.replace(PATIENT, connections=2)) as d:
        silent = await d.wire()
        used = await d.wire()
        used.say(GET + b"\r\n")
        assert await used.answer() == (200, b"/")
        for _ in range(3):
            late = await d.wire()
            late.say(GET + b"\r\n")
            assert await late.answer() == (200, b"/")
        assert await silent.end() == await used.end() == b""
    assert caplog.text.count("2 HTTP connections are open") == 1  # however often


async def test_a_connection_too_many_is_refused_if_all_are_busy() -> None:
    async with door(dataclasses.replace(PATIENT, connections=2)) as d:
        busy = [await d.wire() for _ in range(2)]
        for wire in busy:
            wire.say(GET.replace(b"/ ", b"/held ") + b"\r\n")
        async with asyncio.timeout(SOON_S):
            while d.app.held < 2:
                await asyncio.sleep(0.01)
        late = await d.wire()
        status, body = await late.answer()
        assert (status, code(body)) == (503, "unavailable")
        d.app.let_go.set()
        for wire in busy:
            assert await wire.answer() == (200, b"/held")


async def test_an_unread_body_must_end_in_time() -> None:
    """After the answer its rest may come, for a while; then the connection is as good as new."""
    async with door() as d:
        slow, quick = await d.wire(), await d.wire()
        for wire in (slow, quick):
            wire.say(POST + b"content-length: 100000\r\n\r\n")
            assert await wire.answer() == (200, b"/early")
        quick.say(b"x" * 100_000 + GET + b"\r\n")
        assert await quick.answer() == (200, b"/")
        slow.say(b"x")
        assert await slow.end() == b""


async def test_requests_sent_ahead_are_answered_in_order_and_bounded() -> None:
    async with door() as d:
        wire = await d.wire()
        wire.say(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % i for i in range(10)))
        assert [await wire.answer() for _ in range(10)] == [(200, b"/%d" % i) for i in range(10)]
        greedy = await d.wire()
        greedy.say((GET.replace(b"/ ", b"/held ") + b"\r\n") * 1000)
        assert await greedy.end() == b""


async def test_a_client_that_takes_nothing_is_dropped() -> None:
    async with door() as d:
        wire = await d.wire()
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        wire.say(GET.replace(b"/ ", b"/endless ") + b"\r\n")
        async with asyncio.timeout(SOON_S):
            await d.app.ended.wait()
