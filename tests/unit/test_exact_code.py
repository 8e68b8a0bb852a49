"""What the compiler makes of the exact kernels for Hopper: no fused multiply-adds, and k in ascending order.

Nothing runs; this reads PTX. Whether the matrix unit then adds up as its model says, tests/gpu shows.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.kernels.attention.attend import QueryRows
from eyas.engine.kernels.attention.exact_attend import AttentionCut, ExactLaunch
from eyas.engine.kernels.attention.exact_paths import attend_exactly
from eyas.engine.kernels.attention.exact_prefill import attend_chunks_exactly
from eyas.engine.kernels.attention.paged import PagedKv
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kernels.exchange.exact_ranks import add_in_order
from eyas.engine.kernels.experts import combine
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation
from eyas.engine.kernels.latent.exact_latents import attend_latent_chunks_exactly, attend_latents_exactly
from eyas.engine.kernels.latent.latent_products import absorb, values
from eyas.engine.kernels.launch.warm import KernelWarmup
from eyas.engine.kernels.products import exact_wide, skinny
from eyas.engine.kernels.products.blocks import StoredWeight
from eyas.engine.kernels.products.skinny_tiles import ProductTile
from eyas.engine.parallel.one_shot import OneShot
from tests.bits.products import Product, cut_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OTHERS = (("attention", 4), ("ruled", 4), ("wide", 8), ("ranks", 4), ("latents", 6))
DEPTHS = (64, 128, 256)
LINEAR, DEEP = Product("linear", 4096, 4096), Product("linear", 4096, 8192)
MATRIX = re.compile(r"wgmma\.mma_async[^{]*\{([^}]*)\}, (%rd\d+), (%rd\d+)")
MOVED = re.compile(r"(?:add\.s64|or\.b64)\s+(%rd\d+), (%rd\d+), (-?\d+);")
STEP = 2  # of a descriptor, in units of 16 bytes: 16 numbers of 16 bits


def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*sizes, dtype=dtype, device="meta")


def products() -> None:
    """A product by steps of every depth, by one program for both halves of k and by two."""
    x, weight, out = empty(16, DEEP.k), empty(DEEP.n, DEEP.k), empty(16, DEEP.n)
    shared = skinny.ProductLaunch.on("meta", pdl=True, exact=True)
    for depth in DEPTHS:
        for split in (1, 2):
            launch = cut_by(shared, DEEP, [ProductTile(64, depth, 4, 3, split)] * 4)
            source = skinny.SkinnyInput(x)
            sums = empty(skinny.linear_parts(source, weight, launch), 128, dtype=torch.float32)
            skinny.linear(source, weight, out, launch, skinny.LinearEnd(out, sums))


def wide() -> None:
    """What stands between the products of many rows: without norms of heads, and with them and a bias."""
    x, scales = empty(200, LINEAR.k), empty(200, dtype=torch.float32)
    positions, pool = empty(200, dtype=torch.int32), empty(4, 2, 16, 8, 128)
    exact_wide.settle(x, 1e-5)
    exact_wide.settle(x, 1e-5, x)
    exact_wide.settle(x, 1e-5, empty(2, *x.shape, dtype=torch.float32), pdl=True)
    exact_wide.settle(x, 1e-5, x, empty(LINEAR.k))
    for gelu in (False, True):
        exact_wide.act_mul(empty(200, 1024), scales, gelu)
    angles = empty(64, 64, dtype=torch.float32)
    for bias, norms in ((None, None), (empty(6144), skinny.HeadNorms(empty(2, 128), 1e-5))):
        after = exact_wide.AfterQkv(bias, norms)
        rotation = skinny.RotaryInput(angles, angles, positions)
        kv = skinny.KvRows(pool, positions)
        exact_wide.rope_write(empty(200, 6144), scales, after, empty(200, 32, 128), rotation, kv)


def grouped() -> None:
    """Products of experts, for few rows and many, and their sum; a dense one by two programs and by one."""
    shared = GroupedProducts(skinny.ProductLaunch.on("meta", pdl=True, exact=True))
    gate_up, down = (StoredWeight(empty(64, *sizes)) for sizes in ((1536, LINEAR.k), (LINEAR.k, 768)))
    for count in (1, 4096):
        order = shared.group(empty(count, 8, dtype=torch.int32), (gate_up, down))
        inner = shared.gate_up(empty(count, LINEAR.k), gate_up, order, 8, GateActivation())
        made, weights = shared.down(inner, down, order), empty(count, 8, dtype=torch.float32)
        if count == 1:
            combine.combine_add(made, weights, None, empty(count, LINEAR.k), pdl=True, exact=True)
        else:
            combine.combine(made, weights, pdl=True, exact=True)
        shared.dense(empty(count, LINEAR.k), StoredWeight(empty(LINEAR.n, LINEAR.k)))


def fp8() -> None:
    """Dense products of weights in blocks and by channels, by two programs and by one."""
    shared = GroupedProducts(skinny.ProductLaunch.on("meta", pdl=True, exact=True))
    stored = empty(LINEAR.n, LINEAR.k, dtype=torch.float8_e4m3fn)
    scales = empty(LINEAR.n // 128, LINEAR.k // 128, dtype=torch.float32)
    weights = (
        StoredWeight(stored, scales, RowRounding("block")),
        StoredWeight(stored, empty(LINEAR.n, dtype=torch.float32), RowRounding("token")),
    )
    for weight in weights:
        for count in (1, 4096):
            shared.dense(empty(count, LINEAR.k), weight)


def latents() -> None:
    """Rows by several programs and by one, a tree, and a prompt's chunk; and the products of heads."""
    kv = PagedKv(empty(4, 2, 1, 64, 1, 576)[:, 1], empty(4, 512, dtype=torch.int32), ScoreScaling(0.1))
    launch, one = ExactLaunch.on(kv, 128, 64, pdl=True), empty(1, dtype=torch.int32)
    for width, mask in ((1, None), (32, None), (8, empty(1, 1, 8, dtype=torch.int64))):
        queries = QueryRows(one, one, width, mask)
        attend_latents_exactly(empty(width, 128, 576), kv, queries, launch, empty(width, 128, 512))
    tiles = empty(64, 4, dtype=torch.int32)
    attend_latent_chunks_exactly(empty(64, 128, 576), kv, tiles, empty(64, 128, 512))
    angles = empty(64, 32, dtype=torch.float32)
    turned = skinny.RotaryInput(angles, angles, empty(64, dtype=torch.int32))
    absorb(empty(64, 128 * 192), empty(128, 128, 512), turned, pdl=True, exact=True)
    values(empty(64, 128, 512), empty(128, 128, 512), empty(64, 128 * 128), pdl=True, exact=True)


def ranks() -> None:
    """Sums over two ranks, small ones and any; with a residual and sums of squares, and without."""
    rows = empty(8, 512)
    sums = empty(8, 128, dtype=torch.float32)
    one_shot = OneShot(1, torch.zeros(2, dtype=torch.int64, device="meta"), pdl=True)
    for residual, squares in ((None, None), (rows, sums)):
        one_shot(rows, residual, squares, exact=True)
        add_in_order(empty(2, 8, 512), rows, residual, squares)


def ruled() -> None:
    """As `attention`, in a layer with a window and with a soft cap."""
    attention(ScoreScaling(0.1, window=1000, soft_cap=30.0))


def attention(rule: ScoreScaling | None = None) -> None:
    """Plain rows, a tree, and a prompt's chunk."""
    kv = PagedKv(empty(4, 2, 2, 16, 8, 128)[:, 1], empty(4, 512, dtype=torch.int32), rule)
    launch, slots = ExactLaunch.on(kv, 32, 32, pdl=True), empty(1, dtype=torch.int32)
    for width, cut in ((1, AttentionCut(16, 4, 4)), (32, AttentionCut(128, 4, 8))):
        mask = empty(1, 1, width, dtype=torch.int64) if width > 1 else None
        attend_exactly(empty(width, 32, 128), kv, QueryRows(slots, slots, width, mask), launch, cut)
    attend_chunks_exactly(empty(64, 32, 128), kv, empty(2, 4, dtype=torch.int32))


def codes(recipe: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """PTX of each kernel that it launches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that what the warm-up sets is undone
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    KernelWarmup(f"tests.unit.test_exact_code:{recipe}", (), 90, processes=2).wait()
    return [path.read_text() for path in folder.rglob("*.ptx")]


def ascending(code: str) -> bool:
    """Whether each accumulator's products, until the next barrier, come in the order of k."""
    moved = {to: (base, int(by) & 0xFFFF) for to, base, by in MOVED.findall(code)}
    places: dict[str, list[int]] = {}
    for accumulator, weight, _ in MATRIX.findall(code):
        places.setdefault(accumulator, []).append(moved[weight][1])
    first = [group[i : i + 4] for group in places.values() for i in range(0, len(group), 4)]
    return bool(first) and all(b - a == STEP for four in first for a, b in zip(four, four[1:], strict=False))


def test_products_take_k_in_ascending_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = codes("products", tmp_path, monkeypatch)
    assert len(found) == 2 * len(DEPTHS)
    for code in found:
        assert "fma.rn" not in code and "red.global.add.f32" not in code
        assert ascending(code)


def test_grouped_products_do_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = codes("grouped", tmp_path, monkeypatch)
    assert not any("fma.rn" in code or "red.global.add.f32" in code for code in found)
    products = [code for code in found if MATRIX.search(code)]
    assert len(products) == 6 and all(map(ascending, products))


def test_products_in_fp8_fuse_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    products = [code for code in codes("fp8", tmp_path, monkeypatch) if "wgmma" in code]
    assert len(products) == 4
    assert not any("fma.rn" in code or "red.global.add.f32" in code for code in products)


def waited(code: str) -> bool:
    """Whether no branch comes while the matrix unit is at work: behind one, results might be read."""
    working = False
    for line in code.splitlines():
        if "wgmma.commit_group" in line:
            working = True
        elif "wgmma.wait_group" in line:
            working = False
        elif working and re.search(r"\bbra\b", line):
            return False
    return True


@pytest.mark.parametrize("recipe", ["attention", "ruled"])
def test_attention_waits_for_the_matrix_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """Triton 3.6 forgets to where a product's result is read under an `if` of the same iteration."""
    found = codes(recipe, tmp_path, monkeypatch)
    assert any("wgmma" in code for code in found) and all(map(waited, found))
    assert not waited("wgmma.commit_group;\nbra.uni $L;\nwgmma.wait_group 0;")


@pytest.mark.parametrize(("recipe", "kernels"), OTHERS)
def test_others_compile_and_fuse_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, kernels: int
) -> None:
    found = codes(recipe, tmp_path, monkeypatch)
    assert len(found) == kernels
    assert not any("fma.rn" in code for code in found)


def test_another_order_of_k_is_noticed() -> None:
    step = "or.b64 %rd{}, %rd9, {};\nwgmma.mma_async.x {{%f1}}, %rd{}, %rd8;\n"
    in_order, swapped = (
        "".join(step.format(i, 2 * i, i) for i in places) for places in ((0, 1, 2), (0, 2, 1))
    )
    assert ascending(in_order) and not ascending(swapped)
