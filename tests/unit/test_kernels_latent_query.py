"""One row's queries and the row that is cached by one launch: as by one for each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.kernels.latent import latent_query, latent_rows
from eyas.engine.kernels.products import single
from eyas.engine.kernels.products.blocks import Fp8Rows, StoredWeight
from eyas.engine.kernels.products.skinny import KvRows, RotaryInput

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANK, LATENT, ROTATED, OUT, PAGE = 384, 32, 16, 40, 16


def random(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device=DEVICE)


def weight_of(n: int, k: int, powers: bool) -> StoredWeight:
    stored = random(n, k).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-n // 128), -(-k // 128), device=DEVICE) + 0.5
    return StoredWeight(stored, scales, RowRounding("block", powers=powers))


def norms_of(weight: StoredWeight) -> latent_rows.InnerNorms:
    return latent_rows.InnerNorms(random(LATENT), random(RANK), 1e-6, weight.rounding)


@pytest.mark.parametrize(("place", "powers"), [(19, False), (-1, True)])
def test_query_and_cached_row_are_those_of_two_launches(place: int, powers: bool) -> None:
    torch.manual_seed(place)
    x, weight = random(1, RANK + LATENT + ROTATED) * 2, weight_of(OUT, RANK, powers)
    norms = norms_of(weight)
    positions, places = (torch.tensor([at], dtype=torch.int32, device=DEVICE) for at in (5, place))
    by = RotaryInput(random(64, ROTATED // 2), random(64, ROTATED // 2), positions)
    layers = [torch.full((3, 1, PAGE, 1, LATENT + ROTATED), float("nan"), device=DEVICE) for _ in range(2)]
    assert latent_query.takes(1, norms, weight)
    found = latent_query.query(x, norms, by, KvRows(layers[0], places), weight)
    rounded = latent_rows.write_latents(x, norms, by, KvRows(layers[1], places))
    assert isinstance(rounded, Fp8Rows) and torch.equal(*(layer.nan_to_num(7.0) for layer in layers))
    assert layers[0].isnan().all() == (place < 0)
    expected = single.dense(rounded, weight)
    assert (found - expected).norm() / expected.norm() < 1e-5
    flat = single.dense(replace(rounded, scales=torch.ones_like(rounded.scales)), weight)
    assert (found - flat).norm() / expected.norm() > 0.3


def test_others_take_two_launches() -> None:
    weight = weight_of(OUT, RANK, False)
    assert not latent_query.takes(2, norms_of(weight), weight)
    assert not latent_query.takes(1, replace(norms_of(weight), query=None), weight)
    assert not latent_query.takes(1, replace(norms_of(weight), rounding=None), weight)
