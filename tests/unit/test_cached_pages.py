"""What workers say of their prefix caches:

names, changes in order, and a gateway that holds the same in the end.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.common.page_names import SHORT_BYTES, CachedPages, PageShape, named, packed, split
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.prefix_cache import PrefixCache
from gateway.routing.prefix_caches import CachedPrefixes, PromptPages

SIZE = 4


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 6), st.integers(0, 2))
def test_names_are_those_of_the_keys(tokens: list[int], size: int, lookahead: int) -> None:
    shape, name, names = PageShape(size, lookahead), b"", []
    for key in shape.keys(tokens, len(tokens) - 1):
        name = named(name, key)
        names.append(name[:SHORT_BYTES])
    assert made(shape, tokens) == names


def made(shape: PageShape, tokens: list[int]) -> list[bytes]:
    """All names of a prompt's pages."""
    found = shape.names(packed(tokens))
    return [found[page] for page in range(len(found))]


def test_no_name_is_made_before_it_is_looked_at() -> None:
    """A prompt of which nothing, or little, is cached costs few digests."""
    tokens = list(range(1001))
    names = made(PageShape(SIZE), tokens)
    for held, looked_at in ((0, 1), (1, 2), (5, 8), (100, 128), (250, 250)):
        holdings, prefix = CachedPrefixes(), PromptPages(tokens)
        pages = CachedPages(1, PageShape(SIZE))
        pages.change(b"".join(names[:held]), b"")
        first = pages.since(None)
        assert first is not None
        holdings.apply("w", first, 0.0)
        holding = holdings.of("w", 1)
        assert holding is not None and holding.matched(prefix) == held * SIZE
        assert len(prefix.names(PageShape(SIZE))._names) == looked_at


class Worker:
    """A prefix cache of its own, what its front tells, and one gateway that listens."""

    def __init__(self, seed: int, lookahead: int, most_logged: int) -> None:
        self.rng = random.Random(seed)
        self.pool = PagePool(24)
        self.cache = PrefixCache(self.pool, SIZE, lookahead=lookahead)
        self.pages = CachedPages(7, PageShape(SIZE, lookahead), most_logged)
        self.holdings = CachedPrefixes()
        self.number: int | None = None
        self.wholes = 0

    def work(self) -> None:
        """A prompt comes; some of it may be known, and older pages may have to go."""
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 30))]
        found = self.cache.match(tokens)
        need = len(tokens) // SIZE + 1 - len(found)
        if self.pool.free < need:
            self.cache.evict(need - self.pool.free)
        if self.pool.free >= need:
            found += self.pool.take(need)
            self.cache.insert(tokens, found, len(tokens))
        self.pool.drop(found)

    def engine_tells(self, most: int) -> None:
        added, dropped = self.cache.take_changes(most)
        if added or dropped:
            self.pages.change(added, dropped)

    def front_tells(self) -> None:
        news = self.pages.since(self.number)
        if news is not None:
            self.wholes += news.whole
            self.number = news.until
            self.holdings.apply("w", news, 0.0)

    def held(self) -> set[bytes]:
        return {node.name[:SHORT_BYTES] for node in self.cache._nodes.values()}


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("most_logged", [64, 1 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_a_gateway_knows_what_the_cache_holds(seed: int, most_logged: int, lookahead: int) -> None:
    worker = Worker(seed, lookahead, most_logged)
    for _ in range(400):
        worker.work()
        if worker.rng.random() < 0.5:
            worker.engine_tells(worker.rng.randrange(1, 6))
        if worker.rng.random() < 0.3:
            worker.front_tells()
    assert worker.cache.cached_pages <= 24
    while worker.cache._changes:
        worker.engine_tells(3)
    worker.front_tells()
    holding = worker.holdings.of("w", 7)
    assert holding is not None and holding._names == worker.held()
    assert (worker.wholes > 1) == (most_logged == 64)  # who is far behind begins anew
    for _ in range(50):
        tokens = [worker.rng.randrange(2) for _ in range(30)]
        found = worker.cache.match(tokens)
        worker.pool.drop(found)
        assert holding.matched(PromptPages(tokens)) == SIZE * len(found)
    assert worker.pages._logged <= max(most_logged, 64)


def test_changes_that_nobody_heard_of_are_not_told() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool, SIZE, lookahead=0)
    pages = pool.take(2)
    cache.insert(list(range(8)), pages, 8)
    pool.drop(pages)
    cache.evict(1)
    added, dropped = cache.take_changes(100)
    assert (len(list(split(added))), dropped) == (1, b"")
    cache.evict(1)
    assert cache.take_changes(100) == (b"", added)


def test_a_new_pool_makes_the_old_one_forgotten() -> None:
    old, new = CachedPages(1, PageShape(SIZE)), CachedPages(2, PageShape(SIZE))
    tokens = list(range(9))
    names = b"".join(made(PageShape(SIZE), tokens))
    old.change(names, b"")
    holdings = CachedPrefixes()
    first = old.since(None)
    assert first is not None
    holdings.apply("w", first, 0.0)
    assert holdings.of("w", 2) is None
    holding = holdings.of("w", 1)
    assert holding is not None and holding.matched(PromptPages(tokens)) == 2 * SIZE
    new.change(names[:SHORT_BYTES], b"")
    second = new.since(0)
    assert second is not None and not second.whole
    holdings.apply("w", second, 0.0)  # without its beginning it says nothing
    assert holdings.of("w", 2) is None
    whole = new.since(None)
    assert whole is not None
    holdings.apply("w", whole, 0.0)
    fresh = holdings.of("w", 2)
    assert fresh is not None and fresh.matched(PromptPages(tokens)) == SIZE and holdings.of("w", 1) is None
    holdings.forget("w")
    assert holdings.of("w", 2) is None


def test_a_holding_knows_when_it_was_emptied() -> None:
    """What was sent before that is not there any more."""
    pages, holdings = CachedPages(1, PageShape(SIZE)), CachedPrefixes()
    names = b"".join(made(PageShape(SIZE), list(range(9))))
    pages.change(names, b"")
    first = pages.since(None)
    assert first is not None
    holdings.apply("w", first, 1.0)
    pages.change(b"", names[:SHORT_BYTES])
    some = pages.since(first.until)
    assert some is not None
    holdings.apply("w", some, 2.0)
    holding = holdings.of("w", 1)
    assert holding is not None and len(holding) == 1 and holding.emptied == 0.0
    pages.change(names, names[SHORT_BYTES:])  # emptied, and computed anew before anyone heard of it
    rest = pages.since(some.until)
    assert rest is not None
    holdings.apply("w", rest, 3.0)
    assert len(holding) == 2
    pages.change(b"", names)
    empty = pages.since(rest.until)
    assert empty is not None
    holdings.apply("w", empty, 4.0)
    assert len(holding) == 0 and holding.emptied == 4.0
    pages.change(names, b"")
    pages.change(b"", names)  # it came and left before anyone heard of it
    brief = pages.since(empty.until)
    assert brief is not None
    holdings.apply("w", brief, 4.5)
    assert len(holding) == 0 and holding.emptied == 4.5
    whole = pages.since(None)
    assert whole is not None
    holdings.apply("w", whole, 5.0)
    assert holding.emptied == 4.5


def test_a_pool_that_is_empty_when_first_heard_of_was_emptied() -> None:
    """Its flush was over before anyone listened."""
    pages, holdings = CachedPages(1, PageShape(SIZE)), CachedPrefixes()
    whole = pages.since(None)
    assert whole is not None
    holdings.apply("w", whole, 2.0)
    holding = holdings.of("w", 1)
    assert holding is not None and holding.emptied == 2.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=40))
def test_a_page_is_cached_while_the_pool_or_the_host_has_it(changes: list[tuple[int, int]]) -> None:
    pages, holdings = CachedPages(1, PageShape(SIZE)), CachedPrefixes()
    places: tuple[set[bytes], set[bytes]] = (set(), set())
    number = None
    for kind, page in changes:
        name = bytes([page]) * SHORT_BYTES
        place, came = places[kind // 2], not kind % 2
        if came == (name in place):
            continue
        said = [b"", b"", b"", b""]
        said[kind] = name
        pages.change(*said)
        place.symmetric_difference_update({name})
        news = pages.since(number)
        if news is not None:
            number = news.until
            holdings.apply("w", news, 0.0)
        holding = holdings.of("w", 1)
        assert (set() if holding is None else holding._names) == places[0] | places[1]
