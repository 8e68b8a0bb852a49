"""Products of many rows on a GPU: cuBLAS and tall blocks against our tiles for few rows, which have tests.

pytest -m gpu tests/gpu/test_wide_on_gpu.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.formats.fp8 import Fp8Projection
from eyas.engine.kernels.experts.group import GroupedChoices, group
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation, shape_of
from eyas.engine.kernels.experts.grouped_tiles import GroupedTile, key_of
from eyas.engine.kernels.products import vendor
from eyas.engine.kernels.products.blocks import Fp8Rows, StoredWeight, quantise
from eyas.engine.kernels.products.skinny import ProductLaunch

pytestmark = pytest.mark.gpu

CLOSE = 4e-3  # of a row, over its norm: both round to bf16
FEW = 100  # rows that our tiles for few rows take at a time


def noise(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.bfloat16, device="cuda")


def weight_of(*sizes: int, rounding: RowRounding | None) -> StoredWeight:
    """Scales differ by up to four times."""
    if rounding is None:
        return StoredWeight(noise(*sizes).div_(sizes[-1] ** 0.5))
    stored = (noise(*sizes) * 64).to(torch.float8_e4m3fn)
    blocks = (*sizes[:-2], -(-sizes[-2] // 128), -(-sizes[-1] // 128))
    scales = torch.rand(blocks if rounding.rows == "block" else sizes[:-1], device="cuda") + 0.3
    return StoredWeight(stored, scales / (64 * sizes[-1] ** 0.5), rounding)


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    error = (found.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    return float(error.max())


@pytest.mark.parametrize("rows", ["block", "token", "tensor"])
@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (3072, 1536), (7168, 2048), (4608, 7168), (4096, 14336)])
def test_cublas_is_our_product(n: int, k: int, rows: str) -> None:
    rounding = RowRounding(rows, scale=0.02)  # type: ignore[arg-type]
    weight, launch = weight_of(n, k, rounding=rounding), ProductLaunch.on("cuda", pdl=True)
    projection = Fp8Projection(weight)
    assert vendor.is_there("cuda")
    theirs, ours = GroupedProducts(launch, vendor=True), GroupedProducts(launch)
    for m in (256, 259, 1000, 4096):
        x = noise(m, k)
        expected = torch.cat([ours.dense(part, weight) for part in x.split(FEW)])
        assert worst(projection.apply(x, theirs), expected) < CLOSE
        assert worst(projection.apply(x.roll(1, 0), theirs), expected) > 10 * CLOSE
    if n // 2 % 128:
        return  # no gate's width
    gate = GateActivation(rounding=rounding)
    made = [projection.gated(x, each, gate) for each in (theirs, ours)]
    read = [each if isinstance(each, Fp8Rows) else quantise(each, rounding) for each in made]
    wide = [each.stored.float() * spread(each) for each in read]
    assert float((wide[0] - wide[1]).norm() / wide[1].norm()) < 0.02  # rounding tips a number now and then


def spread(rows: Fp8Rows) -> torch.Tensor:
    each = rows.scales if rows.scales.dim() == 2 else rows.scales[:, None]
    return each.repeat_interleave(128, 1)[:, : rows.stored.shape[1]] if rows.scales.dim() == 2 else each


@pytest.mark.parametrize("rows", ["block", "token", None])
@pytest.mark.parametrize(("hidden", "width"), [(7168, 256), (2048, 768), (4096, 512)])
def test_tall_blocks_are_short_ones(hidden: int, width: int, rows: str | None) -> None:
    experts, per_row, m = 65, 5, 3000
    rounding = None if rows is None else RowRounding(rows)  # type: ignore[arg-type]
    gate_up = weight_of(experts, 2 * width, hidden, rounding=rounding)
    down = weight_of(experts, hidden, width, rounding=rounding)
    chosen = torch.rand(m, experts, device="cuda").pow(3).topk(per_row).indices.int()
    x, launch, made = noise(m, hidden), ProductLaunch.on("cuda", pdl=True), []
    shapes = shape_of(gate_up, GateActivation()), shape_of(down, None)
    for tile in (
        GroupedTile(16, 64, 128, 4, 3),
        GroupedTile(64, 128, 128, 8, 4),
        GroupedTile(128, 64, 64, 8, 3),
    ):
        products = GroupedProducts(launch, {key_of(shape, chosen.numel()): tile for shape in shapes})
        order = products.group(chosen, (gate_up, down))
        assert order.rows == tile.rows
        inner = products.gate_up(x, gate_up, order, per_row, GateActivation())
        assert isinstance(inner, torch.Tensor)
        made.append((inner, products.down(inner, down, order), order))
    for inner, after, order in made[1:]:
        assert torch.equal(order.order, made[0][2].order)
        assert worst(inner, made[0][0]) < CLOSE and worst(after, made[0][1]) < 3 * CLOSE
        wrong = products.down(inner.roll(1, 0), down, order)
        assert worst(wrong, made[0][1]) > 10 * CLOSE


@pytest.mark.parametrize("count", [33, 2048, 2049, 36_864, 70_000])
def test_choices_have_one_order(count: int) -> None:
    chosen = torch.randint(-1, 257, (count, 1), device="cuda", dtype=torch.int32)
    found = group(chosen, 257, 64)
    flat = chosen.flatten().long()
    kept = flat.masked_fill(flat < 0, 257).sort(stable=True).indices[: int((flat >= 0).sum())]
    assert torch.equal(found.order[: len(kept)].long(), kept)
    blocks = int(found.blocks[-1])
    expert, begin, end = (found.blocks[i * found.most :][:blocks].long() for i in range(3))
    assert torch.equal(torch.cat([begin, end[-1:]])[1:], end) and int(begin[0]) == 0
    assert torch.equal(flat[kept[begin]], expert) and torch.equal(flat[kept[end - 1]], expert)
    assert int((end - begin).max()) <= 64
    assert_notices(replace(found, order=found.order.flip(0)), kept)


def assert_notices(found: GroupedChoices, kept: torch.Tensor) -> None:
    assert not torch.equal(found.order[: len(kept)].long(), kept)
