"""Engines whose pages outlive them: what a store gives, loses or spoils changes no answer."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from loopback import Loopback, wait_all

from eyas.common.config import EngineConfig, GatewayConfig
from eyas.common.errors import ConfigError, TransferFailed
from eyas.common.page_names import PageShape, named, salt_of
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.configuration import serve_config
from eyas.engine.ipc.messages import HostCache
from eyas.engine.kv import cold_tier
from eyas.engine.kv.cold_tier import NO_PACE, READERS, ColdTier
from eyas.engine.kv.host_tier import HostTier
from eyas.engine.kv.stores.disk import DiskStore
from eyas.engine.kv.stores.shared import SharedStore
from eyas.engine.kv.stores.store import Parts
from eyas.engine.loop import engine as engine_module
from eyas.engine.loop.engine import Engine
from eyas.engine.scheduling import host_loads
from tests.rpc.redis_server import RedisServer
from tests.unit.command_line import parse

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [tuple((7 * i * i + 11 * k) % 4000 + 9 for i in range(150 + k)) for k in range(3)]
Answers = list[list[int]]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """Of one that would rather load than compute, however fast it computes."""
    monkeypatch.setattr(host_loads, "LEAST_TOKENS", 32)
    monkeypatch.setattr(ColdTier, "_is_quick", lambda tier, store: True)
    monkeypatch.setattr(HostTier, "load_s", lambda tier, pages: 0.0)
    return EngineConfig(
        draft=None, num_pages=64, max_running=2, chunk_tokens=64, pool_dir=str(tmp_path), worker="alone"
    )


def on_disk(config: EngineConfig, folder: Path) -> EngineConfig:
    return replace(config, host_cache_gb=0.05, disk_cache_dir=str(folder / "pages"))


def life(
    config: EngineConfig, prompts: list[tuple[int, ...]] = PROMPTS, salt: str = ""
) -> tuple[Answers, int, HostCache]:
    """A worker's: its answers, the prompt tokens that it did not compute, its totals once all is stored."""
    cluster = Loopback(config)
    engine = cluster.workers["alone"].engine
    assert isinstance(engine, Engine)
    try:
        wait(lambda: config.host_cache_gb == 0 or engine._scheduler.host.tier._known > 0)
        params = SamplingParams(temperature=0.7, seed=3, max_tokens=4, ignore_eos=True)
        results = []
        for i, prompt in enumerate(prompts):
            request = GenerationRequest(f"{i}", prompt, params, salt=salt_of(salt))
            results.append(cluster.submit(request, split=False))
            wait_all(results, 60)
        cached = sum(entry.timings.cached_tokens for r in results for entry in r.entries[:1] if entry.timings)
        host = engine._scheduler.host
        if host is not None:
            settle(engine)
        counts = HostCache() if host is None else host.counts
        pool = engine._scheduler.pool
        assert pool.used == 0 and pool.free + engine._scheduler.cache.cached_pages == pool.num_pages
        if host is not None:
            assert len(host.tier._pages) + host.tier.free == host.tier._known
            assert not any(page.copies for page in host.tier._pages.values())
    finally:
        cluster.close()
    return [r.tokens[0] for r in results], cached, counts


def test_a_new_worker_goes_on_with_what_one_before_it_left(config: EngineConfig, tmp_path: Path) -> None:
    plain, none, _ = life(config)
    config = on_disk(config, tmp_path)
    first, cold, stored = life(config)
    again, warm, counts = life(config)
    assert first == again == plain and none == cold == 0
    assert stored.store_bytes_out > 0 and stored.store_tokens == 0
    assert counts.store_tokens == warm == sum(len(prompt) // 16 * 16 for prompt in PROMPTS)
    _, nothing, _ = life(replace(config, page_size=8, num_pages=128))
    assert nothing == 0, "pages of another kind were taken"


def settle(engine: Engine) -> None:
    """Waits until all idle pages are stored."""
    host, cache = engine._scheduler.host, engine._scheduler.cache
    assert host is not None
    wait(lambda: not host.copying and host.tier._seen == cache.turnover)


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not until():
        assert time.monotonic() < deadline, "it does not come to rest"
        time.sleep(0.01)


def spoiled(folder: Path, change: Callable[[Path], None]) -> int:
    files = [path for path in (folder / "pages").rglob("*") if path.is_file()]
    for path in files:
        change(path)
    return len(files)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        flip,
        pytest.param(Path.unlink, marks=pytest.mark.slow),
        pytest.param(lambda path: path.write_bytes(b""), marks=pytest.mark.slow),
    ],
    ids=["bit", "lost", "empty"],
)
def test_what_a_disk_spoils_or_loses_is_computed(
    config: EngineConfig, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    config = on_disk(config, tmp_path)
    plain, _, _ = life(config)
    assert spoiled(tmp_path, change) > 20
    again, cached, counts = life(config)
    assert again == plain and cached == counts.store_tokens == 0 and counts.store_misses > 0


class Slow(DiskStore):
    """Takes a hundred times as long as computing a page does."""

    page_s = 5e-4
    reads = 0

    def get(self, key: bytes, parts: object) -> bool:
        Slow.reads += 1
        time.sleep(100 * self.page_s)
        return super().get(key, parts)


def test_pages_come_back_only_where_computing_takes_longer(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One text is lost to finding out, and one more whenever that was long ago."""
    monkeypatch.undo()
    monkeypatch.setattr(host_loads, "LEAST_TOKENS", 32)
    monkeypatch.setattr("eyas.engine.loading.host_cache.DiskStore", Slow)
    tier = cold_tier.ColdTier.__init__
    monkeypatch.setattr(ColdTier, "__init__", lambda self, *given: tier(self, *given[:-1], Slow.page_s))
    config = on_disk(config, tmp_path)
    plain, _, _ = life(config)
    for again_s, least, most, slow in ((30.0, 8, 11, 2), (0.0, 20, 30, 0)):
        monkeypatch.setattr(cold_tier, "TRY_S", again_s)
        Slow.reads = 0
        again, _, counts = life(config)
        assert again == plain and least <= Slow.reads <= most and counts.store_slow == slow


def test_a_stores_pace_is_that_of_its_newest_reads() -> None:
    pace = NO_PACE.after(4.0, 0.0)
    assert pace.page_s == 4.0 / READERS and pace.reads == 1
    assert pace.after(8.0, 1.0).page_s == pytest.approx((0.8 * 4.0 + 0.2 * 8.0) / READERS)
    assert pace.after(8.0, 31.0).page_s == 8.0 / READERS, "what was long ago still counts"


def test_pages_come_back_while_their_sequence_is_in_the_queue(config: EngineConfig, tmp_path: Path) -> None:
    config = replace(on_disk(config, tmp_path), max_running=1)
    life(config, PROMPTS[:1])
    cluster = Loopback(config)
    try:
        host = cluster.workers["alone"].engine._scheduler.host
        wait(lambda: host.tier._known > 0)
        long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        first = cluster.submit(GenerationRequest("first", PROMPTS[1][:40], long), split=False)
        params = SamplingParams(temperature=0.7, seed=3, max_tokens=4, ignore_eos=True)
        second = cluster.submit(GenerationRequest("second", PROMPTS[0], params), split=False)
        wait(lambda: host.cold.counts.hits == 9)
        assert not first.done.is_set(), "they came when it was its turn"
        wait_all([first, second], 60)
        assert second.entries[0].timings.cached_tokens == 9 * 16
    finally:
        cluster.close()


class Lazy(DiskStore):
    """Takes its time, in which the next request comes."""

    def get(self, key: bytes, parts: object) -> bool:
        time.sleep(0.05)
        return super().get(key, parts)


def test_a_text_that_many_begin_with_is_read_once_and_computed_by_none(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart, of all conversations of one system prompt."""
    config = replace(on_disk(config, tmp_path), max_running=4)
    prompts = [PROMPTS[0][:96] + PROMPTS[i][96:] for i in range(3)]
    plain, _, _ = life(config, prompts)
    monkeypatch.setattr("eyas.engine.loading.host_cache.DiskStore", Lazy)
    monkeypatch.setattr(cold_tier, "BATCH", 4)
    cluster = Loopback(config)
    try:
        host = cluster.workers["alone"].engine._scheduler.host
        wait(lambda: host.tier._known > 0)
        params = SamplingParams(temperature=0.7, seed=3, max_tokens=4, ignore_eos=True)
        answers = [
            cluster.submit(GenerationRequest(f"{i}", prompt, params), split=False)
            for i, prompt in enumerate(prompts)
        ]
        wait_all(answers, 60)
        assert [answer.tokens[0] for answer in answers] == plain
        assert [answer.entries[0].timings.cached_tokens for answer in answers] == [9 * 16] * 3
        assert host.cold.counts.hits == 6 + 3 * 3 and host.cold.counts.misses == 0
    finally:
        cluster.close()


def test_a_gap_ends_what_comes_back(config: EngineConfig, tmp_path: Path) -> None:
    """The sixth page is lost: the five before it come back."""
    config = on_disk(config, tmp_path)
    plain, _, _ = life(config, PROMPTS[:1])
    name = b""
    for key in PageShape(16).keys(PROMPTS[0], 6 * 16):
        name = named(name, key)
    (lost,) = (tmp_path / "pages").rglob(name.hex())
    lost.unlink()
    again, cached, _ = life(config, PROMPTS[:1])
    assert again == plain and cached == 5 * 16


class Gap:
    """A store without its second page, which gives the third one late."""

    name = "gap"

    def __init__(self) -> None:
        self.reading = threading.Semaphore(0)
        self.over = threading.Event()
        self.written = False

    def get(self, key: bytes, parts: object) -> bool:
        if key == b"2":
            self.reading.release()
            self.over.wait(10)
            self.written = True
        if key == b"1":
            assert self.reading.acquire(timeout=10)
        return key != b"1"

    def close(self) -> None:
        self.over.set()


def test_nothing_writes_to_slots_behind_a_gap_once_they_are_free() -> None:
    store, free = Gap(), []
    tier = SimpleNamespace(memory=SimpleNamespace(page_bytes=1), on_saved=None)
    tier.find = lambda names: []
    tier.reserve = lambda names: list(range(len(names)))
    tier.settle = lambda names, count: free.append((count, store.written))
    cold = ColdTier(tier, lambda slot: [], [store], 1.0)  # type: ignore[arg-type, list-item]
    cold.fetch(iter([b"0", b"1", b"2"]), time.monotonic() + 20, lambda: None)
    threading.Timer(0.2, store.over.set).start()
    while cold.busy:
        cold.poll()
    assert free == [(1, True)], "a read went on into a slot that was given to another page"
    assert cold.close(time.monotonic() + 5)


def test_pages_come_back_under_their_salt_alone(config: EngineConfig, tmp_path: Path) -> None:
    config = on_disk(config, tmp_path)
    plain, _, stored = life(config, PROMPTS[:1], "a")
    assert stored.store_bytes_out > 0
    for salt, expected in (("b", 0), ("", 0), ("a", 9 * 16)):
        again, cached, _ = life(config, PROMPTS[:1], salt)
        assert again == plain and cached == expected


class Broken(DiskStore):
    """Fails every call."""

    calls = 0

    def put(self, key: bytes, parts: object) -> int:
        raise TransferFailed("this store takes nothing")

    def get(self, key: bytes, parts: object) -> bool:
        Broken.calls += 1
        raise TransferFailed("this store gives nothing")


class Full(DiskStore):
    """Takes nothing."""

    def put(self, key: bytes, parts: object) -> int:
        raise TransferFailed("this store is full")


def test_a_store_that_is_full_still_gives_and_is_told_of(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_disk(config, tmp_path)
    plain, _, _ = life(config, PROMPTS[:1])
    monkeypatch.setattr("eyas.engine.loading.host_cache.DiskStore", Full)
    answers, cached, counts = life(config, [PROMPTS[1], PROMPTS[0]])
    assert answers[1:] == plain and cached == 9 * 16, "its reads rested with its writes"
    assert counts.store_failures > 0 and counts.trouble == "this store is full"


def test_an_outage_of_a_store_is_logged_once(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    puts, put = itertools.count(), DiskStore.put

    def full_at_first(self: DiskStore, key: bytes, parts: Parts) -> int:
        if next(puts) < 2:
            raise TransferFailed("this store is full")
        return put(self, key, parts)

    monkeypatch.setattr(DiskStore, "put", full_at_first)
    monkeypatch.setattr(cold_tier, "REST_S", 0.0)
    _, _, counts = life(on_disk(config, tmp_path), PROMPTS)
    assert counts.store_failures == 2
    said = [line for line in caplog.messages if "disk" in line or "store" in line]
    assert said == ["this store is full; its writes are tried every 0 s", "writes of the disk go on"]


class Stuck(DiskStore):
    """Answers after the test only."""

    over = threading.Event()

    def get(self, key: bytes, parts: object) -> bool:
        self.over.wait(30)
        return False


@pytest.mark.slow
@pytest.mark.parametrize("store", [Broken, Stuck])
def test_a_store_that_fails_or_hangs_costs_time_and_no_answer(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: type[DiskStore]
) -> None:
    monkeypatch.setattr(host_loads, "LOAD_TIMEOUT_S", 0.3)
    plain, _, _ = life(config)
    monkeypatch.setattr("eyas.engine.loading.host_cache.DiskStore", store)
    monkeypatch.setattr(cold_tier, "REST_S", 0.0 if store is Stuck else 60.0)
    Stuck.over.clear()
    timer = threading.Timer(4.0, Stuck.over.set)
    timer.start()
    answers, cached, counts = life(on_disk(config, tmp_path))
    timer.cancel()
    Stuck.over.set()
    assert answers == plain and cached == 0
    if store is Broken:
        assert counts.store_failures > 0 and Broken.calls <= READERS, (
            "a store that failed was asked on and on"
        )


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    started = RedisServer()
    asyncio.run(started.start())
    yield started
    started.kill()


def test_workers_share_a_store(config: EngineConfig, tmp_path: Path, server: RedisServer) -> None:
    config = replace(config, host_cache_gb=0.05, kv_store=server.url)
    plain, _, stored = life(config)
    assert stored.store_bytes_out > 0
    again, warm, _ = life(config)
    assert again == plain and warm == sum(len(prompt) // 16 * 16 for prompt in PROMPTS)


@pytest.mark.slow
def test_the_nearest_store_is_asked_first(config: EngineConfig, tmp_path: Path, server: RedisServer) -> None:
    """And gets what only a farther one has."""
    config = replace(on_disk(config, tmp_path), kv_store=server.url)
    life(config)
    gets: list[bytes] = []
    get = SharedStore.get
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedStore, "get", lambda self, key, parts: gets.append(key) or get(self, key, parts))
        _, warm, _ = life(config)
        assert warm > 0 and gets == []
        assert spoiled(tmp_path, Path.unlink) > 20
        _, warm, _ = life(config)
        assert warm > 0 and (count := len(gets)) > 20
        _, warm, _ = life(config)
        assert warm > 0 and len(gets) == count


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--disk-cache-dir pages", "--disk-cache-dir: KV pages go there through the host's memory"),
        ("--kv-store redis://127.0.0.1:1/0", "--kv-store: KV pages go there through the host's memory"),
        ("--disk-cache-gb 1", "--disk-cache-gb: of no folder: give --disk-cache-dir"),
        ("--host-cache-gb 1 --disk-cache-dir a --disk-cache-gb 0", "--disk-cache-gb: 0 GiB hold no page"),
        ("--kv-store-ttl 60", "--kv-store-ttl: of no store: give --kv-store"),
        *(
            (f"--host-cache-gb 1 --kv-store {url}", "--kv-store: .* is no redis://HOST:PORT/DB")
            for url in (
                "http://a",
                "redis://",
                "redis://:1/0",
                "rediss://a:99999/0",
                "redis://a:b",
                "redis://a/b",
            )
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_flag(flags: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        serve_config(parse("serve", *flags.split()), GatewayConfig())
    serve_config(
        parse("serve", *"--host-cache-gb 1 --disk-cache-dir a --kv-store rediss://me:word@[::1]:7/3".split()),
        GatewayConfig(),
    )


def test_what_came_back_is_not_slept_over(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that does nothing else runs a sequence as soon as its pages are there."""
    config = on_disk(config, tmp_path)
    life(config, PROMPTS[:1])
    cluster = Loopback(config)
    engine = cluster.workers["alone"].engine
    assert isinstance(engine, Engine)
    try:
        wait(lambda: engine._scheduler.host.tier._known > 0)
        monkeypatch.setattr(engine_module, "IDLE_S", 5.0)
        began = time.monotonic()
        request = GenerationRequest("0", PROMPTS[0], SamplingParams(max_tokens=1, ignore_eos=True))
        result = cluster.submit(request, split=False)
        wait_all([result], 60)
        assert next(entry.timings.cached_tokens for entry in result.entries if entry.timings) > 0
        assert time.monotonic() - began < 4.0
    finally:
        cluster.close()
