"""Steps as calls to attention ranks: they arrive as they were sent, and each rank finds its own rows."""

from __future__ import annotations

import pytest

from eyas.engine.batch.spans import QuerySpan
from eyas.engine.parallel.step_calls import StepRows, rows_of, step

CHAIN = QuerySpan([3, 1], 20, 2)
TREE = QuerySpan([9, 12, 10], 33, 3, ((33,), (33, 34), (33, 35)))
MOVED = QuerySpan([17], 0, 1, offset=90)


@pytest.mark.parametrize("taps", [(), (2, 5)])
def test_a_step_arrives_as_it_was_sent(taps: tuple[int, ...]) -> None:
    rows = StepRows((CHAIN, TREE, MOVED), [7, 8, 2**31 - 1, 0, 5, 6], taps)
    assert rows_of(step(rows)) == rows


def test_ranks_find_their_rows_and_idle_ones_none() -> None:
    """Of eight pages each: rank 0 has the chain, rank 1 the tree and rank 2 the last; rank 3 is idle."""
    shares = StepRows((CHAIN, TREE, MOVED), [1, 2, 3, 4, 5, 6], (4,)).shares(4, 8)
    assert [share.tokens for share in shares] == [[1, 2], [3, 4, 5], [6], []]
    assert [share.spans for share in shares] == [[CHAIN], [TREE], [MOVED], []]
    assert {share.taps for share in shares} == {(4,)}


def test_rows_out_of_order_are_a_mistake() -> None:
    """Their results come back rank by rank."""
    with pytest.raises(AssertionError, match="rows of rank 0 follow rows of rank 1"):
        StepRows((TREE, CHAIN), [1, 2, 3, 4, 5]).shares(2, 8)
