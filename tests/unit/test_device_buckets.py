"""Every step finds the smallest captured shape that holds it, or keeps its own."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from eyas.common.prompt_room import StepBudget, rows_of
from eyas.engine.device.buckets import MAX_ENDS, MAX_PROMPTS, GraphBuckets, default_batches
from eyas.engine.device.calls import begin, step_of
from eyas.engine.device.step import StepInput, StepShape
from eyas.engine.kernels.attention.attend_tiles import tiling_of
from eyas.engine.kernels.attention.exact_attend import AttentionCut
from eyas.engine.parallel.ranks import RankCall

BUCKETS = GraphBuckets(3, 4, (1, 2, 4, 8), mixed_batches=(4, 24, 60), chunk_tokens=300, mixed_tokens=192)
CAPTURED = list(BUCKETS.captured())


def holds(shape: StepShape, batch: int, chunk: int, tiles: int, ends: int) -> bool:
    """Rounds alone take a graph of rounds alone: rows of a chunk would be computed for nothing."""
    if bool(shape.chunk) != bool(chunk):
        return False
    return shape.batch >= batch and shape.chunk >= chunk and shape.tiles >= tiles and shape.ends >= ends


def test_a_step_takes_the_smallest_graph_that_holds_it() -> None:
    exact = 0
    for batch, chunk, ends in itertools.product(
        (0, 1, 3, 8, 9, 24, 25, 60, 61),
        (0, 1, 64, 110, 116, 117, 120, 180, 181),
        (0, 1, MAX_ENDS, MAX_ENDS + 1),
    ):
        if not batch and not chunk or ends > chunk:
            continue
        for tiles in {-(-chunk // 4), -(-chunk // 4) + MAX_ENDS - 1 if chunk else 0, chunk}:
            shape = BUCKETS.shape(batch, chunk, tiles, ends)
            fitting = [s for s in CAPTURED if holds(s, batch, chunk, tiles, ends)]
            if fitting:
                assert shape == min(fitting, key=lambda s: (s.rows, s.batch))
            else:
                assert shape == StepShape(batch, 3, chunk, tiles, ends)
                exact += 1
    assert exact


def test_sequences_without_drafts_have_a_row_each() -> None:
    """Alone the smallest graph of such rows; beside rounds whatever graph has the fewest rows."""
    assert BUCKETS.shape(0, 0, 0, 0, singles=3) == StepShape(0, 3, singles=4)
    assert BUCKETS.shape(1, 0, 0, 0, singles=1) == StepShape(2, 3), "as a round, in a graph that is there"
    for batch, singles in itertools.product(range(9), range(1, 12)):
        shape = BUCKETS.shape(batch, 0, 0, 0, singles=singles)
        fitting = [s for s in CAPTURED if not s.chunk and s.batch >= batch and s.singles >= singles]
        wide = BUCKETS.shape(batch + singles, 0, 0, 0)
        fitting += [wide] if wide in CAPTURED else []
        rows = min((s.rows for s in fitting), default=3 * batch + singles)
        assert shape.rows == rows and (shape in CAPTURED or not fitting)
    assert GraphBuckets(3, 4, ()).shape(5, 7, 2, 1, singles=2) == StepShape(5, 3, 7, 2, 1, 2)
    chunk = BUCKETS.shape(3, 100, 25, 1, singles=1)
    assert chunk in CAPTURED and not chunk.singles, "beside a chunk: a round"


def test_graphs_are_captured_from_the_largest_down() -> None:
    assert len(set(CAPTURED)) == len(CAPTURED) == 4 + 3 + 2 + 1 + 4 + 3
    rows = [shape.rows for shape in CAPTURED]
    assert rows == sorted(rows, reverse=True)


def test_rounds_leave_room_for_prompts() -> None:
    """A captured total, with the batch that is captured; of many prompt rows all that fit."""
    for batch in range(1, 61):
        rows = BUCKETS.mixed_prefill_budget(batch, False)
        assert BUCKETS.shape(batch, rows, -(-rows // 4), 1) in CAPTURED
        assert rows >= 64 and BUCKETS.shape(batch, rows, 0, 1).rows <= max(192, 3 * 60 + 64)
        assert BUCKETS.mixed_prefill_budget(batch, True) == max(300 - 3 * batch, 64)
    assert (
        BUCKETS.mixed_prefill_budget(3, False) == 192 - 12
        and BUCKETS.mixed_prefill_budget(5, False) == 192 - 72
    )
    assert GraphBuckets(1, 4, (), (), 100).mixed_prefill_budget(7, False) == 93


def test_long_prompts_have_a_quarter_of_the_mixed_tokens_and_more_if_some_waited_and_a_graph() -> None:
    buckets = GraphBuckets(1, 32, (8, 48, 256), (8, 48, 256), 3072, 512)
    captured = set(buckets.captured())
    for batch in range(1, 257):
        rows, before = buckets.mixed_prefill_budget(batch, False), 0
        for ahead in (0, 1000, 2000, 4000, 8192):
            few = buckets.long_prompt_rows(batch, ahead)
            assert max(before, 64) <= few <= max(min(rows, 128 + ahead // 16), 64)
            assert buckets.shape(batch, few, -(-few // 32), 1) in captured
            before = few
        assert few == rows, "after one of 8,192 tokens all"
    assert buckets.long_prompt_rows(48, 0) == 160 - 48 and buckets.long_prompt_rows(48, 256) == 192 - 48
    assert replace(buckets, mixed_tokens=1024).long_prompt_rows(48, 0) == 256 - 48
    assert GraphBuckets(1, 4, (), (), 100).long_prompt_rows(7, 0) == 93, "all steps alike"


def test_a_step_of_prompts_as_small_as_a_mixed_one_has_a_graph_beside_rounds() -> None:
    """However many prompt rows wait."""
    for tokens in (40, 100, 200, 384):
        buckets = GraphBuckets(1, 4, (8, 64), (8, 64), tokens, tokens)
        captured = list(buckets.captured())
        for batch, many in itertools.product((1, 5, 8, 9, 64), (False, True)):
            rows = buckets.mixed_prefill_budget(batch, many)
            assert rows > 0 and buckets.shape(batch, rows, -(-rows // 4), 1) in captured


@pytest.mark.parametrize("chunk", [2048, 3072, 8192])
def test_a_router_expects_the_chunks_that_a_step_has(chunk: int) -> None:
    """Beside decoding sequences no more than 3,072 rows, however large a step of prompts alone may be."""
    expected, buckets = StepBudget(chunk, 512), GraphBuckets(1, 4, (), (), chunk, 512)
    most = min(chunk, 3072)
    assert rows_of(expected, 0, 4 * most + 1) == chunk
    assert rows_of(expected, 1, 4 * most + 1) == most - 1
    for decoding in (1, 40, 48, 300, 500, 4000):
        for many in (False, True):
            rows = buckets.mixed_prefill_budget(decoding, many)
            assert expected.mixed_prefill_budget(decoding, many) == rows
        for ahead in (0, 500, 8000):
            assert expected.long_prompt_rows(decoding, ahead) == buckets.long_prompt_rows(decoding, ahead)


def test_larger_totals_come_in_larger_steps() -> None:
    captured = GraphBuckets(1, 4, (), (8,), 1000, 700).captured()
    assert sorted(shape.rows for shape in captured) == [128, 160, 192, 256, 320, 384, 512, 640]


def test_a_chunk_alone_may_have_a_graph() -> None:
    buckets = GraphBuckets(1, 4, (), (8,), 3072, 192, lone_chunks=(256, 512))
    captured, ends = list(buckets.captured()), MAX_ENDS
    small, large = (StepShape(0, 1, n, n // 4 + ends, ends, prompts=MAX_PROMPTS) for n in (256, 512))
    assert buckets.shape(0, 200, 50, 1) == small == captured[1]
    assert buckets.shape(0, 257, 65, 1, prompts=MAX_PROMPTS) == large == captured[0]
    assert buckets.shape(0, 100, 25, 1).batch == 8, "a smaller one has a graph beside rounds"
    for exact in ((1, 200, 50, 1), (0, 513, 129, 1), (0, 256, 64 + ends + 1, 1), (0, 256, 64, ends + 1)):
        assert buckets.shape(*exact) == StepShape(exact[0], 1, *exact[1:])
    many = StepShape(0, 1, 200, 50, 1, prompts=MAX_PROMPTS + 1)
    assert buckets.shape(0, 200, 50, 1, prompts=MAX_PROMPTS + 1) == many


def test_without_graphs_every_shape_is_exact() -> None:
    assert GraphBuckets(1, 4, ()).shape(5, 0, 0, 0) == StepShape(5, 1)
    assert list(GraphBuckets(1, 4, ()).captured()) == []


def test_default_batches_end_at_the_most() -> None:
    for most in range(1, 300):
        batches = default_batches(most)
        assert batches[-1] == most and list(batches) == sorted(set(batches)) and batches[0] == 1
        assert all(b - a <= max(8, a // 2) for a, b in itertools.pairwise(batches))


@pytest.mark.parametrize("rows", [2, 12, 16, 28, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_every_batch_is_cut_as_a_padded_one_is(rows: int, kv_heads: int) -> None:
    """So no step without a graph needs a kernel that its start has not compiled."""
    padded = default_batches(256)
    for cut in (AttentionCut.of, tiling_of):
        assert {cut(batch, rows, kv_heads) for batch in range(1, 257)} == {
            cut(batch, rows, kv_heads) for batch in padded
        }


@pytest.mark.parametrize("headless", [False, True])
def test_a_shape_reaches_other_ranks_whole(headless: bool) -> None:
    """Whether a head waits, too: all ranks have to replay one graph. Over the wire, which takes no bool."""
    shape = replace(StepShape(4, 6, singles=2), headless=headless)
    sent = begin(StepInput(shape, np.arange(8, dtype=np.int32), np.zeros((2, 3), np.int32)))
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=RankCall)
    assert step_of(arrived).shape == shape


def test_rounds_in_which_a_head_waits_have_graphs_of_their_own() -> None:
    """In the same places as those of the same width."""
    headed = GraphBuckets(6, 4, (1, 4, 8), alone=False)
    headless = replace(headed, headless=True)
    alike = {replace(shape, headless=True) for shape in headed.captured()}
    assert {*headless.captured()} == alike and not alike & {*headed.captured()}
    for batch, singles in ((3, 0), (2, 1), (9, 0)):
        shape = headless.shape(batch, 0, 0, 0, singles)
        assert shape == replace(headed.shape(batch, 0, 0, 0, singles), headless=True)
        assert (shape.headed, headed.headed) == (1, 6)
