"""How many KV pages fit: pure arithmetic on what a device says of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eyas.common.errors import ConfigError
from eyas.engine.loading.memory import (
    FEWEST_PAGES,
    CopiesDemand,
    DeviceMemory,
    MemoryDemand,
    pool_pages,
    slots_that_fit,
)

GIB = 2**30
H200 = DeviceMemory(total=140 * GIB, free=123 * GIB, allocated=16 * GIB)
LLAMA = MemoryDemand(
    page_bytes=2 * 2**20, page_size=16, context_length=131072, rows_ahead=12, reserve=4 * GIB
)


def test_weights_and_pages_are_the_fraction() -> None:
    assert pool_pages(H200, 0.5, LLAMA) == (70 - 16) * 512
    assert pool_pages(H200, 0.88, LLAMA) * LLAMA.page_bytes + H200.allocated <= 0.88 * H200.total
    assert (pool_pages(H200, 0.88, LLAMA) + 1) * LLAMA.page_bytes + H200.allocated > 0.88 * H200.total


def test_the_reserve_stays_free() -> None:
    assert pool_pages(H200, 1.0, LLAMA) == (123 - 4) * 512
    assert pool_pages(replace(H200, free=50 * GIB), 0.88, LLAMA) == (50 - 4) * 512, "others use it too"


def test_slots_of_states_take_half_at_most_and_are_named() -> None:
    """The rest is of pages; who asks for more slots is told what they take."""
    each = 300 * 2**20
    slots = slots_that_fit(H200, 0.5, LLAMA, each)
    assert slots == (70 - 16) * GIB // 2 // each
    assert slots_that_fit(replace(H200, free=GIB), 0.5, LLAMA, each) == 0
    assert pool_pages(H200, 0.5, replace(LLAMA, states=slots * each)) == (54 * GIB - slots * each) // 2**21
    with pytest.raises(ConfigError, match=r"and 53\.0 GiB of slots of states \(--state-slots\)"):
        pool_pages(H200, 0.5, replace(LLAMA, states=53 * GIB))


def test_a_page_is_one_of_every_pool() -> None:
    with_head = replace(LLAMA, page_bytes=LLAMA.page_bytes + 2**16)
    assert pool_pages(H200, 0.5, with_head) == 54 * GIB // (2**21 + 2**16)


def test_a_request_of_full_length_must_fit() -> None:
    exactly = replace(H200, free=4 * GIB + LLAMA.longest * LLAMA.page_bytes)
    assert pool_pages(exactly, 0.88, LLAMA) == LLAMA.longest == 131072 // 16 + 1
    less = replace(exactly, free=exactly.free - 1)
    with pytest.raises(ConfigError, match="needs 8193; lower --context-length to at most 131060") as refused:
        pool_pages(less, 0.88, LLAMA)
    assert refused.value.param == "context-length"
    assert pool_pages(less, 0.88, replace(LLAMA, context_length=131060)) == 8192, "the advice is right"


@pytest.mark.parametrize("free", [0, 4 * GIB, 4 * GIB + (FEWEST_PAGES - 1) * 2**21])
def test_next_to_nothing_is_an_error(free: int) -> None:
    with pytest.raises(ConfigError, match=r"16\.0 GiB of weights; 64 is the minimum: raise --mem-fraction"):
        pool_pages(replace(H200, free=free), 0.88, replace(LLAMA, context_length=16))
    with pytest.raises(ConfigError, match="room for 0 KV pages"):
        pool_pages(H200, 0.05, LLAMA)


def test_copies_of_packed_weights_fit_where_they_are_small_and_pages_are_left() -> None:
    """Those of Llama-3.1-8B beside 16 GiB of pages for a request of full length."""
    demand = CopiesDemand(weights=6 * GIB, copies=13 * GIB, longest=16 * GIB)
    empty = DeviceMemory(total=140 * GIB, free=139 * GIB, allocated=0)
    assert demand.fits(empty, 0.88)
    assert not demand.fits(replace(empty, total=80 * GIB, free=79 * GIB), 0.88), "more than an eighth"
    assert not demand.fits(empty, 0.35), "one request alone would have pages"
    assert not demand.fits(replace(empty, free=50 * GIB), 0.88), "others use it too"
    assert not replace(demand, longest=64 * GIB).fits(empty, 0.88)
