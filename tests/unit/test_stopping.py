"""Where a round's tokens are cut, and which ids may not be sampled yet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.common.params import SamplingParams
from eyas.common.types import FinishCause
from eyas.engine.batch.stopping import banned_ids, finish

EOS = (2, 3)


@pytest.mark.parametrize(
    "params, before, tokens, kept, reason",
    [
        (SamplingParams(), 0, [5, 6], 2, None),
        (SamplingParams(), 0, [5, 2, 6], 2, FinishCause.STOP),
        (SamplingParams(), 0, [3, 2], 1, FinishCause.STOP),
        (SamplingParams(stop_token_ids=(6,)), 0, [5, 6, 2], 2, FinishCause.STOP),
        (SamplingParams(ignore_eos=True), 0, [5, 2, 6], 3, None),
        (SamplingParams(ignore_eos=True, stop_token_ids=(6,)), 0, [2, 6, 5], 2, FinishCause.STOP),
        (SamplingParams(max_tokens=10), 8, [5, 6, 7], 2, FinishCause.LENGTH),
        (SamplingParams(max_tokens=10), 8, [5, 2, 7], 2, FinishCause.STOP),
        (SamplingParams(max_tokens=10), 8, [5, 6, 2], 2, FinishCause.LENGTH),
        (SamplingParams(max_tokens=1), 0, [5], 1, FinishCause.LENGTH),
        (SamplingParams(min_tokens=3), 1, [2, 2, 2, 5], 3, FinishCause.STOP),
        (SamplingParams(min_tokens=4, max_tokens=4), 2, [2, 2], 2, FinishCause.LENGTH),
    ],
)
def test_finish(
    params: SamplingParams, before: int, tokens: list[int], kept: int, reason: FinishCause | None
) -> None:
    assert finish(params, EOS, before, tokens) == (tuple(tokens[:kept]), reason)


def test_banned_ids() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(9,))
    assert banned_ids(params, EOS, 0) == banned_ids(params, EOS, 1) == (2, 3, 9)
    assert banned_ids(params, EOS, 2) == ()
    assert banned_ids(SamplingParams(min_tokens=2, ignore_eos=True), EOS, 0) == ()
    assert banned_ids(SamplingParams(), EOS, 0) == ()


@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 4), min_size=12, max_size=12),
    min_tokens=st.integers(0, 6),
    max_tokens=st.integers(6, 12),
    ignore_eos=st.booleans(),
)
def test_rounds_of_any_size_end_alike(
    tokens: list[int], cuts: list[int], min_tokens: int, max_tokens: int, ignore_eos: bool
) -> None:
    """One token a step or several: the same output and the same reason."""
    params = SamplingParams(
        min_tokens=min_tokens, max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=(7,)
    )

    def run(sizes: list[int]) -> tuple[list[int], FinishCause | None]:
        output: list[int] = []
        at = 0
        for size in sizes:
            kept, reason = finish(params, EOS, len(output), tokens[at : at + size])
            output += kept
            if reason:
                return output, reason
            at += size
        return output, None

    assert run(cuts) == run([1] * 12) == (run([12]))
