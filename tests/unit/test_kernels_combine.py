"""What experts made, added up by weight."""

from __future__ import annotations

import pytest
import torch

from eyas.engine.kernels.experts import combine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, PER_ROW, HIDDEN = 5, 3, 560


def random(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device=DEVICE)


@pytest.mark.parametrize("shared", ["", "whole", "by share"])
def test_rows_are_added_up_by_weight(shared: str) -> None:
    made, weights = random(ROWS * PER_ROW, HIDDEN), random(ROWS, PER_ROW)
    logits = random(ROWS, 16) if shared == "by share" else None
    also = combine.BesideRows(random(ROWS, HIDDEN), logits) if shared else None
    expected = torch.einsum("rkh,rk->rh", made.view(ROWS, PER_ROW, HIDDEN), weights)
    by_weight = expected.clone()
    if also is not None:
        expected += also.made if logits is None else also.made * logits[:, :1].sigmoid()
        torch.testing.assert_close(also.whole, expected - by_weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(combine.combine(made, weights, also), expected, rtol=1e-5, atol=1e-5)
    residual = random(ROWS, HIDDEN)
    rows, sums = combine.combine_add(made, weights, also, residual)
    torch.testing.assert_close(rows, expected + residual, rtol=1e-5, atol=1e-5)
    squares = rows.square().sum(1)
    torch.testing.assert_close(sums.sum(0)[:ROWS], squares, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(combine.combine(made, weights.flip(1), also), expected)


def test_what_is_another_ranks_is_not_added_up() -> None:
    """Nothing has written its rows."""
    made, weights = random(ROWS, PER_ROW, HIDDEN), random(ROWS, PER_ROW)
    experts = torch.tensor([[0, 1, 2], [0, -1, 2], [-1] * 3, [1, 2, -1], [-1, 0, -1]], dtype=torch.int32)
    here = (experts >= 0).to(DEVICE)
    expected = torch.einsum("rkh,rk->rh", made, weights * here)
    made[~here] = float("nan")
    found = combine.combine_local(made.view(-1, HIDDEN), weights, experts.to(DEVICE))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
