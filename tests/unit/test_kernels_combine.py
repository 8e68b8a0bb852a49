"""What experts made, added up by weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.kernels.experts import back_rounded, combine, combine_rounded
from eyas.engine.kernels.experts.route import ChosenExperts
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products import single
from eyas.engine.kernels.products.blocks import Fp8Rows, widened
from eyas.engine.kernels.products.rows import NormInput
from eyas.engine.kernels.products.skinny import ProductLaunch
from tests.unit.grouped_products import in_kind

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


def test_rows_are_normed_and_rounded_at_once() -> None:
    torch.manual_seed(1)
    hidden = 640
    made, weights, residual = random(ROWS * PER_ROW, hidden), random(ROWS, PER_ROW), random(ROWS, hidden)
    norm = NormInput(1e-3, random(hidden), RowRounding("block"))
    assert combine_rounded.can_round(hidden, norm)
    whole, rounded = combine_rounded.combine_rounded(made, weights, residual, norm)
    expected, _ = combine.combine_add(made, weights, None, residual)
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)
    before = row_kernels.normed(expected, norm).rounded
    assert before is not None
    assert difference(rounded, before) < 0.003
    other = row_kernels.normed(expected, replace(norm, eps=1.0)).rounded
    assert other is not None and difference(rounded, other) > 0.1


def difference(found: Fp8Rows, expected: Fp8Rows) -> float:
    """Of the numbers that they mean, over those that are expected."""
    return float((widened(found) - widened(expected)).norm() / widened(expected).norm())


@pytest.mark.parametrize("powers", [False, True])
def test_many_rows_are_normed_and_rounded_at_once(powers: bool) -> None:
    """As by two launches, a sum and a norm; scales lie as cuBLAS reads them, too."""
    torch.manual_seed(3)
    rows, hidden = 257, 640
    made, weights = random(rows * PER_ROW, hidden), random(rows, PER_ROW)
    residual, norm = random(rows, hidden), NormInput(1e-3, random(hidden), RowRounding("block", powers))
    expected = residual + combine.combine(made, weights)
    whole, rounded = combine_rounded.combine_rounded(made, weights, residual, norm)
    assert whole is residual
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)
    before = row_kernels.normed(whole, norm).rounded
    assert before is not None and before.turned is not None and rounded.turned is not None
    torch.testing.assert_close(widened(rounded), widened(before), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rounded.turned[:, :rows], before.turned[:, :rows], rtol=1e-5, atol=0.0)
    other = row_kernels.normed(whole, replace(norm, eps=1.0)).rounded
    assert other is not None and not torch.allclose(rounded.scales, other.scales, rtol=1e-2)


@pytest.mark.parametrize("powers", [False, True])
def test_one_row_comes_back_normed_and_rounded(powers: bool) -> None:
    """By the products of its experts, of which one is of none."""
    torch.manual_seed(2)
    hidden, width, experts = 640, 256, 5
    kind = "powers" if powers else "blocks"
    weight = in_kind(torch.randn(experts, hidden, width) / width**0.5, kind)
    assert weight.rounding is not None
    taken = torch.tensor([[3, 0, -1, 4, 1]], dtype=torch.int32, device=DEVICE)
    chosen = ChosenExperts(taken, torch.rand(1, 5, device=DEVICE))
    inner, residual = random(5, width), random(1, hidden)
    inner[2] = float("nan")  # nothing has written it
    norm = NormInput(1e-3, random(hidden), RowRounding("block"))
    assert back_rounded.can_take(weight, norm)
    launch = ProductLaunch.on(DEVICE, pdl=False)
    whole, rounded = back_rounded.back_rounded(inner, weight, chosen, residual, norm, launch)
    expected = residual + single.back(inner, weight, chosen)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    before = row_kernels.normed(expected, norm).rounded
    assert before is not None and not launch.tickets.any()
    assert difference(rounded, before) < 0.01
    other = ChosenExperts(taken.flip(1), chosen.weights)
    assert (residual + single.back(inner, weight, other) - whole).abs().max() > 0.1
    assert not back_rounded.can_take(weight, NormInput(1e-3, norm.gain))
