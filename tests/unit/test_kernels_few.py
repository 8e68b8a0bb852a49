"""Products of a few rows whose weights wait: against plain torch, and the way of any number of rows."""

from __future__ import annotations

import pytest
import torch

from eyas.engine.kernels import few
from eyas.engine.kernels.blocks import Fp8Weight, quantise
from eyas.engine.kernels.grouped import Products
from eyas.engine.kernels.skinny import Launch
from tests.unit.crossed import crossed
from tests.unit.test_kernels_grouped import CLOSE_IN_FP8, DEVICE, PDL, in_kind, random

SHAPES = [(2112, 896), (96, 2048), (48, 1008), (16, 128), (272, 3072)]  # of columns and k that end anywhere


def plainly(x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """In float64, of what the parts of both stand for."""
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
        quick=lambda rows, shape, kind: rows == (8 if kind == "powers" else 5) and shape[0] < 2112,
    ),
)
def test_it_is_the_product(
    rows: int, shape: tuple[int, int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, k = shape
    x = random(rows, k, seed=3).to(DEVICE)
    weight = in_kind(random(n, k, seed=4) / k**0.5, kind)
    assert isinstance(weight, Fp8Weight)
    for block in range(weight.scales.shape[1]):  # no two neighbours are alike
        weight.scales[:, block] *= 1 + block % 5
    read = quantise(x, weight.rounding)
    assert few.takes(rows, weight)
    found, expected = few.dense(read, weight, PDL).double(), plainly(x, weight)
    assert (found - expected).norm() < 1e-6 * expected.norm()
    monkeypatch.setattr(few, "takes", lambda *_: False)
    tiled = Products(Launch.on(DEVICE, pdl=PDL)).dense(read, weight).double()
    assert (found - tiled).norm() < CLOSE_IN_FP8 * expected.norm()


def test_others_go_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows, scales of whole rows, much of a weight, one row, and exact arithmetic."""
    taken: list[int] = []
    monkeypatch.setattr(few, "dense", lambda x, weight, pdl: taken.append(len(x.stored)))
    x, weight = random(9, 256).to(DEVICE), in_kind(random(64, 256), "blocks")
    shared, exact = (Products(Launch.on(DEVICE, pdl=PDL, exact=exact)) for exact in (False, True))
    for products, count in ((shared, 1), (shared, 2), (shared, 8), (shared, 9), (exact, 2)):
        products.dense(x[:count], weight)
    shared.dense(x[:2], in_kind(random(64, 256), "token"))
    assert taken == [2, 8]


def empty(n: int, k: int) -> Fp8Weight:
    return Fp8Weight(torch.empty(n, k, device="meta"), torch.empty(-(-n // 128), -(-k // 128), device="meta"))


def test_a_weight_must_fit_into_registers() -> None:
    assert few.takes(2, empty(7168, 2048)) and few.takes(2, empty(16, 8192))
    assert not few.takes(2, empty(16, 8193)) and not few.takes(2, empty(8192, 4096))
