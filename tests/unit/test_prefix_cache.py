"""The prefix cache: what it evicts first, and how much work that is at a GPU's number of pages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from admission_tier import Tier

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice
from eyas.engine.ipc.messages import EngineLoad, SubmitGeneration
from eyas.engine.kv import prefix_cache
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.prefix_cache import PrefixCache

PAGE = 2
MANY = 55_000
NEXT = [99]  # a match leaves out at least the last token


def _cache(pages: int) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(pages)
    return pool, PrefixCache(pool, PAGE, lookahead=0)


def _cached(pool: PagePool, cache: PrefixCache, *firsts: int) -> list[int]:
    """The pages of a prompt, one for each number, that the cache keeps; the caller owns them."""
    tokens = [token for first in firsts for token in (first, 0)]
    pages = cache.match([*tokens, *NEXT])
    pages += pool.take(len(firsts) - len(pages))
    cache.insert(tokens, pages, len(tokens))
    return pages


def _lines(work: Callable[[], Any]) -> int:
    """How many lines of the prefix cache `work` runs."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace if frame.f_code.co_filename == prefix_cache.__file__ else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def test_evicting_is_as_much_work_as_pages_are_freed_however_many_are_held() -> None:
    """Nearly all pages are in use: a look at each of them, for every page that is wanted, stops a step."""
    pool, cache = _cache(MANY)
    held = [_cached(pool, cache, first) for first in range(MANY)]
    assert cache.evict(1) == 0, "all of them are in use"

    def one_by_one() -> None:
        for _ in range(200):
            pool.drop(held.pop())
            assert cache.evict(2) == 1

    assert _lines(one_by_one) < 200 * 60
    assert _lines(lambda: cache.evict(1)) < 60


def test_a_prompt_of_many_pages_goes_with_a_few_lines_for_each() -> None:
    pool, cache = _cache(MANY)
    for first in range(0, MANY, 500):
        pool.drop(_cached(pool, cache, *range(first, first + 500)))
    assert cache.cached_pages == MANY and pool.used == 0
    assert _lines(lambda: [cache.evict(7) for _ in range(1000)]) < 7000 * 40
    assert pool.free == 7000 and cache.cached_pages == MANY - 7000


def _evicted(pool: PagePool, cache: PrefixCache) -> list[int]:
    """All pages in the order of their eviction."""
    pages = []
    while cache.evict(1):
        pages += pool.take(1)
    return pages


def test_the_longest_idle_goes_first_and_a_prefix_after_what_follows_it() -> None:
    pool, cache = _cache(4)
    shared, old = _cached(pool, cache, 1, 2)
    new = _cached(pool, cache, 1, 3)
    pool.drop([shared, old])
    pool.drop(new)
    other = _cached(pool, cache, 4)
    pool.drop(other)
    assert _evicted(pool, cache) == [old, new[1], shared, other[0]]


def test_what_is_wanted_again_is_idle_anew() -> None:
    pool, cache = _cache(4)
    first, second, third = (_cached(pool, cache, n)[0] for n in range(3))
    pool.drop([first, second, third])
    pool.drop(cache.match([0, 0, *NEXT]))
    (twin,) = pool.take(1)  # of one who computed the second prompt beside the cache
    cache.insert([1, 0], [twin], PAGE)
    assert _evicted(pool, cache) == [third, first, second]
    assert pool.owners(twin) == 1 and pool.free == 0


def test_pages_are_counted_once_however_many_use_them_and_not_for_the_cache() -> None:
    """A prompt of several choices: their pages in use are never more than there are."""
    tier = Tier("worker", pages=12, max_running=4)
    params = SamplingParams(max_tokens=4)
    request = GenerationRequest("r", tuple(range(8)), params, tuple(map(RequestChoice, range(4))))
    tier.inbox = [SubmitGeneration(request, 1, False)]
    loads = [event for _ in range(8) for event in tier.turn(1) if isinstance(event, EngineLoad)]
    assert any(load.running == 4 for load in loads) and loads[-1].running == 0
    assert max(load.pages_used for load in loads) <= 12 and loads[-1].pages_used == 0
    assert tier.scheduler.cache.cached_pages > 0
