"""Pages behind a layer's window go: no token changes, none that is still read goes, and all come back.

Every page that goes is filled with NaN, which any row that reads it would show.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from families import VOCAB, WINDOW, write_family
from loopback import Loopback, Worker, split_configs, wait_all

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice
from eyas.engine.batch.sequence import Sequence
from eyas.engine.kv.groups import GRAIN, KvGroup, handle_pages, kv_groups, page_layers
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.pool import KvPool
from eyas.engine.kv.prefix_cache import PrefixCache
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.scheduling.limits import BatchLimits
from eyas.engine.scheduling.page_tables import PageTables, most_rows
from tests.window_pages import SHAPES, in_use

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = 16
NEW = 24
LENGTHS = (5, 120, 300)

Tokens = list[dict[int, list[int]]]


def requests(lengths: tuple[int, ...] = LENGTHS, new: int = NEW, choices: int = 1) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(5)
    asked = [tuple(torch.randint(3, VOCAB, (n,), generator=generator).tolist()) for n in lengths]
    seeds = [SamplingParams(temperature=0.0, max_tokens=new), SamplingParams(seed=3, max_tokens=new)]
    every = tuple(RequestChoice(i) for i in range(choices))
    return [GenerationRequest(f"r{i}", ids, seeds[i % 2], every) for i, ids in enumerate(asked)]


class Poison:
    """Fills every page of an engine that goes with NaN, also one that comes again at its table's end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._memory: dict[PagePool, KvPool] = {}
        self.slid = 0  # pages that windows left behind
        released, slide = PagePool._release, PageTables._slide

        def release(pool: PagePool, page: int) -> None:
            self._fill(pool, [page])
            released(pool, page)

        def slid(tables: PageTables, seq: Sequence) -> None:
            before = [(table, table.gone) for _, table in tables._windows(seq)]
            slide(tables, seq)
            for table, gone in before:
                behind = table.pages[gone : table.gone]
                self.slid += len(behind)
                self._fill(tables._pool, [page for page in behind if page in table.pages[table.gone :]])

        monkeypatch.setattr(PagePool, "_release", release)
        monkeypatch.setattr(PageTables, "_slide", slid)

    def watch(self, cluster: Loopback) -> None:
        for worker in cluster.workers.values():
            parts = worker.engine._parts
            self._memory[parts.scheduler.pool] = parts.pools[0]

    def _fill(self, pool: PagePool, pages: list[int]) -> None:
        memory = self._memory.get(pool)
        if pages and memory is not None and memory.pages.numel():  # else the engine has ended
            memory.pages[pages] = math.nan


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Poison:
    return Poison(monkeypatch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made: dict[str, Path] = {}
    for name in ("gpt_oss", "mistral"):
        made[name] = tmp_path_factory.mktemp(name)
        write_family(made[name] / "model", name)
    return made


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    plain = EngineConfig(
        model=str(folder / "model"),
        draft=None,
        num_pages=64,
        page_size=PAGE,
        chunk_tokens=48,
        pool_dir=str(folder),
        worker="unified",
    )
    return replace(plain, **changes)


def answers(asked: list[GenerationRequest], *configs: EngineConfig, poison: Poison | None = None) -> Tokens:
    """What a cluster gives; all its pages are back at the end."""
    cluster = Loopback(*configs)
    if poison is not None:
        poison.watch(cluster)
    try:
        results = [cluster.submit(request, split=len(configs) > 1) for request in asked]
        wait_all(results, 60)
    finally:
        cluster.close()
    for worker in cluster.workers.values():
        ended(worker)
    return [result.tokens for result in results]


def ended(worker: Worker) -> None:
    """What a worker's pool is like behind its last request: nobody has a page but for a lease that runs."""
    parts = worker.engine._parts
    assert parts.scheduler.pool.used == len(parts.leases.pages())
    if not parts.scheduler.pool.used:
        parts.scheduler.flush()
        assert parts.scheduler.pool.free == parts.scheduler.pool.num_pages
        assert not parts.scheduler.cache.cached_pages


@pytest.fixture(scope="module")
def whole(folders: dict[str, Path]) -> dict[str, Tokens]:
    """What engines give that keep all pages."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EngineSpec, "windows_ignored", "so that all stay")
        return {name: answers(requests(), config_of(folder)) for name, folder in folders.items()}


CASES: dict[str, dict[str, Any]] = {
    "together": {},
    "small chunks": {"chunk_tokens": 16},
    "lookup": {"speculation": SpeculationConfig(steps=3, draft_tokens=4)},
}


@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param("gpt_oss", "together", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "small chunks", marks=pytest.mark.slow),
        ("gpt_oss", "lookup"),
        ("mistral", "together"),
        pytest.param("mistral", "lookup", marks=pytest.mark.slow),
    ],
)
def test_no_token_changes(
    family: str, case: str, folders: dict[str, Path], whole: dict[str, Tokens], poison: Poison
) -> None:
    config = config_of(folders[family], **CASES[case])
    assert EngineSpec.of(config).windowed
    assert answers(requests(), config, poison=poison) == whole[family]
    assert poison.slid > 12


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("mistral", marks=pytest.mark.slow)])
def test_pages_that_travel_are_those_in_the_window(
    family: str, folders: dict[str, Path], whole: dict[str, Tokens], poison: Poison
) -> None:
    configs = split_configs(config_of(folders[family]))[:2]
    assert answers(requests(), *configs, poison=poison) == whole[family]


@pytest.mark.slow
def test_sequences_that_are_preempted_begin_again(folders: dict[str, Path], poison: Poison) -> None:
    """Short prompts with long answers, whose pages grow until there are none."""
    asked = requests((20, 21, 22), new=90)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EngineSpec, "windows_ignored", "so that all stay")
        expected = answers(asked, config_of(folders["gpt_oss"]))
    cluster = Loopback(config_of(folders["gpt_oss"], num_pages=15))
    poison.watch(cluster)
    try:
        results = [cluster.submit(request, split=False) for request in asked]
        wait_all(results, 60)
    finally:
        cluster.close()
    assert [result.tokens for result in results] == expected
    assert cluster.workers["unified"].engine._parts.scheduler.preemptions > 0


def test_a_prefix_is_found_again_by_its_end(folders: dict[str, Path], poison: Poison) -> None:
    """A prompt that goes on where another, or its answer, has ended; choices that share a prompt."""
    (first,) = requests((200,), new=8, choices=2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EngineSpec, "windows_ignored", "so that all stay")
        expected = _in_turn(config_of(folders["gpt_oss"]), first, None)
    assert _in_turn(config_of(folders["gpt_oss"]), first, poison) == expected


def test_a_beginning_that_prompts_share_is_found_again(folders: dict[str, Path], poison: Poison) -> None:
    """In the middle of a prompt of many chunks, whose windows have moved on."""
    first, second = requests((300, 300), new=4)
    second = msgspec.structs.replace(second, prompt_ids=first.prompt_ids[:205] + second.prompt_ids[205:])
    alone = answers([second], config_of(folders["gpt_oss"]), poison=poison)
    cluster = Loopback(config_of(folders["gpt_oss"]))
    poison.watch(cluster)
    try:
        for request in (first, second):
            result = cluster.submit(request, split=False)
            wait_all([result], 60)
        cached = next(entry.timings for entry in result.entries if entry.timings).cached_tokens
    finally:
        cluster.close()
    assert result.tokens == alone[0] and cached == 192


def _in_turn(config: EngineConfig, first: GenerationRequest, poison: Poison | None) -> list[Any]:
    cluster = Loopback(config)
    if poison is not None:
        poison.watch(cluster)
    try:
        found: list[Any] = []
        request = first
        for turn in range(2):
            result = cluster.submit(request, split=False)
            wait_all([result], 60)
            cached = next(entry.timings for entry in result.entries if entry.timings).cached_tokens
            found.append((result.tokens, cached))
            longer = (*request.prompt_ids, *result.tokens[0], 5, 6, 7)
            request = msgspec.structs.replace(request, id=f"turn {turn}", prompt_ids=longer)
    finally:
        cluster.close()
    ended(cluster.workers["unified"])
    assert found[-1][1] > 190, "nothing was found again"
    return found


@pytest.mark.parametrize("early", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_page_that_goes_too_early_is_noticed(
    early: int,
    folders: dict[str, Path],
    whole: dict[str, Tokens],
    poison: Poison,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One page: its rows are masked, and NaN shows all the same. Five: rows that are seen.

    Nothing is cached, so that each page that goes is at once another one.
    """
    monkeypatch.setattr(PageTables, "remember", lambda *args: None)
    config, first = config_of(folders["gpt_oss"]), PageTables._first
    assert answers(requests()[-1:], config, poison=poison) == whole["gpt_oss"][-1:]
    monkeypatch.setattr(PageTables, "_first", lambda *args: first(*args) + early)
    with pytest.raises(AssertionError, match="NaN or infinity"):
        answers(requests()[-1:], config, poison=poison)


# --- without engines ---------------------------------------------------------------------------------------


def test_layers_are_grouped_by_what_they_see() -> None:
    gpt_oss = kv_groups([(128, 0), (0, 0)] * 12)
    assert [(len(group.layers), group.window) for group in gpt_oss] == [(12, 0), (12, 128)]
    gemma3 = kv_groups([(0, 0) if i % 6 == 5 else (1024, 0) for i in range(62)])
    assert [len(group.layers) for group in gemma3] == [10, 10, 10, 10, 10, 10, 2]
    assert page_layers(gemma3) == 10 and sorted(sum((g.layers for g in gemma3), ())) == list(range(62))
    assert [g.window for g in kv_groups([(4096, 0)] * 32)] == [4096]
    assert len(kv_groups([(0, 0)] * 4)) == 1
    for odd in ([(0, 0)] + [(8, 0)] * 20, [(0, 0)] * 13 + [(8, 0)] * 14):
        (one,) = kv_groups(odd)
        assert len(one.layers) == len(odd) and not one.windowed


def test_a_group_says_which_rows_are_still_read() -> None:
    window, chunk = KvGroup((0,), window=WINDOW), KvGroup((0,), chunk=192)
    for row in range(600):
        for group, seen in ((window, max(row - WINDOW + 1, 0)), (chunk, row // 192 * 192)):
            assert seen - GRAIN < group.first(row) <= seen
            assert group.first(row) <= group.first(row + 1) and row - group.first(row) < group.reach


def test_gpt_oss_at_32_times_32k_takes_half() -> None:
    """Pages in use of the shape of gpt-oss-20b, beside those of a pool whose pages stay."""
    found = in_use(SHAPES["gpt-oss-20b"][0], 32768)
    assert found.ratio <= 0.51 and found.most <= 0.52 * found.whole


def test_the_longest_sequence_fits_whatever_is_cached_of_it() -> None:
    limits = BatchLimits(16, 4, 64, 1)
    groups = kv_groups([(128, 0), (0, 0)] * 2)
    for pages in (8, 40, 100, 1000):
        rows = most_rows(pages, groups, limits)
        pool = PagePool(pages)
        tables = PageTables(pool, PrefixCache(pool, 16, lookahead=0, groups=groups), limits)
        assert tables.needed(rows + limits.rows_ahead) <= pages
    assert most_rows(1000, groups, limits) > 2 * limits.most_rows(500) * 0.9


def test_a_handle_names_the_pages_that_its_puller_needs() -> None:
    groups = kv_groups([(128, 0), (0, 0)] * 2)
    assert handle_pages(groups, 1000, 16) == (63, 63 - (1000 - 127) // 64 * 4)
    assert handle_pages(kv_groups([(128, 0)]), 1000, 16) == (0, 63 - (1000 - 127) // 64 * 4)
    assert handle_pages(kv_groups([(0, 0)]), 1000, 16) == (63, 0)


class Cached:
    """A cache of two groups of layers, with a window in the second."""

    def __init__(self) -> None:
        self.pool = PagePool(64)
        groups = (KvGroup((0,)), KvGroup((1,), window=8))
        self.cache = PrefixCache(self.pool, PAGE, lookahead=0, groups=groups)
        self.tokens = list(range(20 * PAGE))

    def insert(self, pages: int, gone: int = 0) -> tuple[list[int], list[int]]:
        first, second = self.pool.take(pages), self.pool.take(pages - gone)
        self.cache.insert(self.tokens, first, pages * PAGE, [[-1] * gone + second])
        return first, second


def test_a_prefix_counts_as_far_as_the_window_before_its_end_is_there() -> None:
    cached = Cached()
    first, second = cached.insert(12, gone=2)
    cached.pool.drop([*first, *second])
    assert cached.cache.reach(cached.tokens[: 12 * PAGE + 1]) == 12
    pages, window = cached.cache.matches(cached.tokens[: 12 * PAGE + 1])
    behind = cached.cache.groups[1].first(12 * PAGE) // PAGE
    assert pages == first and window == [-1] * behind + second[behind - 2 :]
    cached.pool.drop([*pages, *window[behind:]])
    cached.cache.evict(behind - 2)
    assert cached.cache.reach(cached.tokens) == 12, "those that no window reaches go first"
    assert cached.cache.evict(1) == 2 and cached.cache.reach(cached.tokens) == 11


def test_a_window_goes_before_the_pages_that_others_need() -> None:
    cached = Cached()
    first, second = cached.insert(12)
    cached.pool.drop(second)
    assert cached.cache.evict(20) == 12 and cached.cache.reach(cached.tokens) == 0
    again = cached.pool.take(12)
    cached.cache.insert(cached.tokens, first, 12 * PAGE, [again])
    assert cached.cache.reach(cached.tokens) == 12, "the window has come again"
    cached.pool.drop([*first, *again])
    assert cached.cache.evict(64) == 24 and cached.pool.free == 64


def test_what_one_text_spoiled_goes_with_all_that_begins_alike() -> None:
    cached = Cached()
    first, second = cached.insert(12, gone=2)
    cached.pool.drop(first[6:] + second[4:])
    cached.cache.cut(cached.tokens)
    assert not cached.cache.cached_pages and not cached.cache.reach(cached.tokens)
    cached.pool.drop(first[:6] + second[:4])
    assert cached.pool.free == 64


def test_a_first_page_may_go_while_its_window_has_an_owner() -> None:
    """Two sequences computed one prefix: the cache has the first page of one, and the window of the other."""
    cached = Cached()
    first, second = cached.insert(1)
    cached.pool.drop([*first, *second])
    cached.cache.evict(1)
    assert cached.pool.free == 64, "a leaf goes with its window"
    mine, window = cached.pool.take(1), cached.pool.take(1)
    cached.cache.insert(cached.tokens, mine, PAGE, [[-1]])
    cached.pool.drop(mine)
    other = cached.pool.take(1)
    cached.cache.insert(cached.tokens, other, PAGE, [window])
    assert cached.cache.evict(1) == 1 and cached.pool.owners(window[0]) == 1
    cached.pool.drop([*other, *window])
    assert cached.pool.free == 64
