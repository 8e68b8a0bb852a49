"""Products of few rows with numbers of four bits, against the matrix that they mean in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from eyas.engine.kernels.products import int4, skinny
from eyas.engine.kernels.products.int4 import Int4Weight
from eyas.engine.kernels.products.skinny_tiles import (
    MEASURED_INT4,
    PackedStep,
    ProductShape,
    ProductTile,
    packed_tile_for,
)
from tests.unit.packed_products import DEVICE, EPS, HALF, PDL, close, rows


def matrix(n: int, k: int, group: int, asymmetric: bool) -> tuple[Int4Weight, torch.Tensor]:
    """A packed matrix, and what it means in float64."""
    torch.manual_seed(n + k + group)
    numbers = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (n, k // group)) if asymmetric else torch.full((n, k // group), 8)
    scales = (torch.rand(n, k // group) + 0.5).half() / k**0.5 / 4
    wide = zeros.double().repeat_interleave(group, 1)
    wide = (numbers.double() - wide) * scales.double().repeat_interleave(group, 1)
    given = (numbers.to(DEVICE), zeros.to(DEVICE) if asymmetric else 8, scales.to(DEVICE))
    return int4.packed(*given, HALF), wide.to(DEVICE)


def launch(kind: str, weight: Int4Weight, tile: ProductTile, padded: int = 8) -> skinny.ProductLaunch:
    shared = skinny.ProductLaunch.on(DEVICE, pdl=PDL)
    return replace(shared, tiles={(f"int4 {kind}", padded, *weight.shape): tile})


TILES = [ProductTile(64, 0, 2, 3), ProductTile(64, 0, 4, 2, split=2)]
SHARED = ProductTile(32, 0, 2, 3, shares_k=True)
GROUPS = [(128, True), (64, False), (32, True), (512, True)]


@pytest.mark.parametrize(("group", "asymmetric"), GROUPS)
def test_widened(group: int, asymmetric: bool) -> None:
    """Also where the last step is not full: 512 columns are four steps of 128 or two of 256, 640 are not."""
    for k in {512, 640 if group <= 128 else 512}:
        weight, wide = matrix(64, k, group, asymmetric)
        assert torch.equal(weight.widened().double(), wide.float().to(HALF).double())


@pytest.mark.parametrize("tile", [*TILES, SHARED])
@pytest.mark.parametrize(("group", "asymmetric"), GROUPS)
def test_linear(group: int, asymmetric: bool, tile: ProductTile) -> None:
    k = 640 if group <= 128 and tile.split == 1 else 512
    weight, wide = matrix(64, k, group, asymmetric)
    m, padded = (3, 8) if tile.split == 1 else (12, 16)
    x, residual, gain = rows(m, k), rows(m + 1, 64), rows(1, 64)[0]
    shared, source = launch("linear", weight, tile, padded), skinny.SkinnyInput(x)
    parts = skinny.linear_parts(source, weight, shared)
    sums, out = torch.empty(parts, skinny.MAX_ROWS, device=DEVICE), residual.clone()
    gained = torch.empty_like(residual[:m])
    skinny.linear(source, weight, out[:m], shared, skinny.LinearEnd(out[:m], sums, gain, gained))
    close(out[:m], x.double() @ wide.t() + residual[:m].double())
    assert torch.equal(out[m], residual[m])
    assert torch.equal(gained, out[:m] * gain)
    torch.testing.assert_close(sums[:, :m].sum(0), out[:m].float().square().sum(1))


@pytest.mark.parametrize("tile", [replace(each, columns=128) for each in TILES])
def test_gated_of_normed_rows(tile: ProductTile) -> None:
    weight, wide = matrix(256, 512, 128, True)
    x = rows(20, 512)
    sums = torch.zeros(1, skinny.MAX_ROWS, device=DEVICE)
    sums[0, :20] = x.float().square().sum(1)
    out = torch.empty(20, 128, device=DEVICE, dtype=HALF)
    skinny.gated(skinny.SkinnyInput(x, sums, EPS), weight, out, launch("gated", weight, tile, 32))
    normed = x.double() / (x.double().square().mean(1, keepdim=True) + EPS).sqrt()
    gate, up = (normed @ wide.t()).chunk(2, 1)
    close(out, F.silu(gate) * up)


@pytest.mark.parametrize("tile", [*TILES, SHARED])
def test_qkv(tile: ProductTile) -> None:
    heads, kv, dim, m = 2, 1, 64, 5
    weight, wide = matrix((heads + 2 * kv) * dim, 512, 128, True)
    x, angle = rows(m, 512), torch.rand(8, dim // 2, device=DEVICE)
    rotation = skinny.RotaryInput(angle.cos(), angle.sin(), torch.arange(m, device=DEVICE))
    pool = torch.zeros(2, 2, 4, kv, dim, device=DEVICE, dtype=HALF)
    q = torch.empty(m, heads, dim, device=DEVICE, dtype=HALF)
    cache = skinny.KvRows(pool, torch.tensor([1, 2, 3, 4, 5], device=DEVICE))
    shared = launch("qkv", weight, tile)
    skinny.qkv_rope(skinny.SkinnyInput(x), skinny.QkvWeights(weight), q, rotation, cache, shared)
    made = (x.double() @ wide.t()).view(m, -1, dim)
    low, high = made[:, : heads + kv].chunk(2, 2)
    cos, sin = (each[:m, None].double() for each in (angle.cos(), angle.sin()))
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), 2)
    close(q, turned[:, :heads])
    stored = pool.transpose(1, 2).reshape(8, 2, dim)[1:6]
    close(stored, torch.stack((turned[:, heads], made[:, heads + kv]), 1))


@pytest.mark.parametrize("spoiled", ["the neighbour's scale", "a zero point off by one", "another order"])
@pytest.mark.parametrize("tile", [TILES[0], SHARED])
def test_a_spoiled_matrix_is_noticed(spoiled: str, tile: ProductTile) -> None:
    """The power of what stands above."""
    weight, wide = matrix(64, 512, 128, True)
    assert weight.zeros is not None
    if spoiled == "the neighbour's scale":
        weight = replace(weight, scales=weight.scales.roll(1, 0))
    elif spoiled == "a zero point off by one":
        weight = replace(weight, zeros=weight.zeros.add(1))
    else:
        weight = replace(weight, words=weight.words.roll(1, 1))
    x, out = rows(3, 512), torch.empty(3, 64, device=DEVICE, dtype=HALF)
    skinny.linear(skinny.SkinnyInput(x), weight, out, launch("linear", weight, tile))
    with pytest.raises(AssertionError):
        close(out, x.double() @ wide.t())


def test_other_rows_are_refused() -> None:
    weight, _ = matrix(64, 512, 128, True)
    out = torch.empty(3, 64, device=DEVICE)
    source = skinny.SkinnyInput(rows(3, 512).double())
    with pytest.raises(ValueError, match="float64"):
        skinny.linear(source, weight, out, launch("linear", weight, TILES[0]))


def test_measured_tiles_fit_as_they_are() -> None:
    for (kind, padded, n, k), tile in MEASURED_INT4.items():
        shape = ProductShape(
            kind.removeprefix("int4 "), padded, n, k, span=128 if kind.endswith(("qkv", "heads")) else n
        )
        assert packed_tile_for(shape, PackedStep("int4", 64, int4.PARTS, 2), 2) == tile
