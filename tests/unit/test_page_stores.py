"""Stores of pages: what comes back is what was stored under that key, or nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas.common.errors import ConfigError, TransferFailed
from eyas.engine.kv.stores import disk
from eyas.engine.kv.stores.disk import DiskStore
from eyas.engine.kv.stores.shared import SharedStore
from eyas.engine.kv.stores.store import SEAL_BYTES, PageStore
from tests.rpc.redis_server import RedisServer

SIZES = 300, 45  # bytes of a page in each of two pools
WHOLE = SEAL_BYTES + sum(SIZES)
KEYS = [bytes([i]) * 16 for i in range(8)]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    started = RedisServer()
    asyncio.run(started.start())
    yield started
    started.kill()


@pytest.fixture(params=["disk", "store"])
def store(request: pytest.FixtureRequest, tmp_path: Path, server: RedisServer) -> PageStore:
    if request.param == "disk":
        return DiskStore(tmp_path, "n", 1 << 20)
    return SharedStore(server.url, tmp_path.name, 60)


def page(key: bytes) -> list[memoryview]:
    dice = random.Random(key)
    return [memoryview(bytearray(dice.randbytes(size))) for size in SIZES]


def room() -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in SIZES]


def got(store: PageStore, key: bytes) -> list[memoryview] | None:
    parts = room()
    return parts if store.get(key, parts) else None


def test_a_page_comes_back_and_others_are_not_there(store: PageStore) -> None:
    assert got(store, KEYS[0]) is None
    assert store.put(KEYS[0], page(KEYS[0])) == WHOLE
    assert store.put(KEYS[0], page(KEYS[0])) == 0, "it was written twice"
    assert got(store, KEYS[0]) == page(KEYS[0])
    assert got(store, KEYS[1]) is None


def spoil(store: PageStore, how: str) -> None:
    """Changes what is stored under KEYS[0]."""
    store.put(KEYS[1], page(KEYS[1]))
    source = KEYS[1] if how == "another" else KEYS[0]
    if isinstance(store, SharedStore):
        value = bytearray(store._client.get(store._prefix + source))
    else:
        value = bytearray(store._path(source).read_bytes())
    value = value[:-1] if how == "short" else value
    value[-1] ^= how == "bit"
    if isinstance(store, SharedStore):
        store._client.set(store._prefix + KEYS[0], bytes(value))
    else:
        store._path(KEYS[0]).write_bytes(value)


@pytest.mark.parametrize("how", ["bit", "short", "another"])
def test_other_bytes_are_no_page(store: PageStore, how: str) -> None:
    store.put(KEYS[0], page(KEYS[0]))
    spoil(store, how)
    assert got(store, KEYS[0]) is None
    assert got(store, KEYS[1]) == page(KEYS[1])


def test_namespaces_share_nothing(tmp_path: Path, server: RedisServer) -> None:
    for a, b in (
        (DiskStore(tmp_path, "a", 1 << 20), DiskStore(tmp_path, "b", 1 << 20)),
        (SharedStore(server.url, "a", 60), SharedStore(server.url, "b", 60)),
    ):
        a.put(KEYS[0], page(KEYS[0]))
        assert got(b, KEYS[0]) is None and got(a, KEYS[0]) is not None


def test_a_disk_keeps_to_its_bytes_and_the_pages_used_last(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, "n", 3 * WHOLE)
    for key in KEYS[:3]:
        store.put(key, page(key))
    assert got(store, KEYS[0]) is not None
    store.put(KEYS[3], page(KEYS[3]))
    assert [got(store, key) is not None for key in KEYS[:4]] == [True, False, True, True]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) == 3 * WHOLE


def test_a_disk_is_found_again_and_shared(tmp_path: Path) -> None:
    first = DiskStore(tmp_path, "n", 3 * WHOLE)
    for i, key in enumerate(KEYS[:3]):
        first.put(key, page(key))
        os.utime(first._path(key), (1000 + i, 1000 + i))
    left = first.folder / f"1-2-3{disk.PARTIAL}"
    left.write_bytes(b"of a worker that was killed")
    os.utime(left, (1000, 1000))
    again = DiskStore(tmp_path, "n", 3 * WHOLE)
    assert not left.exists()
    again.put(KEYS[3], page(KEYS[3]))
    assert [got(again, key) is not None for key in KEYS[:4]] == [False, True, True, True]
    assert got(first, KEYS[3]) == page(KEYS[3]), "another worker's page is not found"
    first._next_look = 0.0
    first.put(KEYS[4], page(KEYS[4]))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) == 3 * WHOLE


def test_a_full_disk_takes_no_page_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path, "n", 1 << 20)

    def full(fd: int, buffers: object) -> int:
        raise OSError(28, "No space left on device")

    for writev, says in ((full, "No space left"), (lambda fd, buffers: 10, "is full")):
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", writev)
            with pytest.raises(TransferFailed, match=says):
                store.put(KEYS[0], page(KEYS[0]))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert store.put(KEYS[0], page(KEYS[0])) == WHOLE


def test_on_a_disk_smaller_than_its_limit_old_pages_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writev = DiskStore(tmp_path, "n", 1 << 20), os.writev

    def small(fd: int, buffers: list[memoryview]) -> int:
        if sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) + WHOLE > 3 * WHOLE:
            raise OSError(errno.ENOSPC, "No space left on device")
        return writev(fd, buffers)

    monkeypatch.setattr(os, "writev", small)
    for key in KEYS[:3]:
        store.put(key, page(key))
    with pytest.raises(TransferFailed, match="No space left"):
        store.put(KEYS[3], page(KEYS[3]))
    for key in KEYS[3:6]:
        assert store.put(key, page(key)) == WHOLE
    assert [got(store, key) is not None for key in KEYS[:6]] == [False] * 3 + [True] * 3
    monkeypatch.setattr(os, "writev", writev)  # the disk has room again
    store._next_look = 0.0
    store.put(KEYS[6], page(KEYS[6]))
    assert all(got(store, key) for key in KEYS[3:7])


def test_a_store_that_is_full_says_so_and_still_gives(server: RedisServer) -> None:
    store = SharedStore(server.url, "full", 60)
    store.put(KEYS[0], page(KEYS[0]))
    store._client.config_set("maxmemory", 1)
    try:
        with pytest.raises(TransferFailed, match="the store takes no page: .*memory"):
            store.put(KEYS[1], page(KEYS[1]))
        assert got(store, KEYS[0]) == page(KEYS[0])
    finally:
        store._client.config_set("maxmemory", 0)


def test_a_page_lives_as_long_as_it_is_told_from_its_last_writing(server: RedisServer) -> None:
    store, longer = SharedStore(server.url, "ttl", 60), SharedStore(server.url, "ttl", 600)
    store.put(KEYS[0], page(KEYS[0]))
    assert 50 < store._client.ttl(store._prefix + KEYS[0]) <= 60
    longer.put(KEYS[0], page(KEYS[0]))
    assert 590 < store._client.ttl(store._prefix + KEYS[0]) <= 600


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written") as refused:
        DiskStore(tmp_path / "file", "n", 1)
    assert refused.value.param == "disk-cache-dir"


def test_a_store_that_is_down_says_so() -> None:
    store = SharedStore("redis://127.0.0.1:1/0", "n", 60)
    with pytest.raises(TransferFailed, match="the store takes no page"):
        store.put(KEYS[0], page(KEYS[0]))
    with pytest.raises(TransferFailed, match="the store gives no page"):
        got(store, KEYS[0])
    store.close()


def test_a_folder_that_is_removed_comes_back(tmp_path: Path) -> None:
    """And no other user of the machine reads it."""
    store = DiskStore(tmp_path, "n", 1 << 20)
    shutil.rmtree(store.folder)
    assert store.put(KEYS[0], page(KEYS[0])) == WHOLE
    assert got(store, KEYS[0]) == page(KEYS[0])
    assert store.folder.stat().st_mode & 0o777 == 0o700


def test_a_look_at_a_large_folder_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers go on meanwhile, and the next look is the later the longer one takes."""
    store = DiskStore(tmp_path, "n", 1 << 20)
    store.put(KEYS[0], page(KEYS[0]))
    looks, on = threading.Event(), threading.Event()
    monkeypatch.setattr(time, "sleep", lambda s: (looks.set(), on.wait(10)))
    store._next_look = 0.0
    writer = threading.Thread(target=store.put, args=(KEYS[1], page(KEYS[1])))
    writer.start()
    assert looks.wait(10) and got(store, KEYS[0]) == page(KEYS[0])
    store._look()  # which another thread does already
    monkeypatch.setattr(disk, "LOOK_SHARE", 1e-9)
    on.set()
    writer.join()
    assert store._next_look > time.monotonic() + 1000 and got(store, KEYS[1]) == page(KEYS[1])
