"""A row of a narrow product has one set of bits, however many rows there are and however they are cut.

Triton's interpreter runs the kernels, with `tensor_core`'s model of Hopper's matrix unit. So this shows that
the cut of k, the sums and the epilogues follow the weight alone, and that by the model nothing else matters;
that the hardware follows the model, tests/gpu shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products import skinny
from eyas.engine.kernels.products.skinny_tiles import (
    MEASURED,
    ProductShape,
    ProductTile,
    exact_tile_for,
    stretches_of,
    tile_for,
)
from eyas.engine.loading.bit_checks import FoldedWeight, packed_alike
from tests.bits.compare import Composition, Difference, differences
from tests.bits.products import (
    PackedRows,
    Product,
    ProductRows,
    WidenedRows,
    WideRows,
    WideWidenedRows,
    compositions,
    cut_by,
    halved,
)
from tests.unit import tensor_core

COUNTS = (1, 17, 40)
CUTS = (
    ProductTile(64, 32, 4, 2),
    ProductTile(128, 16, 4, 2),
    ProductTile(64, 64, 4, 2, split=2),
    ProductTile(128, 32, 4, 2, split=2),
)
LINEAR, GATED = Product("linear", 2048, 32), Product("gated", 128, 64)
QKV, HEADS = Product("qkv", 96, 64, dim=32), Product("heads", 96, 64, dim=32)
TALL_HEADS = Product("heads", 4096, 32)
"""Cut into two stretches, where a linear product of its shape is one."""


@pytest.fixture(autouse=True)
def _matrix_unit() -> Iterator[None]:
    with tensor_core.hopper():
        yield


@pytest.mark.parametrize("product", [GATED, QKV, HEADS], ids=lambda product: product.kind)
def test_a_row_has_the_same_bits_in_any_company(product: Product) -> None:
    assert said(found(product, CUTS, COUNTS)) == []


@pytest.mark.slow
def test_a_product_with_residual_and_sums_too() -> None:
    """At 16 and 32 rows one program takes both stretches of k, at 64 and 128 two of them one each."""
    shapes = [ProductShape("linear", rows, LINEAR.n, LINEAR.k, LINEAR.n) for rows in (16, 128)]
    tiles = [exact_tile_for(shape, 2, LINEAR.table(CUTS)) for shape in shapes]
    assert [(tile.split, tile.folds) for tile in tiles] == [(1, 2), (2, 1)]
    assert said(found(LINEAR, CUTS, (1, 40))) == []


WIDE = [Product("linear", 128, 64), GATED, QKV, HEADS, TALL_HEADS]


@pytest.mark.parametrize(
    "product",
    [pytest.param(p, id=f"{p.kind}-{p.n}", marks=pytest.mark.slow if p.n == 4096 else ()) for p in WIDE],
)
def test_a_row_has_the_same_bits_on_the_wide_way(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cuBLAS folds k in order: here the model of the matrix unit stands for it."""
    launch = skinny.ProductLaunch.on("cpu", pdl=False, exact=True)
    ways = [ProductRows(product, "cpu", torch.float16), WideRows(product, "cpu", torch.float16)]
    runs = [Composition(type(way).__name__, partial(way.run, range(20), launch)) for way in ways]
    assert said(differences(runs)) == []


PACKED = [Product("linear", 64, 512), Product("gated", 64, 256), Product("heads", 96, 512, dim=32)]


@pytest.mark.parametrize("product", PACKED, ids=lambda product: product.kind)
def test_packed_numbers_have_the_bits_of_the_matrix_that_they_mean(product: Product) -> None:
    """In any company, and on the wide way. Stretches end within a step of 256 columns."""
    launch = skinny.ProductLaunch.on("cpu", pdl=False, exact=True)
    ways = [way(product, "cpu", torch.float16) for way in (PackedRows, WidenedRows, WideWidenedRows)]
    runs = [Composition(type(way).__name__, partial(way.run, range(3), launch)) for way in ways]
    runs += compositions(ways[0], launch, (17,))
    assert said(differences(runs)) == []


def test_a_start_compares_packed_numbers_with_what_they_mean() -> None:
    weights = [FoldedWeight("linear", 32, 256, 32), FoldedWeight("linear", 32, 48, 32)]
    exact, fast = (skinny.ProductLaunch.on("cpu", pdl=False, exact=exact) for exact in (True, False))
    assert packed_alike(weights, exact, torch.float16)
    assert not packed_alike(weights, fast, torch.float16)


def test_fast_sums_of_packed_numbers_are_noticed() -> None:
    launches = [skinny.ProductLaunch.on("cpu", pdl=False, exact=exact) for exact in (True, False)]
    rows = PackedRows(PACKED[1], "cpu", torch.float16)
    runs = [Composition(str(each.exact), partial(rows.run, range(3), each)) for each in launches]
    assert len(differences(runs)) == 3


def test_a_cut_of_k_by_the_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stretches at 64 rows, one at 16: as today."""
    monkeypatch.setattr(skinny, "exact_tile_for", tile_for)
    noticed = found(GATED, CUTS, (1, 17, 40))
    assert {difference.other.split()[0] for difference in noticed} == {"40"}
    assert min(difference.ulps for difference in noticed) > 0


def test_sums_by_tile_are_noticed() -> None:
    """Of 64 columns each in one cut, of 128 in the other: as today."""
    rows = ProductRows(Product("linear", 256, 64), "cpu", torch.float16)
    launches = [skinny.ProductLaunch.on("cpu", pdl=False, exact=exact) for exact in (True, False)]
    counts = []
    for launch in launches:
        cuts = [cut_by(launch, rows.product, [cut] * 4) for cut in (CUTS[0], replace(CUTS[1], depth=32))]
        cuts = [replace(cut, tiles={k: replace(t, split=1) for k, t in cut.tiles.items()}) for cut in cuts]
        runs = [Composition(str(i), partial(rows.run, range(40), cut)) for i, cut in enumerate(cuts)]
        counts.append(len(differences(runs)))
    assert counts[0] == 0 < counts[1]


@pytest.mark.parametrize("width", [96, 64, 512])
def test_row_kernels_leave_the_sums_that_products_leave(width: int) -> None:
    """Groups of 64 columns, or of what divides the row; each added up in the order of `halved`."""
    rows = torch.randn(5, width).half()
    group = skinny.sum_group(width)
    expected = halved(rows.float().square().view(5, -1, group))
    _, sums = row_kernels.embed(torch.tensor([3, 0, 4], dtype=torch.int32), rows, sums=True, exact=True)
    assert sums is not None and torch.equal(sums[:, :3].t(), expected[[3, 0, 4]])
    residual, gain = torch.randn(5, width).half(), torch.ones(width).half()
    sums = row_kernels.add_normed(rows, residual, gain, 1e-5, exact=True)
    assert torch.equal(sums[:, :5].t(), halved(residual.float().square().view(5, -1, group)))


def test_the_final_norm_adds_up_in_the_same_order() -> None:
    rows = torch.randn(4, 96).half() * 50
    scale = torch.rsqrt(halved(rows.float().square()) / 96 + 1e-5)[:, None]
    torch.testing.assert_close(row_kernels.norm(rows, 1e-5, exact=True), (rows.float() * scale).half())


@pytest.mark.parametrize("kind", ["linear", "gated", "qkv", "heads"])
def test_k_is_cut_by_the_weight_alone(kind: str) -> None:
    for (measured, _, n, k), _ in MEASURED.items():
        span = 128 if kind in ("qkv", "heads") else n
        tiles = [exact_tile_for(ProductShape(kind, rows, n, k, span), 2) for rows in (16, 32, 64, 128)]
        assert len({tile.split * tile.folds for tile in tiles}) == 1
        assert measured != "linear" or stretches_of(ProductShape("linear", 16, n, k, n)) == (
            2 if k > n else 1
        )


def test_the_model_of_the_matrix_unit_is_a_left_fold_of_sixteens() -> None:
    """What the model says of orders of k; from "MMA-Sim", arXiv 2511.10909."""
    random = np.random.default_rng(0)
    a = (random.standard_normal((40, 256)) * np.exp2(random.integers(-6, 7, (40, 256)))).astype(np.float16)
    b, zeros = random.standard_normal((256, 3)).astype(np.float16), np.zeros((40, 3), np.float32)
    plain = tensor_core.multiply_add(a, b, zeros)
    within = np.arange(256).reshape(-1, 16)[:, ::-1].ravel()
    across = np.arange(256).reshape(-1, 32)[:, ::-1].ravel()
    assert np.array_equal(tensor_core.multiply_add(a[:, within], b[within], zeros), plain)
    assert not np.array_equal(tensor_core.multiply_add(a[:, across], b[across], zeros), plain)
    assert np.array_equal(tensor_core.multiply_add(b.T, a.T, zeros.T).T, plain)
    halves = [tensor_core.multiply_add(a[:, k], b[k], zeros) for k in (slice(128), slice(128, None))]
    assert not np.array_equal(halves[0] + halves[1], plain)
    assert np.array_equal(tensor_core.multiply_add(a[:, 128:], b[128:], halves[0]), plain)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(plain - exact).max() < 1e-4 * np.abs(exact).max()


def found(product: Product, cuts: Sequence[ProductTile], counts: Sequence[int]) -> list[Difference]:
    rows = ProductRows(product, "cpu", torch.float16)
    launch = cut_by(skinny.ProductLaunch.on("cpu", pdl=False, exact=True), product, cuts)
    return differences(compositions(rows, launch, counts))


def said(differences: Sequence[Difference]) -> list[str]:
    return [str(difference) for difference in differences]
