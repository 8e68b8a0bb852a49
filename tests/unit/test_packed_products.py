"""Products of few rows with numbers of eight bits, MXFP4 and NVFP4, against the matrix that they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from eyas.engine.kernels.products import fp4, int8, skinny
from eyas.engine.kernels.products.packed import PackedWeight
from eyas.engine.kernels.products.skinny_tiles import ProductTile
from tests.unit.fp4_formats import VALUES
from tests.unit.packed_products import DEVICE, EPS, HALF, PDL, close, rows

Made = tuple[PackedWeight, torch.Tensor]
"""A packed matrix, and what it means in float64."""


def eight_bits(n: int, k: int, group: int, asymmetric: bool) -> Made:
    group = group or k
    numbers = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    zeros = torch.randint(0, 256, (n, k // group)) if asymmetric else torch.full((n, k // group), 128)
    scales = (torch.rand(n, k // group) + 0.5).half() / k**0.5 / 64
    wide = numbers.double() - zeros.double().repeat_interleave(group, 1)
    wide *= scales.double().repeat_interleave(group, 1)
    given = (numbers.to(DEVICE), zeros.to(DEVICE) if asymmetric else 128, scales.to(DEVICE))
    return int8.packed(*given, HALF), wide.to(DEVICE)


def mxfp4(n: int, k: int) -> Made:
    numbers, exponents = torch.randint(0, 16, (n, k), dtype=torch.uint8), torch.randint(-9, -3, (n, k // 32))
    wide = torch.tensor(VALUES).double()[numbers.long()] * (2.0 ** exponents.double()).repeat_interleave(
        32, 1
    )
    return fp4.packed(numbers.to(DEVICE), exponents.to(DEVICE), HALF), wide.to(DEVICE)


def nvfp4(n: int, k: int, factor: float = 2e-4) -> Made:
    """With scales of all sizes, zero and what has no leading bit among them."""
    numbers = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scales = (448 * 2.0 ** -torch.randint(0, 17, (n, k // 16)).float()).to(torch.float8_e4m3fn)
    scales[:, 0] = 0.0
    wide = torch.tensor(VALUES).double()[numbers.long()] * factor
    wide *= scales.double().repeat_interleave(16, 1)
    given = (numbers.to(DEVICE), scales.to(DEVICE), torch.tensor([factor], device=DEVICE))
    return fp4.packed_of_16(*given, HALF), wide.to(DEVICE)


MATRICES: dict[str, Callable[[int, int], Made]] = {
    "int8 by row": lambda n, k: eight_bits(n, k, 0, False),
    "int8, groups of 32, zero points": lambda n, k: eight_bits(n, k, 32, True),
    "int8, groups of 128": lambda n, k: eight_bits(n, k, 128, False),
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
}
FORMS = list(MATRICES)


def matrix(form: str, n: int, k: int) -> Made:
    torch.manual_seed(n + k)
    return MATRICES[form](n, k)


def launch(weight: PackedWeight, kind: str, m: int, tile: ProductTile) -> skinny.ProductLaunch:
    shared = skinny.ProductLaunch.on(DEVICE, pdl=PDL)
    padded = 8 if m <= 8 else max(16, 1 << (m - 1).bit_length())
    return replace(shared, tiles={(f"{weight.step.form} {kind}", padded, *weight.shape): tile})


@pytest.mark.parametrize("form", FORMS)
def test_widened(form: str) -> None:
    """Also where the last step is not full."""
    for k in (512, 384 if form.endswith("128") else 288):
        weight, wide = matrix(form, 48, k)
        torch.testing.assert_close(weight.widened().double(), wide, rtol=2**-8, atol=2**-25)


@pytest.mark.parametrize(("m", "split"), [(1, 1), (8, 2), (12, 1), (33, 2), (128, 1)])
@pytest.mark.parametrize("form", FORMS)
def test_linear(form: str, m: int, split: int) -> None:
    k = 512 if split == 2 or form.endswith("128") else 480
    weight, wide = matrix(form, 64, k)
    x, residual, bias = rows(m, k), rows(m + 1, 64), rows(1, 64)[0]
    shared = launch(weight, "linear", m, ProductTile(64, 0, 4, 3, split=split))
    out, end = residual.clone(), skinny.LinearEnd(residual[:m], bias=bias)
    skinny.linear(skinny.SkinnyInput(x), weight, out[:m], shared, end)
    close(out[:m], x.double() @ wide.t() + residual[:m].double() + bias.double())
    assert torch.equal(out[m], residual[m])


@pytest.mark.parametrize("form", FORMS)
def test_gated_of_normed_rows(form: str) -> None:
    """The matrix is two, one below the other."""
    (gate, first), (up, second) = matrix(form, 64, 512), MATRICES[form](64, 512)
    weight, wide = gate.below(up), torch.cat((first, second))
    x, sums = rows(20, 512), torch.zeros(1, skinny.MAX_ROWS, device=DEVICE)
    sums[0, :20] = x.float().square().sum(1)
    out = torch.empty(20, 64, device=DEVICE, dtype=HALF)
    shared = launch(weight, "gated", 20, ProductTile(64, 0, 4, 3, split=2))
    skinny.gated(skinny.SkinnyInput(x, sums, EPS), weight, out, shared)
    normed = x.double() / (x.double().square().mean(1, keepdim=True) + EPS).sqrt()
    one, other = (normed @ wide.t()).chunk(2, 1)
    close(out, F.silu(one) * other)


@pytest.mark.parametrize("form", FORMS)
def test_qkv(form: str) -> None:
    """Its rows in another order."""
    heads, kv, dim, m, k = 2, 1, 64, 5, 512
    weight, wide = matrix(form, (heads + 2 * kv) * dim, k)
    order = torch.randperm(weight.shape[0], device=DEVICE)
    weight, wide = weight.in_order(order), wide[order]
    x, angle = rows(m, k), torch.rand(8, dim // 2, device=DEVICE)
    rotation = skinny.RotaryInput(angle.cos(), angle.sin(), torch.arange(m, device=DEVICE))
    pool = torch.zeros(2, 2, 4, kv, dim, device=DEVICE, dtype=HALF)
    q = torch.empty(m, heads, dim, device=DEVICE, dtype=HALF)
    cache = skinny.KvRows(pool, torch.tensor([1, 2, 3, 4, 5], device=DEVICE))
    shared = launch(weight, "qkv", m, ProductTile(64, 0, 4, 3))
    skinny.qkv_rope(skinny.SkinnyInput(x), skinny.QkvWeights(weight), q, rotation, cache, shared)
    made = (x.double() @ wide.t()).view(m, -1, dim)
    low, high = made[:, : heads + kv].chunk(2, 2)
    cos, sin = (each[:m, None].double() for each in (angle.cos(), angle.sin()))
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), 2)
    close(q, turned[:, :heads])
    stored = pool.transpose(1, 2).reshape(8, 2, dim)[1:6]
    close(stored, torch.stack((turned[:, heads], made[:, heads + kv]), 1))


SPOILED = {
    "the neighbour's scale": (FORMS, lambda weight: replace(weight, scales=weight.scales.roll(1, 1))),
    "another order": (FORMS, lambda weight: replace(weight, words=weight.words.roll(1, 1))),
    "another factor": (["nvfp4"], lambda weight: replace(weight, factors=weight.factors * 2)),
    "another zero point": (FORMS[1:2], lambda weight: replace(weight, zeros=weight.zeros + 8)),
}


@pytest.mark.parametrize(("form", "name"), [(form, name) for name in SPOILED for form in SPOILED[name][0]])
def test_a_spoiled_matrix_is_noticed(form: str, name: str) -> None:
    """The power of what stands above."""
    weight, wide = matrix(form, 64, 512)
    weight = SPOILED[name][1](weight)
    x, out = rows(3, 512), torch.empty(3, 64, device=DEVICE, dtype=HALF)
    skinny.linear(skinny.SkinnyInput(x), weight, out, launch(weight, "linear", 3, ProductTile(64, 0, 4, 3)))
    with pytest.raises(AssertionError):
        close(out, x.double() @ wide.t())
