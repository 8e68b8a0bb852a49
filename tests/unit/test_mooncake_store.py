"""Mooncake's store: by a library of the same calls, and by its own processes where they are installed."""

from __future__ import annotations

import importlib.util
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eyas.common.cluster.listening import free_ports
from eyas.common.cluster.names import mooncake_master
from eyas.common.errors import ConfigError, TransferFailed
from eyas.engine.kv.stores import mooncake
from eyas.engine.kv.stores.mooncake import MooncakeStore
from eyas.engine.kv.stores.store import SEAL_BYTES

SIZES = 300, 45  # bytes of a page in each of two pools
WHOLE = SEAL_BYTES + sum(SIZES)
KEYS = [bytes([i]) * 16 for i in range(8)]
START_S = 20.0


def page(key: bytes) -> list[memoryview]:
    dice = random.Random(key)
    return [memoryview(bytearray(dice.randbytes(size))) for size in SIZES]


def got(store: MooncakeStore, key: bytes) -> list[memoryview] | None:
    parts = [memoryview(bytearray(size)) for size in SIZES]
    return parts if store.get(key, parts) else None


class PaperMooncake:
    """What its client does, as far as it is called: `down`: the code of a master that does not answer.
    `gate`: until it is set, no client is made, and none hangs up.
    """

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.down = 0
        self.clients = self.closed = 0
        self.gate = threading.Event()
        self.gate.set()
        self.hangs = ""  # the call that does not return while the gate is shut
        self.stuck = 0  # calls that did not

    def setup(self, here: str, meta: str, segment: int, buffer: int, *rest: str) -> int:
        assert (meta, segment, rest[0], rest[1]) == ("P2PHANDSHAKE", 0, "tcp", "")
        self.clients += 1
        assert self.gate.wait(20.0)
        return self.down

    def _came(self, call: str) -> None:
        if call == self.hangs and not self.gate.is_set():
            self.stuck += 1
            assert self.gate.wait(20.0)

    def is_exist(self, name: str) -> int:
        self._came("is_exist")
        return self.down or int(name in self.pages)

    def put_parts(self, name: str, *parts: bytes) -> int:
        self._came("put_parts")
        self.pages[name] = b"".join(parts)
        return self.down

    def get_buffer(self, name: str) -> memoryview | None:
        self._came("get_buffer")
        return None if self.down or name not in self.pages else memoryview(self.pages[name])

    def close(self) -> None:
        assert self.gate.wait(20.0)
        self.closed += 1


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MooncakeStore, PaperMooncake]]:
    library, client = types.ModuleType("mooncake.store"), PaperMooncake()
    library.MooncakeDistributedStore = lambda: client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", library)
    with socket.create_server(("127.0.0.1", 0)) as master:
        yield MooncakeStore(master.getsockname(), "n"), client


def test_a_page_comes_back_and_other_bytes_are_none(paper: tuple[MooncakeStore, PaperMooncake]) -> None:
    store, client = paper
    assert got(store, KEYS[0]) is None
    assert store.put(KEYS[0], page(KEYS[0])) == WHOLE and store.put(KEYS[0], page(KEYS[0])) == 0
    assert got(store, KEYS[0]) == page(KEYS[0])
    store.put(KEYS[1], page(KEYS[1]))
    first, second = client.pages
    for spoiled in (client.pages[second], client.pages[first][:-1], b"", client.pages[first][:-1] + b"x"):
        client.pages[first], kept = spoiled, client.pages[first]
        assert got(store, KEYS[0]) is None
        client.pages[first] = kept
    assert client.clients == 1 and got(store, KEYS[0]) == page(KEYS[0])


def test_a_master_that_does_not_answer_is_dialled_anew(paper: tuple[MooncakeStore, PaperMooncake]) -> None:
    store, client = paper
    store.put(KEYS[0], page(KEYS[0]))
    client.down = -900
    for says in ("does not answer: code -900", "takes no client: code -900"):
        with pytest.raises(TransferFailed, match=says):
            store.put(KEYS[1], page(KEYS[1]))
    with pytest.raises(TransferFailed, match="takes no client"):
        got(store, KEYS[0])
    client.down = 0
    assert got(store, KEYS[0]) == page(KEYS[0]) and client.clients == 4


def test_a_master_that_is_not_there_costs_no_minute(paper: tuple[MooncakeStore, PaperMooncake]) -> None:
    _, client = paper
    store, began = MooncakeStore(("127.0.0.1", next(free_ports())), "n"), time.monotonic()
    with pytest.raises(TransferFailed, match="the store is not reached at 127.0.0.1:.*refused"):
        got(store, KEYS[0])
    assert time.monotonic() < began + 2 and not client.clients


@pytest.mark.parametrize("hangs", ["is_exist", "put_parts", "get_buffer"])
def test_a_call_that_does_not_return_is_given_up(
    paper: tuple[MooncakeStore, PaperMooncake], monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    """As of a master that is stopped: the page is none, the next call dials, and no thread is lost twice."""
    monkeypatch.setattr(mooncake, "ANSWER_S", 0.05)
    monkeypatch.setattr(mooncake, "DIAL_S", 0.05)
    store, client = paper
    store.put(KEYS[0], page(KEYS[0]))
    client.hangs = hangs
    client.gate.clear()
    whole, began = page(KEYS[1]), time.monotonic()
    for error in ("has not answered within 0.05 s", "has taken no client within 0.05 s"):
        with pytest.raises(TransferFailed, match=error):
            if hangs == "get_buffer":
                got(store, KEYS[0])
            else:
                store.put(KEYS[1], whole)
    assert time.monotonic() < began + 2.0 and client.stuck == 1
    for part in whole:
        part[:] = bytes(len(part))  # as a slot that has another page by now
    client.gate.set()
    monkeypatch.setattr(mooncake, "DIAL_S", 5.0)
    _until(lambda: hangs != "put_parts" or len(client.pages) == 2)
    assert got(store, KEYS[0]) == page(KEYS[0]) and got(store, KEYS[1]) is None


def test_a_client_that_takes_its_time_holds_up_no_call_and_no_end(
    paper: tuple[MooncakeStore, PaperMooncake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own tries go on for a minute and a half, and nothing stops them."""
    monkeypatch.setattr(mooncake, "DIAL_S", 0.05)
    store, client = paper
    client.gate.clear()
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(TransferFailed, match="has taken no client within 0.05 s"):
            got(store, KEYS[0])
    assert client.clients == 1 and time.monotonic() < began + 2.0, "one is made, for all calls"
    store.close()
    assert time.monotonic() < began + 2.0 and not client.closed
    client.gate.set()
    _until(lambda: client.closed == 1)


def test_a_client_that_comes_late_is_taken(
    paper: tuple[MooncakeStore, PaperMooncake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "DIAL_S", 0.05)
    store, client = paper
    client.gate.clear()
    with pytest.raises(TransferFailed):
        got(store, KEYS[0])
    client.gate.set()
    monkeypatch.setattr(mooncake, "DIAL_S", 5.0)
    assert store.put(KEYS[0], page(KEYS[0])) == WHOLE and client.clients == 1


def test_a_client_that_does_not_hang_up_delays_the_end_by_its_bound(
    paper: tuple[MooncakeStore, PaperMooncake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "CLOSE_S", 0.05)
    store, client = paper
    store.put(KEYS[0], page(KEYS[0]))
    client.gate.clear()
    began = time.monotonic()
    store.close()
    assert time.monotonic() < began + 2.0 and not client.closed
    client.gate.set()
    _until(lambda: client.closed == 1)


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_without_its_library_the_flag_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match="--kv-store: Mooncake's library cannot be loaded"):
        MooncakeStore(("127.0.0.1", 1), "n")


@pytest.mark.parametrize(
    ("text", "master"),
    [
        ("mooncake://host:5", ("host", 5)),
        ("mooncake://[::1]:5/", ("::1", 5)),
        ("mooncake://host", None),
        ("mooncake://host:x", None),
        ("mooncake://host:5/7", None),
        ("mooncake://host:5?a=b", None),
        ("redis://host:5", None),
    ],
)
def test_addresses(text: str, master: tuple[str, int] | None) -> None:
    assert mooncake_master(text) == master


# --- its own processes ---------------------------------------------------------------------------------

FOLDER = Path(spec.origin).parent if (spec := importlib.util.find_spec("mooncake")) and spec.origin else None


def reached(port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "it does not start"
            time.sleep(0.05)


@pytest.mark.skipif(FOLDER is None, reason="Mooncake is not installed here")
def test_its_own_master_and_memory(tmp_path: Path) -> None:
    assert FOLDER is not None
    ports = free_ports()
    port, metrics, memory = (next(ports) for _ in range(3))
    log = (tmp_path / "log").open("w")
    master_command = [str(FOLDER / "mooncake_master"), f"--port={port}", f"--metrics_port={metrics}"]
    memory_command = [str(FOLDER / "mooncake_client"), "--host=127.0.0.1", f"--port={memory}"]
    memory_command += ["--global_segment_size=256 MB", f"--master_server_address=127.0.0.1:{port}"]
    memory_command += ["--metadata_server=P2PHANDSHAKE", "--protocol=tcp"]
    master = subprocess.Popen(master_command, stdout=log, stderr=log)
    owner: subprocess.Popen[bytes] | None = None
    store = MooncakeStore(("127.0.0.1", port), tmp_path.name)
    try:
        reached(port)
        with pytest.raises(TransferFailed, match="the store takes no page: code"):
            store.put(KEYS[0], page(KEYS[0]))  # there is no memory yet
        owner = subprocess.Popen(memory_command, stdout=log, stderr=log)
        reached(memory)
        assert store.put(KEYS[0], page(KEYS[0])) == WHOLE and store.put(KEYS[0], page(KEYS[0])) == 0
        assert got(store, KEYS[0]) == page(KEYS[0]) and got(store, KEYS[1]) is None
        owner.kill()
        with pytest.raises(TransferFailed):
            got(store, KEYS[0])
        master.kill()
        with pytest.raises(TransferFailed):
            got(store, KEYS[0])
    finally:
        store.close()
        for process in (master, owner):
            if process is not None:
                process.kill()
                process.wait()
        shutil.rmtree(tmp_path, ignore_errors=True)
