"""Where one request ends and the next begins: no byte of a body is ever read as a request."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import certificates
import pytest
from certificates import Certificates
from starlette.types import Receive, Scope, Send

from eyas.common.security.tls import caller_context
from gateway.http.protocol import HttpLimits
from gateway.http.server import HttpServer

SOON_S = 30.0
INNER = b"GET /inner HTTP/1.1\r\nhost: y\r\n\r\n"  # a body that looks like a request
LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
POST = b"POST /p HTTP/1.1\r\nhost: x\r\n"
EARLY = b"POST /early HTTP/1.1\r\nhost: x\r\n"  # answered before its body is read
GET = b"GET /p HTTP/1.1\r\nhost: x\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n"
SIZED = b"content-length: %d\r\n" % len(INNER)
CHUNKED = b"transfer-encoding: chunked\r\n"
EXPECT = b"expect: 100-continue\r\n"
IN_CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(INNER), INNER)
END = b"\r\n"


@dataclass
class App:
    """Answers every request with its path, after its body but for /early."""

    seen: list[tuple[str, str, bytes]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)  # of the last one

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        body, more = b"", scope["path"] != "/early"
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message["body"]
            more = message["more_body"]
        self.seen.append((scope["method"], scope["path"], body))
        said = scope["path"].encode()
        headers = [(b"content-length", b"%d" % len(said))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": said})


@dataclass
class Door:
    app: App
    port: int
    tls: ssl.SSLContext | None

    async def tell(self, *parts: bytes) -> list[int]:
        """Sends the parts, each in a packet of its own, and returns the status of every answer until the
        end of the connection."""
        async with asyncio.timeout(SOON_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.tls)
            try:
                for part in parts:
                    writer.write(part)
                    with contextlib.suppress(ConnectionError):
                        await writer.drain()
                    await asyncio.sleep(0.02)
                said = b""
                with contextlib.suppress(ConnectionError):
                    while more := await reader.read(65536):
                        said += more
                return statuses(said)
            finally:
                writer.transport.abort()


def statuses(said: bytes) -> list[int]:
    """Those of well-formed answers one after the other, and nothing beside them."""
    found = []
    while said:
        head, _, said = said.partition(b"\r\n\r\n")
        line = re.match(rb"HTTP/1\.1 (\d{3}) ", head)
        assert line, head
        found.append(int(line[1]))
        length = re.search(rb"\r\ncontent-length: (\d+)", head)
        assert length or found[-1] == 100, head
        said = said[int(length[1]) :] if length else said
    return found


@contextlib.asynccontextmanager
async def opened(tls: Certificates | None = None) -> AsyncIterator[Door]:
    app = App()
    server = HttpServer(
        app, "127.0.0.1", 0, HttpLimits(rest_s=0.5), tls=caller_context(tls.door) if tls else None
    )
    await server.start()
    try:
        yield Door(app, server.port, ssl.create_default_context(cafile=tls.ca) if tls else None)
    finally:
        await server.aclose()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates.make(tmp_path_factory.mktemp("framing") / "certs")


@pytest.fixture(params=["plain", "tls"])
async def door(request: pytest.FixtureRequest, ours: Certificates) -> AsyncIterator[Door]:
    async with opened(ours if request.param == "tls" else None) as door:
        yield door


# --- upgrades ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "upgrade", [H2C, b"connection: upgrade\r\nupgrade: websocket\r\n"], ids=["h2c", "ws"]
)
@pytest.mark.parametrize("expect", [b"", EXPECT], ids=["", "expect"])
async def test_the_body_beside_an_upgrade_is_a_body(door: Door, upgrade: bytes, expect: bytes) -> None:
    """In the head's packet, in one of its own, and in chunks."""
    for parts in (
        (POST + upgrade + expect + SIZED + END + INNER + LAST,),
        (POST + upgrade + expect + SIZED + END, INNER + LAST),
        (POST + upgrade + expect + CHUNKED + END, IN_CHUNKS, LAST),
    ):
        door.app.seen.clear()
        answers = await door.tell(*parts)
        assert [status for status in answers if status != 100] == [200, 200]
        assert door.app.seen == [("POST", "/p", INNER), ("GET", "/last", b"")]


async def test_requests_behind_an_upgrade_are_answered_in_order() -> None:
    async with opened() as door:
        asked = [b"POST /%d HTTP/1.1\r\nhost: x\r\n" % i + H2C + SIZED + END + INNER for i in range(4)]
        assert await door.tell(b"".join(asked) + LAST) == [200] * 5
        assert door.app.seen == [*(("POST", f"/{i}", INNER) for i in range(4)), ("GET", "/last", b"")]


async def test_an_upgrade_that_comes_in_single_bytes_is_ignored_too() -> None:
    async with opened() as door:
        words = GET + b"Connection: close, upgrade\r\nUpgrade: websocket\r\n" + END
        assert await door.tell(*(words[i : i + 1] for i in range(len(words)))) == [200]
        assert door.app.seen == [("GET", "/p", b"")]
        assert door.app.headers == {"host": "x", "connection": "close"}


async def test_an_upgrade_in_http_1_0_keeps_its_body() -> None:
    async with opened() as door:
        head = b"POST /p HTTP/1.0\r\n" + H2C + SIZED + END
        assert await door.tell(head, INNER) == [200]
        assert door.app.seen == [("POST", "/p", INNER)]


# --- bodies ------------------------------------------------------------------------------------------------

FRAMED = {
    "length": POST + SIZED + END + INNER,
    "chunks": POST + CHUNKED + END + IN_CHUNKS,
    "capitals": POST + b"Transfer-Encoding: CHUNKED \r\n" + END + IN_CHUNKS,
    "extension": POST + CHUNKED + END + IN_CHUNKS.replace(b"\r\nGET", b';a="b";c\r\nGET'),
    "trailer": POST + CHUNKED + END + IN_CHUNKS[:-2] + b"authorization: Bearer x\r\nupgrade: h2c\r\n\r\n",
}


@pytest.mark.parametrize("words", FRAMED.values(), ids=FRAMED)
async def test_a_framed_body_is_a_body(words: bytes) -> None:
    async with opened() as door:
        assert await door.tell(words + LAST) == [200, 200]
        assert door.app.seen == [("POST", "/p", INNER), ("GET", "/last", b"")]


async def test_a_body_of_a_get_is_one_too() -> None:
    async with opened() as door:
        assert await door.tell(GET + SIZED + END + INNER + LAST) == [200, 200]
        assert door.app.seen == [("GET", "/p", INNER), ("GET", "/last", b"")]


async def test_trailers_are_no_headers_of_the_request() -> None:
    async with opened() as door:
        trailers = b"authorization: Bearer x\r\nconnection: close\r\n\r\n"
        assert await door.tell(POST + CHUNKED + END + b"3\r\nabc\r\n0\r\n", trailers + LAST) == [200]
        assert door.app.seen == [("POST", "/p", b"abc")]
        assert door.app.headers == {"host": "x", "transfer-encoding": "chunked"}


REFUSED = {
    "two lengths": POST + SIZED + b"content-length: 0\r\n" + END + INNER,
    "one length twice": POST + SIZED + SIZED + END + INNER,
    "a list of lengths": POST + b"content-length: 0, 0\r\n" + END + INNER,
    "a signed length": POST + b"content-length: +0\r\n" + END + INNER,
    "a long length": POST + b"content-length: 18446744073709551616\r\n" + END + INNER,
    "a length before chunks": POST + b"content-length: 5\r\n" + CHUNKED + END + b"0\r\n\r\n" + INNER,
    "a length after chunks": POST + CHUNKED + b"content-length: 5\r\n" + END + b"0\r\n\r\n" + INNER,
    "another coding": POST + b"transfer-encoding: gzip\r\n" + END + INNER,
    "two codings": POST + b"transfer-encoding: gzip, chunked\r\n" + END + b"0\r\n\r\n" + INNER,
    "codings in two lines": POST + b"transfer-encoding: identity\r\n" + CHUNKED + END + b"0\r\n\r\n" + INNER,
    "chunks twice": POST + CHUNKED + CHUNKED + END + b"0\r\n\r\n" + INNER,
    "no coding": POST + b"transfer-encoding:\r\n" + END + INNER,
    "an unknown coding": POST + b"transfer-encoding: xchunked\r\n" + END + b"0\r\n\r\n" + INNER,
    "chunks in 1.0": b"POST /p HTTP/1.0\r\n" + CHUNKED + END + b"0\r\n\r\n" + INNER,
    "a folded header": POST + b"x: a\r\n b\r\n" + SIZED + END + INNER,
    "a folded coding": POST + b"transfer-encoding:\r\n chunked\r\n" + END + b"0\r\n\r\n" + INNER,
    "a space before a colon": POST + b"content-length : 5\r\n" + END + INNER,
    "bare line feeds": (POST + SIZED + END).replace(b"\r\n", b"\n") + INNER,
    "one bare line feed": POST + b"x: y\n" + SIZED + END + INNER,
    "a bare return": POST + b"x: y\r" + SIZED + END + INNER,
    "a bare feed at the end": POST + b"content-length: 0\r\n\n" + INNER,
    "a zero byte": POST + b"x: y\x00\r\n" + END + INNER,
    "two hosts": POST + b"host: y\r\n" + SIZED + END + INNER,
    "no host": b"POST /p HTTP/1.1\r\n" + SIZED + END + INNER,
    "HTTP/0.9": b"GET /p\r\n\r\n" + INNER,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + INNER,
    "a tunnel": b"CONNECT a:443 HTTP/1.1\r\nhost: a:443\r\n" + END + INNER,
    "a tunnel with a body": b"CONNECT a:443 HTTP/1.1\r\nhost: a:443\r\n" + SIZED + END + INNER,
    "a star": b"GET * HTTP/1.1\r\nhost: x\r\n\r\n" + INNER,
    "a user in the target": b"GET http://u:p@x/p HTTP/1.1\r\nhost: x\r\n\r\n" + INNER,
    "another scheme": b"GET ftp://x/p HTTP/1.1\r\nhost: x\r\n\r\n" + INNER,
}


@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
async def test_what_can_be_read_in_two_ways_is_refused(words: bytes) -> None:
    """Whether it comes at once, or what follows the head a moment later."""
    async with opened() as door:
        head, end, rest = words.partition(b"\r\n\r\n")
        for parts in ((words,), (head + end, rest)):
            assert await door.tell(*parts) == [400]
    assert door.app.seen == []


BROKEN = {
    "a feed behind an extension": b"3;a\nabc\r\n0\r\n\r\n",
    "feeds": b"3\nabc\n0\n\n",
    "a feed behind a chunk": b"3\r\nabc\n0\r\n\r\n",
    "a feed at the end": b"0\r\n\n",
    "0x": b"0x3\r\nabc\r\n0\r\n\r\n",
    "a sign": b"+3\r\nabc\r\n0\r\n\r\n",
    "a space": b"3 \r\nabc\r\n0\r\n\r\n",
    "nothing": b"\r\nabc\r\n0\r\n\r\n",
    "a long size": b"10000000000000003\r\nabc\r\n0\r\n\r\n",
    "more than its size": b"3\r\nabcdef\r\n0\r\n\r\n",
    "a length in the trailer": b"0\r\ncontent-length: 5\r\n\r\n",
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
async def test_broken_chunks_end_the_connection(body: bytes) -> None:
    """With the one answer that is due: none, if it was given before the body was read."""
    async with opened() as door:
        for head, answers in ((POST + CHUNKED + END, [400]), (EARLY + CHUNKED + END, [200])):
            assert await door.tell(head, body + INNER) == answers
    assert door.app.seen == [("POST", "/early", b"")]


# --- who waits before the body -----------------------------------------------------------------------------


async def test_a_body_is_called_for_once_and_only_if_it_has_not_come(door: Door) -> None:
    assert await door.tell(POST + EXPECT + SIZED + END, INNER + LAST) in ([100, 200, 200], [200, 200])
    assert await door.tell(POST + EXPECT + SIZED + END + INNER + LAST) == [200, 200]
    assert await door.tell(GET + EXPECT + END + LAST) == [200, 200]
    assert await door.tell(b"POST /p HTTP/1.0\r\n" + EXPECT + SIZED + END, INNER) == [200]
    assert door.app.seen.count(("POST", "/p", INNER)) == 3


async def test_an_answer_before_the_body_was_called_for_ends_the_connection() -> None:
    """Else the body that may follow, or the request that may, could be taken for the other."""
    async with opened() as door:
        assert await door.tell(EARLY + EXPECT + SIZED + END) == [200]
        assert await door.tell(EARLY + SIZED + END, INNER + LAST) == [200, 200]
        assert door.app.seen == [("POST", "/early", b"")] * 2 + [("GET", "/last", b"")]


# --- targets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "path", "host"),
    [
        (b"GET http://z:80/p?q", "/p", "z:80"),
        (b"GET HTTPS://z", "/", "z"),
        (b"GET http://z?q=1", "/", "z"),
        (b"OPTIONS *", "*", "x"),
        (b"GET //z/p", "//z/p", "x"),
    ],
)
async def test_targets_are_paths_or_urls(asked: bytes, path: str, host: str) -> None:
    """The host of a URL counts, not the header's."""
    async with opened() as door:
        assert await door.tell(asked + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n") == [200]
        assert [seen[1] for seen in door.app.seen] == [path]
        assert door.app.headers["host"] == host


def test_answers_that_are_not_well_formed_fail_here() -> None:
    words = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nxHTTP/1.1 100 Continue\r\n\r\n"
    assert statuses(words) == [200, 100]
    with pytest.raises(AssertionError):
        statuses(words + b"rest")
