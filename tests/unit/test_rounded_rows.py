"""Rows that are rounded to FP8 by the kernel that makes them: to the bit what `quantise` makes of them."""

from __future__ import annotations

import pytest
import torch

from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.kernels.experts import grouped
from eyas.engine.kernels.experts.group import group
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation, shape_of
from eyas.engine.kernels.experts.grouped_tiles import GroupedTile, key_of
from eyas.engine.kernels.latent.latent_rows import InnerNorms, write_latents
from eyas.engine.kernels.products import blocks
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products.blocks import Fp8Rows, NormedRows, StoredWeight, quantise
from eyas.engine.kernels.products.skinny import KvRows, ProductLaunch, RotaryInput
from eyas.engine.layers.rotary import tables
from tests.unit.crossed import crossed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
BLOCK, POWERS = RowRounding("block"), RowRounding("block", powers=True)
ROUNDINGS = [BLOCK, POWERS, RowRounding("token"), RowRounding("tensor", scale=0.004)]


def random(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).half().to(DEVICE)


def same(found: Fp8Rows, expected: Fp8Rows) -> bool:
    stored = torch.equal(found.stored.view(torch.uint8), expected.stored.view(torch.uint8))
    turned = found.turned is None or torch.equal(found.turned[:, : len(found.scales)], found.scales.t())
    return stored and turned and torch.equal(found.scales, expected.scales) and found.dtype == expected.dtype


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("width", [64, 300, 512])
def test_norms_round_what_they_give(width: int, rounding: RowRounding) -> None:
    x, residual, gain = random(4, width), random(4, width, seed=1), random(width, seed=2)
    x[1], residual[1] = 0.0, 0.0
    alone = row_kernels.normed(x, row_kernels.NormInput(EPS, gain, rounding))
    assert torch.equal(alone.plain, row_kernels.norm(x, EPS, gain))
    plain, rounded = residual.clone(), residual.clone()
    expected = row_kernels.add_norm(x, plain, row_kernels.NormInput(EPS, gain))
    found = row_kernels.add_norm(x, rounded, row_kernels.NormInput(EPS, gain, rounding))
    assert torch.equal(rounded, plain) and torch.equal(found.plain, expected.plain)
    for made in (alone, found):
        assert made.rounded is not None and same(made.rounded, quantise(made.plain, rounding))
        assert not same(made.rounded, quantise(made.plain * 2, rounding))


def test_scales_of_many_rows_lie_by_block_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuBLAS reads them, by every kernel that makes rows for it; others' room has none."""
    monkeypatch.setattr(blocks, "MANY", 3)
    x = random(3, 640)
    normed = row_kernels.normed(x, row_kernels.NormInput(EPS, None, BLOCK)).rounded
    for made in (normed, quantise(x, BLOCK), row_kernels.act_mul_rounded(x, BLOCK)):
        assert isinstance(made, Fp8Rows) and made.turned is not None and made.turned.shape[1] == 4
        assert torch.equal(made.turned[:, :3], made.scales.t())
    assert quantise(x[:2], BLOCK).turned is None and quantise(x, RowRounding("token")).turned is None


def test_a_norm_leaves_out_what_nobody_reads() -> None:
    """Rows that are read rounded alone are the same, and none are there as they are."""
    x, residual = random(3, 256), random(3, 256, seed=1)
    whole, alone = (
        row_kernels.add_norm(x, residual.clone(), row_kernels.NormInput(EPS, None, BLOCK, plain))
        for plain in (True, False)
    )
    assert whole.rounded is not None and alone.rounded is not None and same(alone.rounded, whole.rounded)
    assert alone.read_by(BLOCK) is alone.rounded
    with pytest.raises(AssertionError, match="only read rounded"):
        alone.read_by(POWERS)


def test_numbers_are_divided_by_their_scale_to_the_bit() -> None:
    """Every mantissa of a number in bfloat16 over every mantissa of the largest one, which the scale is of; a
    product by the scale's reciprocal alone is now and then another number.
    """
    mantissas = (torch.arange(128) / 128 + 1).bfloat16()
    x = torch.cat([mantissas.expand(128, 128) * 2.0**-power for power in (1, 4, 8)])
    x[:, 0] = mantissas.repeat(3)
    found = quantise(x.to(DEVICE), BLOCK).stored.cpu().float()
    scales = (x.float().amax(1, keepdim=True) / 448).expand_as(x)
    assert torch.equal(found, (x.float() / scales).to(torch.float8_e4m3fn).float())
    assert (found != (x.float() * (1 / scales)).to(torch.float8_e4m3fn).float()).any()


def test_a_row_that_is_no_number_spoils_no_other() -> None:
    x = random(3, 256)
    x[1, 7] = float("nan")
    for rounding in ROUNDINGS:
        found, alone = (
            row_kernels.normed(rows, row_kernels.NormInput(EPS, None, rounding)) for rows in (x, x[2:])
        )
        assert found.rounded is not None and alone.rounded is not None
        assert torch.equal(found.rounded.stored[2].float(), alone.rounded.stored[0].float())
        assert found.plain[1].isnan().all() and found.rounded.stored[1].float().isnan().all()


def test_rows_are_read_as_a_weight_rounds_them() -> None:
    normed = row_kernels.normed(random(2, 128), row_kernels.NormInput(EPS, None, BLOCK))
    assert normed.read_by(BLOCK) is normed.rounded
    for other in (POWERS, None):
        assert normed.read_by(other) is normed.plain
    assert NormedRows(normed.plain).read_by(BLOCK) is normed.plain


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("queries", [96, 384])
def test_the_inner_row_of_latent_queries_is_rounded(
    queries: int, rounding: RowRounding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "MANY", 3)  # `same` looks at scales by block as well
    latent, rotated = 128, 32
    cos, sin = (table.to(DEVICE) for table in tables(RopeConfig(10_000.0), rotated, 16))
    rotation = RotaryInput(cos, sin, torch.tensor([3, 0, 9], dtype=torch.int32, device=DEVICE))
    x, gains = random(3, queries + latent + rotated), (random(latent, seed=1), random(queries, seed=2))
    found = []
    for how in (None, rounding):
        layer = torch.zeros(2, 1, 4, 1, latent + rotated, dtype=x.dtype, device=DEVICE)
        kv = KvRows(layer, torch.tensor([5, -1, 2], dtype=torch.int32, device=DEVICE))
        found.append((write_latents(x, InnerNorms(*gains, EPS, how), rotation, kv), layer))
    (plain, kept), (rounded, kept_too) = found
    assert isinstance(plain, torch.Tensor) and isinstance(rounded, Fp8Rows)
    assert torch.equal(kept, kept_too) and kept.any()
    assert same(rounded, quantise(plain, rounding)) and not same(rounded, quantise(plain * 2, rounding))
    assert (rounded.turned is not None) == (rounding.rows == "block")


@pytest.mark.parametrize(
    ("split", "width", "rounding"),
    crossed(
        [1, 2],
        [128, 192],
        [BLOCK, POWERS],
        quick=lambda split, width, rounding: split == 2 and width == 192 and rounding.powers,
    ),
)
def test_what_a_gate_passes_is_rounded_by_its_tile(
    split: int, width: int, rounding: RowRounding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "programs", lambda tile, shape: 3)  # some have two tiles
    experts, per_row, hidden = 3, 2, 512
    weight = in_blocks(experts, 2 * width, hidden, rounding=rounding)
    down = in_blocks(experts, hidden, width, rounding=rounding)
    chosen = torch.tensor([[0, 2], [2, 1], [0, 1], [2, 0], [1, 0]], dtype=torch.int32, device=DEVICE)
    tile = GroupedTile(16, 128, 128, 4, 2, split=split)
    table = {key_of(shape_of(weight, GateActivation()), chosen.numel()): tile}
    products, x = GroupedProducts(ProductLaunch.on(DEVICE, pdl=False), table), random(5, hidden)
    order = group(chosen, experts, tile.rows)
    plain = products.gate_up(x, weight, order, per_row, GateActivation())
    found = products.gate_up(x, weight, order, per_row, GateActivation(rounding=rounding))
    assert isinstance(plain, torch.Tensor) and isinstance(found, Fp8Rows)
    assert same(found, quantise(plain, rounding)) and not same(found, quantise(plain.flip(0), rounding))
    assert torch.equal(products.down(found, down, order), products.down(plain, down, order))
    assert not products.launch.tickets.any()


def test_a_tile_without_all_that_shares_a_scale_does_not_round() -> None:
    weight = in_blocks(1, 512, 256)
    assert weight.scales is not None
    flat = StoredWeight(weight.stored[0], weight.scales[0], BLOCK)
    for columns, rounding in ((64, BLOCK), (128, RowRounding("token"))):
        table = {key_of(shape_of(flat, GateActivation()), 16): GroupedTile(16, columns, 128, 4, 2)}
        products = GroupedProducts(ProductLaunch.on(DEVICE, pdl=False), table)
        assert isinstance(
            products.dense_gated(random(2, 256), flat, GateActivation(rounding=rounding)), torch.Tensor
        )


def in_blocks(experts: int, n: int, k: int, rounding: RowRounding = BLOCK) -> StoredWeight:
    stored = random(experts, n, k, seed=n).float().to(torch.float8_e4m3fn)
    scales = torch.rand(experts, -(-n // 128), -(-k // 128), generator=torch.Generator().manual_seed(k))
    return StoredWeight(stored, scales.add_(0.5).div_(32.0).to(DEVICE), rounding)
