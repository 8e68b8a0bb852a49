"""The exact kernels on a GPU: every row has the same bits in every company, and a wrong cut is noticed.

The tables of kernels and compositions are those of tests/bits; here they have the shapes of an 8B model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest
import torch

from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.kernels.attention.exact_attend import AttentionCut
from eyas.engine.kernels.attention.exact_parts import PartSizes
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation
from eyas.engine.kernels.experts.grouped_tiles import TILES
from eyas.engine.kernels.products import exact_wide, skinny
from eyas.engine.kernels.products.skinny_tiles import ProductTile, tile_for
from tests.bits.attention import Exact, Path, Tokens, Tree, branching
from tests.bits.compare import Composition, Difference, differences
from tests.bits.grouped import DenseRows, ExpertRows, Where
from tests.bits.grouped import compositions as grouped_compositions
from tests.bits.latents import Latents
from tests.bits.products import (
    PackedRows,
    Product,
    ProductRows,
    WidenedRows,
    WideRows,
    WideWidenedRows,
    compositions,
    cut_by,
)
from tests.gpu import atomic_sums

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
]

PRODUCTS = (
    Product("linear", 4096, 4096),
    Product("linear", 4096, 14336),
    Product("linear", 32000, 4096),
    Product("gated", 28672, 4096),
    Product("qkv", 6144, 4096),
    Product("heads", 6144, 4096),
)
OTHER_CUTS = (
    (
        ProductTile(128, 64, 8, 3),
        ProductTile(64, 64, 4, 3),
        ProductTile(128, 128, 8, 3, split=2),
        ProductTile(128, 64, 8, 3),
    ),
    (
        ProductTile(64, 256, 4, 3),
        ProductTile(128, 128, 4, 3),
        ProductTile(64, 64, 8, 4),
        ProductTile(64, 256, 8, 2, split=2),
    ),
)
IDS: Path = tuple(range(17000))
OTHERS = range(17000, 17064)
ALONE = AttentionCut(16, 1, 4)


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens(17064, (8, 2, 128), "cuda", torch.bfloat16)


def few(found: Sequence[Difference]) -> list[str]:
    return [str(difference) for difference in found[:5]]


# --- products --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda p: f"{p.kind}-{p.n}-{p.k}")
def test_rows_of_products(product: Product) -> None:
    """All counts up to 128 as they are cut by default; some by other tiles, warps and steps of k."""
    rows = ProductRows(product, "cuda", torch.bfloat16)
    launches = [skinny.ProductLaunch.on("cuda", pdl=pdl, exact=True) for pdl in (False, True)]
    runs = [compositions(rows, launch, range(1, 129), stride=37) for launch in launches]
    if product.kind in ("linear", "gated"):
        cut = (cut_by(launches[0], product, cuts) for cuts in OTHER_CUTS)
        runs += [compositions(rows, launch, (3, 16, 30, 60, 128), stride=51) for launch in cut]
    assert few(differences(chain.from_iterable(runs))) == []


@pytest.mark.parametrize(
    "product", [p for p in PRODUCTS if p.n != 32000], ids=lambda p: f"{p.kind}-{p.n}-{p.k}"
)
def test_rows_of_products_of_four_bits(product: Product) -> None:
    """They have the bits of the matrix that the numbers mean, in any company."""
    launch = skinny.ProductLaunch.on("cuda", pdl=True, exact=True)
    narrow, *ways = (
        way(product, "cuda", torch.bfloat16) for way in (PackedRows, WidenedRows, WideWidenedRows)
    )
    runs = [Composition(type(way).__name__, partial(way.run, range(128), launch)) for way in ways]
    counts = (1, 8, 16, 17, 40, 64, 100, 128)
    assert few(differences([*runs, *compositions(narrow, launch, counts, stride=37)])) == []


@pytest.mark.parametrize("cublas", [True, False])
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda p: f"{p.kind}-{p.n}-{p.k}")
def test_the_wide_way(product: Product, cublas: bool) -> None:
    """By cuBLAS and by the kernel that stands in for it, against the narrow way."""
    launch = skinny.ProductLaunch.on("cuda", pdl=False, exact=True)
    narrow = compositions(ProductRows(product, "cuda", torch.bfloat16), launch, (128,))
    wide = WideRows(product, "cuda", torch.bfloat16)
    runs = compositions(wide, replace(launch, cublas=cublas), (128, 100, 40), stride=37)
    assert few(differences(chain(narrow, runs))) == []


def test_a_cut_of_k_by_the_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ProductRows(PRODUCTS[0], "cuda", torch.bfloat16)
    monkeypatch.setattr(skinny, "exact_tile_for", tile_for)
    launch = skinny.ProductLaunch.on("cuda", pdl=False, exact=True)
    assert differences(compositions(rows, launch, (16, 64)))


def test_todays_sums_by_tile_are_noticed() -> None:
    product = Product("linear", 4096, 4096)
    rows = ProductRows(product, "cuda", torch.bfloat16)
    launch = skinny.ProductLaunch.on("cuda", pdl=False)
    cuts = [cut_by(launch, product, [ProductTile(columns, 64, 4, 3)] * 4) for columns in (64, 128)]
    assert differences(Composition(str(i), partial(rows.run, range(128), cut)) for i, cut in enumerate(cuts))


def test_sums_by_atomics_are_noticed() -> None:
    """Sixteen stretches of k, added up as they come, are not one fold."""
    x, weight = (torch.randn(rows, 14336, device="cuda").bfloat16() for rows in (512, 4096))
    launch = skinny.ProductLaunch.on("cuda", pdl=False, exact=True)
    found, exact = atomic_sums.product(x, weight), exact_wide.product(x, weight, launch)
    torch.testing.assert_close(found, exact, rtol=0.02, atol=1.0)
    assert not torch.equal(found, exact)


# --- experts, and other grouped products ----------------------------------------------------------------

QWEN = ExpertsSpec(width=768, experts=128, per_row=8, scores="softmax", normalised=True)
MIXTRAL = ExpertsSpec(width=14336, experts=8, per_row=2, scores="softmax", normalised=True)
BF16 = Where("cuda", torch.bfloat16)
FEW_AND_MANY = (1, 2, 7, 16, 33, 64, 100, 128, 129, 257, 400)


def grouped(exact: bool = True) -> GroupedProducts:
    return GroupedProducts(skinny.ProductLaunch.on("cuda", pdl=False, exact=exact), TILES.measured("cuda"))


@pytest.mark.parametrize(("spec", "hidden"), [(QWEN, 2048), (MIXTRAL, 4096)], ids=["qwen", "mixtral"])
def test_rows_of_experts(spec: ExpertsSpec, hidden: int) -> None:
    table = ExpertRows(spec, hidden, BF16)
    assert few(differences(grouped_compositions(table, grouped(), FEW_AND_MANY))) == []


ROUNDINGS = (
    RowRounding("block"),
    RowRounding("block", powers=True),
    RowRounding("token"),
    RowRounding("tensor", scale=0.05),
)


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
def test_rows_of_weights_in_fp8(rounding: RowRounding) -> None:
    """Wide weights and narrow ones, gated and not, and experts."""
    where = replace(BF16, rounding=rounding)
    tables = [DenseRows(n, k, where) for n, k in ((4096, 14336), (4096, 4096), (6144, 4096))]
    tables += [DenseRows(28672, 4096, where, GateActivation()), ExpertRows(QWEN, 2048, where)]
    for table in tables:
        assert few(differences(grouped_compositions(table, grouped(), FEW_AND_MANY))) == []


def test_the_fast_cut_of_a_dense_weight_is_noticed() -> None:
    table = DenseRows(2048, 4096, BF16)
    assert few(differences(grouped_compositions(table, grouped(), FEW_AND_MANY))) == []
    assert differences(grouped_compositions(table, grouped(exact=False), FEW_AND_MANY))


# --- attention -------------------------------------------------------------------------------------------


def bounds() -> list[int]:
    """Lengths about every kind of bound: of a block, of parts of each size, and of the sizes."""
    about = (64, 128, 576, 1984, 2048, 2560, 8192, 16384)
    return [end + i for end in about for i in range(-2, 3)]


def plain(tokens: Tokens, ends: Sequence[int]) -> Iterator[Composition]:
    exact = Exact(tokens, PartSizes(), ALONE)
    for end in ends:
        yield Composition(f"row {end} alone", partial(exact.rows, [IDS[:end]]))


def test_rows_and_chains(tokens: Tokens) -> None:
    """At every bound and at lengths up to 600, alone and in batches of 8, in chains of up to 8."""
    exact, ends = Exact(tokens, PartSizes()), [*bounds(), *range(1, 600, 7)]
    batches = [ends[i : i + 8] for i in range(0, len(ends), 8)]
    runs = [Composition(f"batch {b}", partial(exact.rows, [IDS[:end] for end in b])) for b in batches]
    for width in range(2, 9):
        paths = [IDS[:end] for end in bounds() if end >= 62]
        runs.append(Composition(f"chains of {width}", partial(exact.rows, paths, width)))
    assert few(differences(chain(plain(tokens, ends), runs))) == []


def test_chunks_of_one_prompt_cut_anywhere(tokens: Tokens) -> None:
    exact = Exact(tokens, PartSizes())
    ends = range(1, 701, 11)
    cuts = [
        Composition(f"chunk from {start} on", partial(exact.chunks, [(IDS[:700], start)]))
        for start in range(0, 700, 23)
    ]
    cuts.append(Composition("by programs of 64 rows", partial(exact.chunks, [(IDS[:700], 0)], 64)))
    long = Composition("after a prefix", partial(exact.chunks, [(IDS[:16400], 16300), (IDS[:2100], 1990)]))
    rows = plain(tokens, [*ends, 16384, 16385, 2048, 2049])
    assert few(differences(chain(rows, cuts, [long]))) == []


def test_trees(tokens: Tokens) -> None:
    """Spines of 2 to 32 nodes with as many siblings, from starts about every bound, against plain rows."""
    exact = Exact(tokens, PartSizes())
    for depth in (1, 3, 8, 32):
        starts = [bound - depth // 2 for bound in bounds() if bound > 40]
        trees = [branching(IDS[:n], IDS[n : n + depth], OTHERS[:depth]) for n in starts]
        ends = sorted({end for n in starts for end in (n + 1, n + depth)})
        runs = Composition(f"trees of {depth}", partial(exact.trees, trees))
        assert few(differences(chain(plain(tokens, ends), [runs]))) == []


def test_a_tree_that_is_a_chain(tokens: Tokens) -> None:
    exact = Exact(tokens, PartSizes())
    trees = [Tree(IDS[:n], tuple(range(-1, 63)), IDS[n : n + 64]) for n in (100, 1990, 16350)]
    chains = Composition("chains", partial(exact.rows, [IDS[: len(tree.trunk) + 64] for tree in trees], 64))
    assert few(differences([chains, Composition("trees", partial(exact.trees, trees))])) == []


def test_parts_by_the_batch_are_noticed(tokens: Tokens) -> None:
    longer = Exact(tokens, replace(PartSizes(), near=256), ALONE)
    batch = Composition("batch", partial(longer.rows, [IDS[:600], IDS[:9]]))
    assert differences(chain(plain(tokens, [600]), [batch]))


def test_sharing_a_program_differently_changes_nothing(tokens: Tokens) -> None:
    cuts = [AttentionCut(16, shares, warps) for shares in (1, 2, 5, 16) for warps in (2, 4, 8)]
    cuts += [AttentionCut(rows, 3, 8, stages) for rows in (32, 64, 128) for stages in (2, 3)]
    cuts += [AttentionCut(16, 3, 4, registers=most) for most in (128, 168)]
    paths = [IDS[:end] for end in (16400, 3000, 700)]
    runs = [Composition(str(cut), partial(Exact(tokens, PartSizes(), cut).rows, paths)) for cut in cuts]
    assert few(differences(runs)) == []


# --- latents ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def latents() -> Latents:
    """Of 128 heads, as DeepSeek-V3 has them."""
    return Latents(17064, (128, 512, 64), "cuda", torch.bfloat16, PartSizes())


def test_latents_of_rows_chains_chunks_and_trees(latents: Latents) -> None:
    ends = [end for end in bounds() if end > 60]
    runs = [Composition(f"row {end} alone", partial(latents.rows, [IDS[:end]])) for end in ends]
    batches = [ends[i : i + 8] for i in range(0, len(ends), 8)]
    runs += [Composition(f"batch {b}", partial(latents.rows, [IDS[:end] for end in b])) for b in batches]
    for width in (2, 5, 32):
        paths = [IDS[: end + width // 2] for end in ends]
        runs.append(Composition(f"chains of {width}", partial(latents.rows, paths, width)))
    cut = [(IDS[: end + 3], end - 3) for end in ends]
    runs.append(Composition("chunks", partial(latents.chunks, cut)))
    trees = [branching(IDS[: end - 2], IDS[end - 2 : end + 6], OTHERS[:8]) for end in ends]
    runs.append(Composition("trees", partial(latents.trees, trees)))
    assert few(differences(runs)) == []


def test_latents_by_other_parts_are_noticed(latents: Latents) -> None:
    longer = Latents(17064, (128, 512, 64), "cuda", torch.bfloat16, replace(PartSizes(), near=256))
    runs = {"usual": latents, "longer": longer}
    assert differences(Composition(name, partial(of.rows, [IDS[:600]])) for name, of in runs.items())
