"""Products of a few rows whose weights wait: against plain torch, and the way of any number of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.formats.fp8 import Fp8Projection
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.products import few
from eyas.engine.kernels.products.blocks import RowSquares, StoredWeight, quantise
from eyas.engine.kernels.products.skinny import ProductLaunch
from tests.unit.crossed import crossed
from tests.unit.grouped_products import CLOSE_IN_FP8, DEVICE, PDL, in_kind, random

SHAPES = [(2112, 896), (96, 2048), (48, 1008), (16, 128), (272, 3072)]  # of columns and k that end anywhere


def plainly(x: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """In float64, of what the parts of both stand for."""
    assert weight.scales is not None and weight.rounding is not None
    read, (n, k) = quantise(x, weight.rounding), weight.shape
    scales = weight.scales.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    rows = read.stored.double() * read.scales.double().repeat_interleave(128, 1)[:, :k]
    return rows @ (weight.stored.double() * scales.double()).T


@pytest.mark.parametrize(
    ("rows", "shape", "kind"),
    crossed(
        [2, 5, 8],
        SHAPES,
        ["blocks", "powers"],
        quick=lambda rows, shape, kind: (
            shape[0] < 2112 and (rows == 5 if kind == "blocks" else rows == 8 and shape == (96, 2048))
        ),
    ),
)
def test_it_is_the_product(rows: int, shape: tuple[int, int], kind: str) -> None:
    n, k = shape
    x = random(rows, k, seed=3).to(DEVICE)
    weight = in_kind(random(n, k, seed=4) / k**0.5, kind)
    assert weight.scales is not None and weight.rounding is not None
    for block in range(weight.scales.shape[1]):  # no two neighbours are alike
        weight.scales[:, block] *= 1 + block % 5
    read = quantise(x, weight.rounding)
    assert few.takes(rows, weight)
    found, expected = few.dense(read, weight, PDL).double(), plainly(x, weight)
    assert (found - expected).norm() < 1e-6 * expected.norm()
    tiled = GroupedProducts(ProductLaunch.on(DEVICE, pdl=PDL)).dense(read, weight).double()
    assert (found - tiled).norm() < CLOSE_IN_FP8 * expected.norm()


@pytest.mark.parametrize("rows", [1, 5, 8, 20])
def test_a_norm_may_be_left_to_the_product(rows: int) -> None:
    """By one row's kernel, by few rows' and by any rows', whose k is shared: each row has its own factor."""
    k, parts = 1536, 6
    weight = in_kind(random(96, k, seed=5) / k**0.5, "blocks")
    assert weight.rounding is not None
    read = quantise(random(rows, k, seed=6).to(DEVICE), weight.rounding)
    sums = (random(rows, parts, seed=7).square() * k).to(DEVICE)
    products = GroupedProducts(ProductLaunch.on(DEVICE, pdl=PDL))
    plain = Fp8Projection(weight).apply(read, products)
    found = Fp8Projection(weight).apply(replace(read, squares=RowSquares(sums, 0.5)), products)
    expected = plain * (sums.sum(1, keepdim=True) / k + 0.5).rsqrt()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert (found - plain).norm() > 0.1 * plain.norm()


def test_others_go_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows, scales of whole rows, much of a weight, one row, and exact arithmetic."""
    taken: list[int] = []
    monkeypatch.setattr(few, "dense", lambda x, weight, pdl: taken.append(len(x.stored)))
    x, weight = random(9, 256).to(DEVICE), in_kind(random(64, 256), "blocks")
    shared, exact = (
        GroupedProducts(ProductLaunch.on(DEVICE, pdl=PDL, exact=exact)) for exact in (False, True)
    )
    for products, count in ((shared, 1), (shared, 2), (shared, 8), (shared, 9), (exact, 2)):
        Fp8Projection(weight).apply(x[:count], products)
    Fp8Projection(in_kind(random(64, 256), "token")).apply(x[:2], shared)
    assert taken == [2, 8]


def empty(n: int, k: int) -> StoredWeight:
    scales = torch.empty(-(-n // 128), -(-k // 128), device="meta")
    return StoredWeight(torch.empty(n, k, device="meta"), scales, RowRounding("block"))


def test_a_weight_must_fit_into_registers() -> None:
    assert few.takes(2, empty(7168, 2048)) and few.takes(2, empty(16, 8192))
    assert not few.takes(2, empty(16, 8193)) and not few.takes(2, empty(8192, 4096))
