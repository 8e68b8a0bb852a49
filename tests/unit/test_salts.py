"""Salts: a page is named by all of its content and its salt, and texts of different salts share nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import Loopback, split_configs, wait_all

from eyas.common.config import EngineConfig
from eyas.common.errors import InvalidRequest
from eyas.common.page_names import NAME_BYTES, CachedPages, PageShape, named, packed, salt_of, split
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.common.wire.convert import fill_request, request_from_pb
from eyas.engine.batch.sequence import Sequence
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.prefix_cache import PrefixCache
from gateway.routing.prefix_caches import CachedPrefixes, PrefixIndex, PromptPages, block_names
from protos import common_pb2

SIZE = 2
SALTS = st.sampled_from(["", "a", "aa", "b", "\0", "ä"])
TEXTS = st.lists(st.integers(0, 1), max_size=9)
SHAPES = st.builds(PageShape, st.integers(1, 3), st.integers(0, 2))


def contents(shape: PageShape, text: str, tokens: list[int]) -> Iterator[tuple[bytes, object]]:
    """(name, all that it must name) of each page."""
    name = salt_of(text)
    for count, key in enumerate(shape.keys(tokens, len(tokens)), 1):
        name = named(name, key)
        yield name, (text, tuple(tokens[: count * shape.size + shape.lookahead]), count)


@given(SHAPES, SALTS, TEXTS, SALTS, TEXTS)
def test_two_pages_have_one_name_if_all_of_them_is_the_same(
    shape: PageShape, salt: str, tokens: list[int], other_salt: str, others: list[int]
) -> None:
    pages = [*contents(shape, salt, tokens), *contents(shape, other_salt, others)]
    for name, content in pages:
        assert len(name) == NAME_BYTES
        for other, compared in pages:
            assert (name == other) == (content == compared)
    short = PromptPages(tokens, salt=salt_of(salt)).names(shape)
    assert [short[i] for i in range(len(short))] == [
        name[:8] for name, _ in contents(shape, salt, tokens[:-1] if not shape.lookahead else tokens)
    ][: len(short)]


def test_a_salt_has_no_name_of_a_page() -> None:
    """Else a caller could choose a salt under which its text goes on from another's page."""
    page = named(b"", (1, 2))
    assert salt_of(packed((1, 2)).decode()) != page and salt_of("") == b""


@pytest.mark.parametrize("text", ["", "a"])
def test_an_adapters_pages_are_its_own(text: str) -> None:
    adapters = ["", "00" * 8, "11" * 8]
    assert len({salt_of(text, adapter) for adapter in adapters}) == 3
    assert salt_of("00" * 8 + "\0") != salt_of("", "00" * 8)  # no caller can say a salt that is an adapter's
    assert all(len(salt_of(text, adapter)) == NAME_BYTES for adapter in adapters[1:])


class Apart:
    """A cache for all salts, and beside it one for each: what they find must be equal."""

    def __init__(self, lookahead: int) -> None:
        self.pool = PagePool(64)
        self.cache = PrefixCache(self.pool, SIZE, lookahead=lookahead)
        self.lookahead = lookahead
        self.alone: dict[str, PrefixCache] = {}

    def ask(self, salt: str, tokens: list[int]) -> None:
        alone = self.alone.get(salt) or PrefixCache(PagePool(64), SIZE, lookahead=self.lookahead)
        self.alone[salt] = alone
        found = self._through(self.cache, self.pool, tokens, salt_of(salt))
        assert found == self._through(alone, alone._pool, tokens, b"")

    @staticmethod
    def _through(cache: PrefixCache, pool: PagePool, tokens: list[int], salt: bytes) -> int:
        pages = cache.match(tokens, salt)
        found = len(pages)
        assert cache.reach(tokens, salt) == found
        assert len(list(cache.names_after(tokens, (), salt))) >= found
        pages += pool.take(len(tokens) // SIZE + 1 - found)
        cache.insert(tokens, pages, len(tokens), salt=salt)
        for rows in range(SIZE, found * SIZE + 1, SIZE):
            node = cache.at(tokens, rows, (), salt)
            assert node is not None and node is cache.at(tokens, rows, pages, salt)
        assert cache.whole_rows(tokens, pages, salt) == cache.whole_rows(tokens, (), salt)
        pool.drop(pages)
        return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1), st.lists(st.tuples(SALTS, TEXTS.filter(bool)), max_size=12))
def test_a_cache_finds_under_a_salt_what_one_of_its_own_would(
    lookahead: int, asked: list[tuple[str, list[int]]]
) -> None:
    apart = Apart(lookahead)
    for salt, tokens in asked:
        apart.ask(salt, tokens)
    assert apart.cache.cached_pages == sum(cache.cached_pages for cache in apart.alone.values())
    names = [node.name for node in apart.cache._nodes.values()]
    assert len(set(names)) == len(names)
    for salt, tokens in asked[:1]:
        apart.cache.cut(tokens, salt_of(salt))
        assert apart.cache.reach(tokens, salt_of(salt)) == 0
    apart.cache.evict(64)
    assert not apart.cache.cached_pages and not apart.cache._roots


@given(SALTS, SALTS, st.integers(1, 40))
def test_a_gateway_counts_only_on_pages_of_the_same_salt(salt: str, other: str, length: int) -> None:
    """By what workers report, and by what it has sent them itself."""
    shape, tokens = PageShape(SIZE), list(range(length))
    sent, asked = (PromptPages(tokens, salt=salt_of(text)) for text in (salt, other))
    pages, holdings, index = CachedPages(1, shape), CachedPrefixes(), PrefixIndex()
    names = sent.names(shape)
    pages.change(b"".join(names[i] for i in range(len(names))), b"")
    news = pages.since(None)
    assert news is not None
    holdings.apply("w", news, 0.0)
    holding = holdings.of("w", 1)
    assert holding is not None
    index.add(("w", 1), sent.blocks, 0.0)
    same = salt == other
    assert holding.matched(asked) == (len(names) * SIZE if same else 0)
    assert index.matched(("w", 1), asked.blocks, 0.0) == (16 * len(sent.blocks) if same else 0)
    assert sent.blocks == block_names(packed(tokens), salt_of(salt))


def test_routers_of_others_are_told_of_first_pages_as_such() -> None:
    """A salted text's first page follows none that they could know."""
    pool = PagePool(8)
    cache = PrefixCache(pool, SIZE, lookahead=0)
    cache.insert([1, 2, 3, 4], pool.take(2), 4, salt=salt_of("a"))
    before, _, salts = cache.origins(9)
    came, _ = cache.take_changes(9)
    assert list(split(before)) == [bytes(8), list(split(came))[0]]
    assert list(split(salts)) == [salt_of("a")[:8], bytes(8)]


@pytest.mark.parametrize("salt", [b"", salt_of("a")])
def test_a_salt_travels(salt: bytes) -> None:
    pb = common_pb2.GenerationRequest()
    fill_request(pb, GenerationRequest("r", (1, 2), SamplingParams(), salt=salt))
    assert request_from_pb(pb, 100).salt == salt
    pb.salt = b"short"
    with pytest.raises(InvalidRequest, match="salt has 5 bytes"):
        request_from_pb(pb, 100)


# --- whole engines ------------------------------------------------------------------------------------

PROMPT = tuple((7 * i * i) % 4000 + 9 for i in range(150))


def cached_of(config: EngineConfig, salts: list[str], *, split_roles: bool = False) -> list[int]:
    """The cached prompt tokens of the same prompt under each of these salts, one after the other."""
    cluster = Loopback(*(split_configs(config)[:2] if split_roles else [config]))
    request = GenerationRequest("", PROMPT, SamplingParams(seed=3, max_tokens=4, ignore_eos=True))
    cached, tokens = [], []
    try:
        for number, salt in enumerate(salts):
            asked = msgspec.structs.replace(request, id=f"{number}", salt=salt_of(salt))
            result = cluster.submit(asked, split=split_roles)
            wait_all([result], 60)
            tokens.append(result.tokens)
            cached.append(sum(e.timings.cached_tokens for e in result.entries[:1] if e.timings))
    finally:
        cluster.close()
    assert all(each == tokens[0] for each in tokens)
    return cached


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(draft=None, num_pages=64, max_running=2, chunk_tokens=64, pool_dir=str(tmp_path))


@pytest.mark.usefixtures("one_thread")
def test_an_engine_finds_pages_of_the_same_salt_alone(config: EngineConfig) -> None:
    config = replace(config, worker="alone")
    assert cached_of(config, ["", "a", "b", "a", ""]) == [0, 0, 0, 144, 144]
    assert cached_of(config, ["a", "b", "a"], split_roles=True) == [0, 0, 144]
    with mock.patch.object(Sequence, "salt", b""):
        assert cached_of(config, ["a", "b", ""])[2] == 144, "the test would not notice"
