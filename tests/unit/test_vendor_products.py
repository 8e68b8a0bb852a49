"""Products in FP8 by cuBLAS: what is handed to it, and which products go there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import ScalingType

from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.formats.fp8 import Fp8Projection
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation
from eyas.engine.kernels.products import rows, vendor
from eyas.engine.kernels.products.blocks import StoredWeight, quantise
from eyas.engine.kernels.products.skinny import ProductLaunch
from tests.unit.crossed import crossed
from tests.unit.grouped_products import act, as_blocks, as_channels, in_kind, meant, random, rounded

N, K = 256, 512
ROWS = 261  # no multiple of four


def by_blocks(a: Any, b: Any, *scaled: Any, output_dtype: Any) -> Any:
    """What torch documents: 1 x 128 of a and 128 x 128 of b, scales of a by column, of b by four of k."""
    a_scale, a_kind, b_scale, b_kind = scaled
    assert (a_kind, b_kind) == (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
    (m, k), n = a.shape, b.shape[1]
    assert m % 4 == 0 and a.stride() == (k, 1) and b.stride() == (1, k)
    assert a_scale.shape == (m, k // 128) and a_scale.stride() == (1, m)
    assert b_scale.shape == (k // 128, n // 128) and b_scale.stride() == (1, k // 128) and k % 512 == 0
    wide = a.float() * a_scale.repeat_interleave(128, 1)
    weight = b.float() * b_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (wide @ weight).to(output_dtype)


def by_channels(a: Any, b: Any, a_scale: Any, b_scale: Any, out_dtype: Any) -> Any:
    assert a_scale.shape == (a.shape[0], 1) and b_scale.shape == (1, b.shape[1])
    return ((a.float() @ b.float()) * a_scale * b_scale).to(out_dtype)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """cuBLAS, by its documentation; and which of its products were asked for."""
    asked: list[str] = []

    def noted(name: str, real: Any) -> Any:
        def call(*args: Any, **given: Any) -> Any:
            asked.append(name)
            return real(*args, **given)

        return call

    monkeypatch.setattr(vendor, "scaled_mm", noted("blocks", by_blocks))
    monkeypatch.setattr(torch, "_scaled_mm", noted("channels", by_channels))
    return asked


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 4e-3, error.max()  # bfloat16


@pytest.mark.parametrize(
    "kind", crossed(["blocks", "powers", "token", "tensor"], quick=lambda kind: kind in ("blocks", "token"))
)
def test_wide_products_are_cublas(kind: str, plain: list[str]) -> None:
    x, weight = random(ROWS, K).bfloat16(), in_kind(random(N, K, seed=1), kind)
    products = GroupedProducts(ProductLaunch.on("cpu", pdl=False), vendor=True)
    close(Fp8Projection(weight).apply(x, products), rounded(x.float(), weight) @ meant(weight).t())
    assert plain == ["blocks" if kind in ("blocks", "powers") else "channels"]


@pytest.mark.parametrize(
    ("kind", "gelu"),
    crossed(
        ["blocks", "powers", "token"],
        [False, True],
        quick=lambda kind, gelu: (kind, gelu) == ("blocks", True),
    ),
)
def test_a_gate_behind_cublas(kind: str, gelu: bool, plain: list[str]) -> None:
    x, weight = random(ROWS, K).bfloat16(), in_kind(random(2 * N, K, seed=1), kind)
    products = GroupedProducts(ProductLaunch.on("cpu", pdl=False), vendor=True)
    made = Fp8Projection(weight).gated(x, products, GateActivation(gelu, weight.rounding))
    expected = act(rounded(x.float(), weight) @ meant(weight).t(), gelu)
    read = weight.read(made)
    assert not isinstance(read, torch.Tensor) and len(plain) == 1
    scales = read.scales.repeat_interleave(128, 1) if kind != "token" else read.scales[:, None]
    found = read.stored.float() * scales
    assert (found - expected).norm() / expected.norm() < 3e-2  # as FP8 rounds
    if kind != "token":
        assert weight.read(made) is made


@pytest.mark.parametrize("powers", [False, True])
def test_a_gate_rounds_as_quantise_does(powers: bool) -> None:
    gate_up, rounding = random(5, 2 * 1200).bfloat16() * 4, RowRounding("block", powers)
    found = rows.act_mul_rounded(gate_up, rounding, gelu=False)
    expected = quantise(rows.act_mul(gate_up), rounding)
    assert torch.equal(found.stored.view(torch.uint8), expected.stored.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales) and found.dtype == torch.bfloat16


def test_what_goes_to_cublas() -> None:
    blocks, channels = as_blocks(random(N, K)), as_channels(random(N, K), RowRounding("token"))
    for weight in (blocks, channels):
        assert vendor.takes(vendor.FEWEST, torch.bfloat16, weight)
        assert not vendor.takes(vendor.FEWEST - 1, torch.bfloat16, weight)
        assert not vendor.takes(vendor.FEWEST, torch.float32, weight)
    assert not vendor.takes(vendor.FEWEST, torch.bfloat16, StoredWeight(random(N, K)))
    ragged = random(N, K + 128)
    assert not vendor.takes(vendor.FEWEST, torch.bfloat16, as_blocks(ragged))
    assert vendor.takes(vendor.FEWEST, torch.bfloat16, as_channels(ragged, RowRounding("token")))
    assert not vendor.is_there("cpu")


@pytest.mark.slow
def test_exact_products_and_other_machines_do_without(plain: list[str]) -> None:
    x, weight = random(ROWS, K).bfloat16(), as_blocks(random(N, K, seed=1))
    for exact, there in ((True, True), (False, False)):
        products = GroupedProducts(ProductLaunch.on("cpu", pdl=False, exact=exact), vendor=there)
        close(Fp8Projection(weight).apply(x, products), rounded(x.float(), weight) @ meant(weight).t())
    assert not plain


def test_rows_for_products_have_memory_behind_them() -> None:
    for rounding in (RowRounding("block"), RowRounding("token")):
        found = quantise(random(5, 300), rounding).stored
        assert found.untyped_storage().nbytes() == 8 * 300 and found.storage_offset() == 0
