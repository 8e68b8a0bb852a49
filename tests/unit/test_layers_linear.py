"""`Linear`: the product itself, and that a row's bits do not depend on what shares the product."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from eyas.engine.batch.blocks import ROWS
from eyas.engine.layers.linear import Linear

SHAPES = [(64, 256), (656, 256), (256, 1312), (1024, 96)]
RAGGED = [(60, 77), (33, 7)]  # for oneDNN only


@pytest.fixture(params=["packed", "plain"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    if request.param == "plain":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    elif not torch.backends.mkldnn.is_available():
        pytest.skip("this build of PyTorch has no oneDNN")


@pytest.mark.parametrize("rows", [1, ROWS, 21])
def test_the_product_and_its_bias(rows: int) -> None:
    x, weight, bias = torch.randn(rows, 60), torch.randn(77, 60), torch.randn(77)
    assert torch.allclose(Linear(weight)(x, bias), x @ weight.t() + bias, atol=1e-4)
    assert torch.allclose(Linear(weight)(x), x @ weight.t(), atol=1e-4)


@pytest.mark.parametrize(("width", "outputs"), SHAPES + RAGGED)
def test_a_rows_bits_are_its_own(width: int, outputs: int) -> None:
    if (width, outputs) in RAGGED and not torch.backends.mkldnn.is_available():
        pytest.skip("plain mm promises this for multiples of 16 only")
    linear = partial(Linear(torch.randn(outputs, width)), bias=torch.randn(outputs))
    row = torch.randn(1, width)
    alone = linear(row)[0]
    for rows, place in ((8, 0), (8, 5), (9, 8), (30, 17), (256, 255)):
        company = torch.randn(rows, width) * 10
        company[place] = row
        assert torch.equal(linear(company)[place], alone)
    torch.set_num_threads(2)
    assert torch.equal(linear(row)[0], alone)
