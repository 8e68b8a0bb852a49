"""What `tcp` alone promises: tokens, connections that break, altered bytes, peers that say nothing."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from eyas.common.errors import ConfigError, TransferFailed
from kv_transfer.backends import tcp_owner, tcp_reads
from kv_transfer.backends.base import PeerSource
from tests.unit.backend_ends import PAGE, PAGES, Ends, job, wait_for

Spoil = Callable[[int, bytes], bytes | None]
"""What a proxy makes of some bytes of its connection of that number; None: it hangs up."""


class Proxy:
    """Between a puller and its owner: what the owner sends goes through `spoil`, a piece at a time."""

    def __init__(self, port: int, spoil: Spoil) -> None:
        self._port, self._spoil = port, spoil
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            for number in itertools.count():
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                ways = (near, far, lambda data: data), (far, near, lambda d, n=number: self._spoil(n, d))
                for way in ways:
                    threading.Thread(target=self._pass, args=way, daemon=True).start()

    def _pass(self, source: socket.socket, drain: socket.socket, change: Callable) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1000):
                data = change(data)
                if data is None:
                    break
                drain.sendall(data)
        for end in (source, drain):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends("tcp")
    yield made
    made.close()


@contextlib.contextmanager
def spoiled(ends: Ends, spoil: Spoil) -> Iterator[PeerSource]:
    export = ends.owners.export()
    assert export is not None
    proxy = Proxy(int(export["port"]), spoil)
    try:
        yield ends.backend.open(export | {"port": str(proxy.port).encode()})
    finally:
        proxy.close()


WHOLE = tuple(range(PAGES))


def test_a_broken_connection_is_made_again(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_reads, "REQUEST_BYTES", 4 * PAGE)
    sent = [0] * 100

    def cut(number: int, data: bytes) -> bytes | None:
        sent[number] += len(data)
        return None if number < 3 and sent[number] > 3 * PAGE else data

    with spoiled(ends, cut) as source:
        ends.backend.start(source, job(WHOLE, WHOLE[::-1]))
        (result,) = wait_for(ends.backend.poll, 1)
    assert result.ok and result.bytes == PAGES * PAGE
    assert sum(count > 3 * PAGE for count in sent[:3]) >= 1, "nothing was cut"
    np.testing.assert_array_equal(ends.mine.pages[:PAGES], ends.owner.pages[:PAGES][::-1])


@pytest.mark.parametrize("times", [1, 10**6])
def test_altered_bytes_are_read_again_and_not_for_ever(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setattr(tcp_reads, "SOCKETS", 1)
    monkeypatch.setattr(tcp_reads, "PAUSE_S", 0.01)
    left = [times]

    def alter(number: int, data: bytes) -> bytes:
        if len(data) < 500 or not left[0]:  # the greeting stays
            return data
        left[0] -= 1
        return data[:-1] + bytes([data[-1] ^ 1])

    with spoiled(ends, alter) as source:
        ends.backend.start(source, job(WHOLE, WHOLE))
        (result,) = wait_for(ends.backend.poll, 1)
    if times == 1:
        assert result.ok and left == [0]
        np.testing.assert_array_equal(ends.mine.pages[:PAGES], ends.owner.pages[:PAGES])
    else:
        assert isinstance(result.error, TransferFailed) and "altered" in result.error.message


def test_a_peer_that_falls_silent_costs_the_copy_and_no_more(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job fails when it is late, one that is cancelled ends at once, and nothing writes any more."""
    monkeypatch.setattr(tcp_reads, "COPY_S", 1.0)
    monkeypatch.setattr(tcp_reads, "LOOK_S", 0.05)
    silent, let_go = threading.Event(), threading.Event()

    def hush(number: int, data: bytes) -> bytes:
        if silent.is_set() and len(data) > 16:
            let_go.wait(20)
        return data

    with spoiled(ends, hush) as source:
        ends.backend.start(source, job((1,), (1,)))
        assert wait_for(ends.backend.poll, 1)[0].ok
        silent.set()
        late, given_up = job(WHOLE, WHOLE, number=1), job(WHOLE, WHOLE, number=2)
        began = time.monotonic()
        for each in (late, given_up):
            ends.backend.start(source, each)
        time.sleep(0.1)
        ends.backend.cancel(given_up)
        first, second = wait_for(ends.backend.poll, 2)
        assert first.job is given_up
        assert isinstance(second.error, TransferFailed) and "longer than 1 s" in second.error.message
        assert time.monotonic() - began < 4
        ends.mine.pages[:] = 7
        let_go.set()
        time.sleep(0.2)
        assert (ends.mine.pages == 7).all()


def test_a_peer_that_sends_slowly_keeps_no_copy_beyond_its_time(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never falls silent for as long as a thread waits: some bytes always come."""
    monkeypatch.setattr(tcp_reads, "COPY_S", 0.3)

    def trickle(number: int, data: bytes) -> bytes:
        time.sleep(0.04 if len(data) > 500 else 0.0)
        return data

    with spoiled(ends, trickle) as source:
        began = time.monotonic()
        ends.backend.start(source, job(WHOLE, WHOLE))
        (result,) = wait_for(ends.backend.poll, 1)
    assert isinstance(result.error, TransferFailed) and "longer than" in result.error.message
    assert time.monotonic() < began + 1.5


def test_whoever_lacks_the_token_gets_nothing(ends: Ends) -> None:
    export = ends.owners.export()
    assert export is not None
    stranger = ends.backend.open(export | {"token": bytes(32)})
    ends.backend.start(stranger, job((1,), (1,)))
    (result,) = wait_for(ends.backend.poll, 1)
    assert isinstance(result.error, TransferFailed) and "cannot be read" in result.error.message
    assert not ends.mine.pages.any()


@pytest.mark.parametrize(
    "request_",
    [
        struct.pack("<IQII", 1, PAGE, 0, 10**6),
        struct.pack("<IQ", 0, PAGE),
        struct.pack("<IQ", 2**31, PAGE),
        struct.pack("<IQ", 1, 0),
        struct.pack("<IQ", 1, PAGE + 1),
    ],
)
def test_a_request_that_makes_no_sense_ends_its_connection(ends: Ends, request_: bytes) -> None:
    export = ends.owners.export()
    assert export is not None
    with socket.create_connection(("127.0.0.1", int(export["port"])), 5) as puller:
        puller.sendall(tcp_owner.HELLO.pack(tcp_owner.MAGIC, export["token"]))
        assert tcp_owner.AREA.unpack(tcp_owner.received(puller, 16)) == (PAGES + 1, PAGE)
        puller.sendall(request_)
        assert puller.recv(1) == b""
    ends.backend.start(ends.open(), job((1,), (1,)))
    assert wait_for(ends.backend.poll, 1)[0].ok, "it harmed others"


def _dialled(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 5)


def test_many_connections_are_bounded(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_owner, "MOST_CONNECTIONS", 2)
    monkeypatch.setattr(tcp_owner, "HELLO_S", 0.3)
    server = tcp_owner.PageServer(ends.owner, "127.0.0.1")
    hello = tcp_owner.HELLO.pack(tcp_owner.MAGIC, server.token)
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        links = [stack.enter_context(_dialled(server.port)) for _ in range(3)]
        for link in links[:2]:
            link.sendall(hello)
            assert len(tcp_owner.received(link, 16)) == 16
        links[2].sendall(hello)
        assert links[2].recv(1) == b"", "one more than there may be"
        idle = stack.enter_context(_dialled(server.port))
        assert idle.recv(1) == b"", "a connection that says nothing stays"


def test_those_who_only_connect_keep_nobody_out(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The eldest without a token has to go: a caller that shows it, and one that is being served, do not."""
    monkeypatch.setattr(tcp_owner, "MOST_STRANGERS", 3)
    export = ends.owners.export()
    assert export is not None
    port, source = int(export["port"]), ends.open()
    with contextlib.ExitStack() as stack:
        for pages in (1,), (2,):
            crowd = [stack.enter_context(_dialled(port)) for _ in range(5)]
            assert all(stranger.recv(1) == b"" for stranger in crowd[:2])
            ends.backend.start(source, job(pages, pages))
            assert wait_for(ends.backend.poll, 1)[0].ok


@pytest.mark.parametrize(
    ("of", "name", "error"),
    [
        (socket.socket, "accept", OSError(24, "Too many open files")),
        (threading.Thread, "start", RuntimeError("can't start new thread")),
    ],
)
def test_a_moment_without_room_is_over_with_it(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, of: type, name: str, error: Exception
) -> None:
    monkeypatch.setattr(tcp_owner, "AGAIN_S", 0.01)
    export = ends.owners.export()
    assert export is not None
    address = ("127.0.0.1", int(export["port"]))
    left, works = [3], getattr(of, name)

    def fails(self: object) -> object:
        if threading.current_thread().name != "tcp-listen" or not left[0]:
            return works(self)
        left[0] -= 1
        raise error

    socket.create_connection(address, 5).close()  # it accepts the patched way from the next one on
    monkeypatch.setattr(of, name, fails)
    for _ in range(5):
        socket.create_connection(address, 5).close()
    ends.backend.start(ends.open(), job((1,), (1,)))
    assert wait_for(ends.backend.poll, 1)[0].ok and not left[0]


@pytest.mark.parametrize(
    "fields", [{"port": b"0"}, {"port": b"x"}, {"host": b""}, {"pages": b"0"}, {"token": b"short"}]
)
def test_an_export_that_makes_no_sense_is_not_opened(ends: Ends, fields: dict[str, bytes]) -> None:
    export = ends.owners.export()
    assert export is not None
    with pytest.raises(ConfigError, match="is not a listener"):
        ends.backend.open(export | fields)
