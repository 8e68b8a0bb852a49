"""The skinny products against plain torch in float64, however they are cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import triton

from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.kernels.launch.warm import KernelWarmup
from eyas.engine.kernels.products import skinny
from eyas.engine.kernels.products.skinny_tiles import MEASURED, ProductShape, ProductTile, tile_for
from eyas.engine.layers.rotary import Rotary

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-2  # large, so that a forgotten epsilon shows
UNWRITTEN = 77.0
PDL = torch.cuda.is_available() and not triton.knobs.runtime.interpret
CUTS = [
    ProductTile(32, 16, 4, 2),
    ProductTile(32, 64, 4, 3),
    ProductTile(32, 32, 4, 2, split=2),
    ProductTile(64, 32, 4, 2, split=4),
]
HOPPER_CUTS = [
    ProductTile(128, 64, 4, 3, ahead=256),
    ProductTile(128, 128, 8, 3, split=2),
    ProductTile(64, 64, 4, 3),
]
tolerance = {torch.float32: 2e-5, torch.float16: 4e-3}


def random(*sizes: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*sizes, device=DEVICE) * scale).to(dtype)


def launch(kind: str, rows: int, weight: torch.Tensor, tile: ProductTile) -> skinny.ProductLaunch:
    shared = skinny.ProductLaunch.on(DEVICE, pdl=PDL)
    return replace(shared, tiles={(kind, rows, *weight.shape): tile})


def sums_of(x: torch.Tensor, parts: int) -> torch.Tensor:
    """Squares of x [m, k], summed in `parts` parts; what belongs to no row is poison."""
    sums = torch.full((parts, skinny.MAX_ROWS), float("nan"), device=x.device)
    sums[:, : x.shape[0]] = x.float().square().view(x.shape[0], parts, -1).sum(2).t()
    return sums


def normed(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(dim, keepdim=True) + EPS).sqrt()


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.double(), expected, rtol=tolerance[dtype], atol=tolerance[dtype])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("tile", CUTS)
@pytest.mark.parametrize(("m", "dtype"), [(1, torch.float16), (17, torch.float32), (100, torch.float16)])
def test_linear_adds_the_residual_and_leaves_sums(m: int, dtype: torch.dtype, tile: ProductTile) -> None:
    n, k = 64, 128
    x, weight = random(m, k, dtype=dtype), random(n, k, dtype=dtype, scale=k**-0.5)
    rows, shared = (
        random(m + 1, n, dtype=dtype),
        launch("linear", {1: 16, 17: 32, 100: 128}[m], weight, tile),
    )
    expected = x.double() @ weight.double().t() + rows[:m].double()
    last = rows[m].clone()
    source, parts = skinny.SkinnyInput(x), n // tile.columns
    assert skinny.linear_parts(source, weight, shared) == parts
    sums = torch.full((parts, skinny.MAX_ROWS), UNWRITTEN, device=DEVICE)
    skinny.linear(source, weight, rows[:m], shared, skinny.LinearEnd(rows[:m], sums))
    close(rows[:m], expected, dtype)
    assert torch.equal(rows[m], last)
    close(sums[:, :m], sums_of(rows[:m], parts)[:, :m].double(), torch.float32)
    assert (sums[:, m:] == UNWRITTEN).all()
    assert not shared.tickets.any()


@pytest.mark.parametrize("tile", CUTS)
@pytest.mark.parametrize("normed_rows", [False, True])
def test_linear_adds_a_bias_behind_the_norm(normed_rows: bool, tile: ProductTile) -> None:
    x, weight, bias = random(3, 128), random(64, 128, scale=128**-0.5), random(64)
    residual, out, shared = (
        random(3, 64),
        torch.empty(3, 64, device=DEVICE),
        launch("linear", 16, weight, tile),
    )
    source = skinny.SkinnyInput(x, sums_of(x, 4), EPS) if normed_rows else skinny.SkinnyInput(x)
    sums = torch.empty(skinny.linear_parts(source, weight, shared), skinny.MAX_ROWS, device=DEVICE)
    skinny.linear(source, weight, out, shared, skinny.LinearEnd(residual, sums, bias=bias))
    bare = (normed(x) if normed_rows else x.double()) @ weight.double().t() + residual.double()
    close(out, bare + bias.double(), torch.float32)
    close(sums[:, :3], sums_of(out, len(sums))[:, :3].double(), torch.float32)
    with pytest.raises(AssertionError):
        close(out, bare + bias.double().roll(1), torch.float32)
    with pytest.raises(ValueError, match="bias"):
        skinny.linear(source, weight, out, shared, skinny.LinearEnd(residual, bias=bias[:32]))


@pytest.mark.parametrize("tile", CUTS)
def test_a_last_step_may_lie_beyond_k_in_part(tile: ProductTile) -> None:
    """Behind k is another row, and behind the last one nothing: neither counts."""
    k = 144
    assert tile.split > 1 or tile_for(ProductShape("linear", 16, 64, k, 64), 4).depth * 2 > k
    x, weight = random(3, k), random(64, k, scale=k**-0.5)
    out = torch.empty(3, 64, device=DEVICE)
    skinny.linear(skinny.SkinnyInput(x), weight, out, launch("linear", 16, weight, tile))
    close(out, x.double() @ weight.double().t(), torch.float32)
    inner = torch.empty(3, 32, device=DEVICE)
    skinny.gated(skinny.SkinnyInput(x), weight, inner, launch("gated", 16, weight, tile))
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=1)
    close(inner, F.silu(gate) * up, torch.float32)


@pytest.mark.parametrize("tile", CUTS)
def test_linear_of_normed_rows_to_float32(tile: ProductTile) -> None:
    x, weight = random(5, 128, dtype=torch.float16), random(64, 128, dtype=torch.float16)
    out = torch.empty(5, 64, device=DEVICE)
    skinny.linear(skinny.SkinnyInput(x, sums_of(x, 4), EPS), weight, out, launch("linear", 16, weight, tile))
    close(out, normed(x) @ weight.double().t(), torch.float16)


def test_more_parts_than_usual() -> None:
    x, weight = random(2, 512), random(16, 512)
    out = torch.empty(2, 16, device=DEVICE)
    skinny.linear(
        skinny.SkinnyInput(x, sums_of(x, 256), EPS), weight, out, skinny.ProductLaunch.on(DEVICE, pdl=PDL)
    )
    close(out, normed(x) @ weight.double().t(), torch.float32)


@pytest.mark.parametrize("tile", CUTS)
@pytest.mark.parametrize("m", [3, 20])
@pytest.mark.parametrize("gelu", [False, True])
def test_gated(m: int, tile: ProductTile, gelu: bool) -> None:
    inner, k = 96, 128
    x, weight = random(m, k), random(2 * inner, k, scale=k**-0.5)
    out = torch.full((m + 1, inner), UNWRITTEN, device=DEVICE)
    shared = launch("gated", 16 if m == 3 else 32, weight, tile)
    skinny.gated(skinny.SkinnyInput(x, sums_of(x, 2), EPS), weight, out[:m], shared, gelu)
    gate, up = (normed(x) @ weight.double().t()).chunk(2, dim=1)
    silu, by_tanh = F.silu(gate), F.gelu(gate, approximate="tanh")
    assert (silu - by_tanh).abs().max() > 0.01
    close(out[:m], (by_tanh if gelu else silu) * up, torch.float32)
    assert (out[m] == UNWRITTEN).all()


@pytest.mark.parametrize("tile", CUTS)
@pytest.mark.parametrize("with_sums", [True, False])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize("extras", ["", "bias", "norms", "bias, norms"])
def test_qkv_rope(tile: ProductTile, with_sums: bool, integers: torch.dtype, extras: str) -> None:
    m, k, heads, kv_heads, dim, page_size, length = 6, 64, 3, 2, 32, 4, 50
    x, weight = random(m, k), random((heads + 2 * kv_heads) * dim, k, scale=k**-0.5)
    bias = random(len(weight)) if "bias" in extras else None
    gains = random(2, dim) if "norms" in extras else None
    norms = None if gains is None else skinny.HeadNorms(gains, EPS)
    pool = torch.full((5, 3, 2, page_size, kv_heads, dim), UNWRITTEN, device=DEVICE)
    untouched = pool.clone()
    positions = torch.randint(length, (m,), device=DEVICE).to(integers)
    rows = torch.randperm(5 * page_size, device=DEVICE)[:m].to(integers)
    rows[2] = -1
    angles = torch.rand(length, dim // 2, device=DEVICE) * 6.28
    q_out = torch.full((m + 1, heads, dim), UNWRITTEN, device=DEVICE)
    skinny.qkv_rope(
        skinny.SkinnyInput(x, sums_of(x, 2), EPS) if with_sums else skinny.SkinnyInput(x),
        skinny.QkvWeights(weight, bias, norms),
        q_out[:m],
        skinny.RotaryInput(angles.cos(), angles.sin(), positions),
        skinny.KvRows(pool[:, 1], rows),
        launch("qkv" if norms is None else "heads", 16, weight, tile),
    )
    qkv = (normed(x) if with_sums else x.double()) @ weight.double().t()
    qkv = (qkv if bias is None else qkv + bias.double()).view(m, -1, dim)
    q, k_rows, v_rows = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if gains is not None:
        q, k_rows = normed(q, -1) * gains[0].double(), normed(k_rows, -1) * gains[1].double()
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[positions.long()][:, None]
    close(q_out[:m], rotated(q, turn), torch.float32)
    assert (q_out[m] == UNWRITTEN).all()
    for i, row in enumerate(rows.tolist()):
        if row >= 0:
            page, slot = divmod(row, page_size)
            close(pool[page, 1, 0, slot], rotated(k_rows, turn)[i], torch.float32)
            close(pool[page, 1, 1, slot], v_rows[i], torch.float32)
            pool[page, 1, :, slot] = UNWRITTEN
    assert torch.equal(pool, untouched)


def rotated(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """x [m, heads, dim], element i and i + dim / 2 as a complex number, times turn [m, 1, dim / 2]."""
    low, high = x.chunk(2, dim=-1)
    turned = torch.complex(low, high) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def test_the_rotation_is_that_of_the_torch_layers() -> None:
    dim, places = 16, torch.tensor([0, 3, 9])
    x = torch.randn(3, 2, dim)
    rotary = Rotary(RopeConfig(theta=100.0), dim, 16)
    angles = torch.outer(places.double(), 100.0 ** -(torch.arange(0, dim, 2).double() / dim))
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(rotary.rotate(x, rotary.angles(places)).double(), rotated(x.double(), turn))


def test_a_row_does_not_depend_on_its_company() -> None:
    x, weight = random(16, 128), random(64, 128)
    shared = launch("linear", 16, weight, CUTS[3])
    alone, together = torch.empty(1, 64, device=DEVICE), torch.empty(16, 64, device=DEVICE)
    skinny.linear(skinny.SkinnyInput(x), weight, together, shared)
    skinny.linear(skinny.SkinnyInput(x[3:4].clone()), weight, alone, shared)
    assert torch.equal(alone[0], together[3])


@pytest.mark.parametrize("tile", CUTS[1::2])
def test_what_lies_behind_the_rows_changes_nothing(tile: ProductTile) -> None:
    m, n, k = 5, 64, 128
    rows, weight = random(m, k), random(n, k)
    x = skinny.empty_padded(m, k, like=weight).copy_(rows)
    x.as_strided((16 - m, k), (k, 1), m * k).fill_(float("nan"))
    sums = torch.full((n // tile.columns, skinny.MAX_ROWS), UNWRITTEN, device=DEVICE)
    found, expected = (torch.empty(m, n, device=DEVICE) for _ in range(2))
    skinny.linear(skinny.SkinnyInput(rows), weight, expected, launch("linear", 16, weight, tile))
    skinny.linear(
        skinny.SkinnyInput(x), weight, found, launch("linear", 16, weight, tile), skinny.LinearEnd(sums=sums)
    )
    assert torch.equal(found, expected)
    close(sums[:, :m], sums_of(found, len(sums))[:, :m].double(), torch.float32)
    assert (sums[:, m:] == UNWRITTEN).all()
    shared, halves = launch("gated", 16, weight, tile), [torch.empty(m, n // 2, device=DEVICE) for _ in "ab"]
    for source, half in zip((rows, x), halves, strict=True):
        skinny.gated(skinny.SkinnyInput(source, sums_of(rows, 2), EPS), weight, half, shared)
    assert torch.equal(*halves)


def test_rows_are_padded_with_memory_only_where_there_is_some() -> None:
    weight = random(32, 64)
    pages = random(40, 64)
    for x, rows in (
        (skinny.empty_padded(5, 64, like=weight), 16),
        (skinny.empty_padded(5, 64, like=weight)[2:], 3),
        (skinny.empty_padded(65, 64, like=weight), 128),
        (random(5, 64), 5),
        (pages[:5], 16),
        (pages[24:29], 16),
        (pages[25:30], 5),
    ):
        plan = skinny._plan(
            "linear", skinny.SkinnyInput(x), weight, 32, skinny.ProductLaunch.on(DEVICE, pdl=PDL)
        )
        assert skinny._rows(x, plan, plan.depth).shape == [rows, 64]


def test_what_does_not_fit_is_refused() -> None:
    shared, x, weight = skinny.ProductLaunch.on(DEVICE, pdl=PDL), random(2, 64), random(32, 64)
    out = torch.empty(2, 32, device=DEVICE)
    with pytest.raises(ValueError, match="out"):
        skinny.linear(skinny.SkinnyInput(x), weight, torch.empty(1, 32, device=DEVICE), shared)
    with pytest.raises(ValueError, match="residual"):
        skinny.linear(skinny.SkinnyInput(x), weight, out, shared, skinny.LinearEnd(out[:1]))
    with pytest.raises(ValueError, match="sums"):
        skinny.linear(
            skinny.SkinnyInput(x),
            weight,
            out,
            shared,
            skinny.LinearEnd(sums=torch.empty(9, 64, device=DEVICE)),
        )
    with pytest.raises(ValueError, match="no skinny product"):
        skinny.linear(skinny.SkinnyInput(random(129, 64)), weight, out, shared)
    with pytest.raises(ValueError, match="no skinny product"):
        skinny.linear(skinny.SkinnyInput(random(2, 48)), weight, out, shared)
    with pytest.raises(ValueError, match="contiguous"):
        skinny.linear(skinny.SkinnyInput(random(64, 2).t()), weight, out, shared)
    with pytest.raises(ValueError, match="multiple of 16"):
        skinny.linear(skinny.SkinnyInput(x), random(24, 64), out, shared)


def recipe() -> None:
    """Every kernel as a GPU runs it, in bfloat16 and with programmatic launch; nothing is computed."""
    m, k, dim = 40, 512, 128
    x, out = (torch.empty(m, k, dtype=torch.bfloat16, device="meta") for _ in range(2))
    weight, sums = torch.empty(k, k, dtype=torch.bfloat16, device="meta"), torch.empty(4, 128, device="meta")
    pool = torch.empty(4, 2, 2, 16, 1, dim, dtype=torch.bfloat16, device="meta")
    angles, integers = (
        torch.empty(9, dim // 2, device="meta"),
        torch.empty(m, dtype=torch.int32, device="meta"),
    )
    source, kv = skinny.SkinnyInput(x, sums, EPS), skinny.KvRows(pool[:, 1], integers)
    rotation = skinny.RotaryInput(angles, angles, integers)
    for cut in HOPPER_CUTS:
        tiles = {(kind, 64, k, k): cut for kind in ("linear", "gated", "qkv", "heads")}
        shared = replace(skinny.ProductLaunch.on("meta", pdl=True), tiles=tiles)
        left = torch.empty(k // cut.columns, 128, device="meta")
        skinny.linear(skinny.SkinnyInput(x), weight, out, shared, skinny.LinearEnd(out, left))
        inner = torch.empty(m, k // 2, dtype=x.dtype, device="meta")
        skinny.gated(source, weight, inner, shared)
        q_out = torch.empty(m, 2, dim, dtype=x.dtype, device="meta")
        skinny.qkv_rope(source, skinny.QkvWeights(weight), q_out, rotation, kv, shared)
        bias, gains = (torch.empty(*sizes, dtype=x.dtype, device="meta") for sizes in ((k,), (2, dim)))
        heads = skinny.QkvWeights(weight, bias, skinny.HeadNorms(gains, EPS))
        skinny.qkv_rope(source, heads, q_out, rotation, kv, shared)
        skinny.gated(source, weight, inner, shared, gelu=True)


@pytest.mark.slow
def test_all_compiles_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is more lenient than the compiler, and sees nothing of programmatic launch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that what the warm-up sets is undone
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    compiled = KernelWarmup("tests.unit.test_kernels_skinny:recipe", (), 90, processes=2).wait()
    codes = [path.read_text() for path in tmp_path.rglob("*.ptx")]
    assert compiled.kernels == len(codes) == 5 * len(HOPPER_CUTS)
    for code in codes:
        assert "griddepcontrol.wait" in code and "griddepcontrol.launch_dependents" in code
        assert "cp.async.bulk.tensor" in code
    assert sum("prefetch.global.L2" in code for code in codes) == 5
    assert sum("wgmma" in code for code in codes) == 13  # two blocks of 32 rows are too small for it


@pytest.mark.parametrize("kind", ["linear", "gated", "qkv"])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_any_shape_has_a_tile_that_fits(kind: str, rows: int) -> None:
    sides = [32, 96, 256, 672, 1312, 4096, 6144, 14336, 28672, 32000, 128256]
    for n in sides:
        for k in (16, 48, *sides[:8]):
            shape = ProductShape(kind, rows, n, k, span=64 if kind == "qkv" else n)
            check(tile_for(shape, 2), shape, 2)
            check(tile_for(shape, 4), shape, 4)


def test_measured_tiles_fit_as_they_are() -> None:
    for (kind, rows, n, k), tile in MEASURED.items():
        shape = ProductShape(kind, rows, n, k, span=128 if kind == "qkv" else n)
        assert tile_for(shape, 2) == tile
        check(tile, shape, 2)


def check(tile: ProductTile, shape: ProductShape, itemsize: int) -> None:
    assert shape.span % tile.columns == 0
    assert (shape.k // tile.split) % tile.depth == 0 or tile.split == tile.folds == 1
    assert tile.columns >= 16 and tile.depth >= 16 and tile.stages >= 1
    assert tile.stages * (tile.columns + shape.rows) * tile.depth * itemsize <= 208 * 1024
    assert tile.ahead <= shape.k // tile.split and tile.ahead.bit_count() <= 1
    assert (
        tile.split == 1
        or tile.split * shape.n * 128 <= skinny.ProductLaunch.on("cpu", False).partials.numel()
    )
