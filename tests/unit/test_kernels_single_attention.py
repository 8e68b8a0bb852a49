"""The products of attention of one row, whose weights wait in registers, beside those of few rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import triton

from eyas.engine.kernels.products import single_attention, skinny
from tests.gpu.family_models import Device
from tests.unit.families import write_family

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PDL = torch.cuda.is_available() and not triton.knobs.runtime.interpret
EPS = 1e-2  # large, so that a forgotten epsilon shows
UNWRITTEN = 77.0
DTYPE = torch.float16


def random(*sizes: int, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return (torch.randn(*sizes, device=DEVICE) * scale).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), expected.float(), rtol=4e-3, atol=4e-3)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def sums_of(x: torch.Tensor, parts: int) -> torch.Tensor:
    sums = torch.full((parts, skinny.MAX_ROWS), float("nan"), device=DEVICE)
    sums[:, 0] = x.float().square().view(parts, -1).sum(1)
    return sums


@pytest.mark.parametrize("k", [32, 1040, 4096])  # one chunk; two, of which one is not full; what L2 has
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_that_of_few_rows(k: int, biased: bool) -> None:
    n, shared = 48, skinny.ProductLaunch.on(DEVICE, pdl=PDL)
    x, weight = random(1, k), random(n, k, scale=k**-0.5)
    end = skinny.LinearEnd(random(1, n), bias=random(n) if biased else None)
    made, expected = (skinny.empty_padded(1, n, like=x) for _ in range(2))
    single_attention.linear(x, weight, made, end, PDL)
    skinny.linear(skinny.SkinnyInput(x), weight, expected, shared, end)
    close(made, expected)


@dataclass(frozen=True)
class Layer:
    """A layer's q, k and v of one row, and where they go."""

    heads: int = 3
    kv_heads: int = 2
    dim: int = 32
    k: int = 1040

    def run(self, single: bool, kv_row: int, biased: bool) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        n = (self.heads + 2 * self.kv_heads) * self.dim
        x, weight = random(1, self.k), random(n, self.k, scale=self.k**-0.5)
        qkv = skinny.QkvWeights(weight, random(n) if biased else None)
        angles = torch.rand(50, self.dim // 2, device=DEVICE) * 6.28
        rotation = skinny.RotaryInput(angles.cos(), angles.sin(), torch.tensor([37], device=DEVICE))
        pool = torch.full((5, 3, 2, 4, self.kv_heads, self.dim), UNWRITTEN, device=DEVICE, dtype=DTYPE)
        kv = skinny.KvRows(pool[:, 1], torch.tensor([kv_row], device=DEVICE))
        q = skinny.empty_padded(1, self.heads, self.dim, like=x)
        source = skinny.SkinnyInput(x, sums_of(x, 4), EPS)
        if single:
            single_attention.qkv_rope(source, qkv, q, rotation, kv, PDL)
        else:
            skinny.qkv_rope(source, qkv, q, rotation, kv, skinny.ProductLaunch.on(DEVICE, pdl=PDL))
        return q, pool


@pytest.mark.parametrize("kv_row", [11, -1])
@pytest.mark.parametrize("biased", [False, True])
def test_qkv_is_that_of_few_rows(kv_row: int, biased: bool) -> None:
    layer = Layer()
    (q, pool), (expected, expected_pool) = layer.run(True, kv_row, biased), layer.run(False, kv_row, biased)
    close(q, expected)
    close(pool, expected_pool)
    with pytest.raises(AssertionError):
        close(q, layer.run(False, kv_row, not biased)[0])
    assert (pool != UNWRITTEN).sum() == (0 if kv_row < 0 else 2 * layer.kv_heads * layer.dim)


def test_what_it_takes() -> None:
    fast, exact = (skinny.ProductLaunch.on("meta", pdl=True, exact=exact) for exact in (False, True))
    weight = torch.empty(2880, 4096, dtype=torch.bfloat16, device="meta")
    assert single_attention.can_take(1, weight, fast)
    assert not single_attention.can_take(1, weight, exact)
    assert not single_attention.can_take(2, weight, fast)
    assert not single_attention.can_take(1, weight.float(), fast)
    assert not single_attention.can_take(1, weight.new_empty(8192, 4096), fast)
    assert not single_attention.can_take(1, None, fast)
    pool = torch.empty(2, 2, 16, 8, 64, dtype=torch.bfloat16, device="meta")
    kv, norms = skinny.KvRows(pool, weight), skinny.HeadNorms(weight, EPS)
    assert single_attention.can_take_qkv(1, skinny.QkvWeights(weight), kv, fast)
    assert not single_attention.can_take_qkv(1, skinny.QkvWeights(weight, norms=norms), kv, fast)
    in_fp8 = skinny.KvRows(pool.to(torch.float8_e4m3fn), weight)
    assert not single_attention.can_take_qkv(1, skinny.QkvWeights(weight), in_fp8, fast)


def test_a_layer_of_one_row_takes_them(tmp_path: Path) -> None:
    """gpt-oss: its experts find the row's squares themselves."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 128, "num_hidden_layers": 1}
    write_family(tmp_path, "gpt_oss", **sizes, max_position_embeddings=1024)
    device = Device(tmp_path, DTYPE, DEVICE if PDL else "cpu")
    device.prompts([[5, 9, 2, 7]])

    def alone() -> tuple[torch.Tensor, int]:
        with patch.object(single_attention, "linear", wraps=single_attention.linear) as linear:
            with patch.object(single_attention, "qkv_rope", wraps=single_attention.qkv_rope) as qkv_rope:
                made = device.alone([3], [4])
        assert linear.call_count == qkv_rope.call_count
        return made, linear.call_count

    (made, launched), together = alone(), device.rounds([3, 3], [4, 4])[:1]
    assert launched == 1
    with patch.object(single_attention, "can_take", lambda *_: False):
        expected, launched = alone()
    assert launched == 0
    for other in (expected, together):
        assert (made - other).abs().max() < 0.02 * other.std()
