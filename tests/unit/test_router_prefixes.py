"""Where a prompt's prefix is, and what that is worth against load."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from eyas.common.page_names import packed
from gateway.routing.prefix_caches import (
    COARSE,
    FINE,
    FINE_BLOCKS,
    Holder,
    PrefixIndex,
    block_names,
    tokens_of,
)
from gateway.routing.router import CROWD, RequestRoute, RouterCandidate, choose_decode, choose_prefill, route
from tests.unit.routed_workers import DECODE, PREFILL, worker

A, B = ("a:1", 7), ("b:1", 7)


def prefix_of(ids: Sequence[int]) -> list[bytes]:
    return block_names(packed(ids), b"")


def chosen(*workers: RouterCandidate) -> str:
    found = choose_prefill(workers)
    assert found is not None
    return found.info.worker


# --- the choice ------------------------------------------------------------------------------------------


def test_the_longest_prefix_comes_before_load() -> None:
    few, many = (
        worker("few", PREFILL, cached=32, in_flight=1),
        worker("many", PREFILL, cached=64, in_flight=2),
    )
    assert chosen(few, many) == chosen(many, few) == "many"
    assert chosen(worker("idle", PREFILL), worker("busy", PREFILL, in_flight=1)) == "idle"


def test_a_prefix_does_not_make_up_for_a_crowd() -> None:
    for fewest in (0, 10):
        idle = worker("idle", PREFILL, in_flight=fewest)
        most = 2 * fewest + CROWD
        assert chosen(idle, worker("known", PREFILL, cached=512, in_flight=most)) == "known"
        assert chosen(idle, worker("known", PREFILL, cached=512, in_flight=most + 1)) == "idle"


def test_nothing_brings_back_a_worker_to_avoid() -> None:
    failed, other = worker("failed", DECODE, cached=512), worker("other", DECODE, in_flight=50)
    assert choose_decode([failed, other], {"failed"}) == other
    assert choose_decode([failed], {"failed"}) == failed


def test_both_legs_follow_the_prefix() -> None:
    workers = [
        worker("p1", PREFILL),
        worker("p2", PREFILL, cached=16),
        worker("d1", DECODE, cached=16, in_flight=1),
        worker("d2", DECODE),
    ]
    assert route(workers) == RequestRoute("d1", "p2")


# --- the guess -------------------------------------------------------------------------------------------


def test_only_whole_blocks_that_a_cache_can_serve_count() -> None:
    ids = list(range(100))
    assert len(prefix_of(ids[: 2 * FINE])) == 1  # the last id is computed again, and with it its block
    assert len(prefix_of(ids[: 2 * FINE + 1])) == 2
    assert prefix_of(()) == []


@given(st.integers(1, 5000))
def test_blocks_hold_all_but_the_last_tokens(tokens: int) -> None:
    count = len(prefix_of([7] * tokens))
    assert tokens_of(count) < tokens <= tokens_of(count + 1)
    width = FINE if count < FINE_BLOCKS else COARSE
    assert tokens_of(count + 1) - tokens_of(count) == width


def test_a_block_is_its_ids_and_all_before_them() -> None:
    one, other = [1] * 64, [2] * 16 + [1] * 48
    assert not set(prefix_of(one)) & set(prefix_of(other))
    assert prefix_of(one[:40]) == prefix_of(one)[:2]


def test_a_conversation_grows_where_it_was() -> None:
    index = PrefixIndex()
    first = [*range(40)]
    index.add(A, prefix_of(first), 1.0)
    later = prefix_of([*first, *range(500, 600)])
    assert index.matched(A, later, 0.0) == 2 * FINE
    assert index.matched(A, later, 1.5) == 0
    assert index.matched(B, later, 0.0) == 0
    assert index.matched(("a:1", 8), later, 0.0) == 0  # a restarted worker holds nothing


@given(
    st.lists(st.tuples(st.sampled_from([A, B]), st.lists(st.integers(0, 1), max_size=6)), max_size=20),
    st.integers(1, 9),
)
def test_what_is_found_is_what_was_kept(sent: list[tuple[Holder, list[int]]], limit: int) -> None:
    """However blocks are pushed out, a prefix is never kept without its beginning, and memory is bounded."""
    index = PrefixIndex(max_blocks=limit)
    for holder, blocks in sent:
        prefix = prefix_of([block for block in blocks for _ in range(FINE)] + [0])
        index.add(holder, prefix, 0.0)
        assert len(index) <= limit
        assert index.matched(holder, prefix, 0.0) == FINE * min(len(prefix), limit)
        for other in (A, B):
            kept = [(other, block) in index._blocks for block in prefix]
            assert kept == sorted(kept, reverse=True)
            assert index.matched(other, prefix, 0.0) == FINE * sum(kept)
