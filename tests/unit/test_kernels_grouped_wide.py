"""Products of tall blocks, rows on the matrix unit's long side: against plain torch, and each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.kernels.experts import grouped, grouped_wide
from eyas.engine.kernels.experts.group import group
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation, shape_of
from eyas.engine.kernels.experts.grouped_tiles import (
    GroupedShape,
    GroupedTile,
    key_of,
    programs,
    tile_for,
    tile_over,
)
from eyas.engine.kernels.products.blocks import Fp8Rows, StoredWeight, quantise
from tests.unit.crossed import crossed
from tests.unit.grouped_products import DEVICE, close, computed, products, random
from tests.unit.tall_blocks import EXPERTS, KINDS, PER_ROW, ROWS, experts_of, layers, run, with_tile

TALL = [
    GroupedTile(64, 128, 128, 8, 3, group=2),
    GroupedTile(128, 64, 128, 8, 2),
    GroupedTile(64, 32, 64, 4, 3, group=1),
]


@pytest.fixture
def only_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """No product goes another way, and three programs walk over all tiles of `down`."""

    def refused(*_: object) -> None:
        raise AssertionError("a short block")

    monkeypatch.setattr(grouped, "_start", refused)
    monkeypatch.setattr(grouped_wide, "programs", lambda *_: 3)


@pytest.mark.usefixtures("only_wide")
@pytest.mark.parametrize(
    ("sizes", "tile", "kind"),
    crossed(
        [(384, 128), (256, 256), (256, 384)],
        TALL,
        KINDS,
        quick=lambda sizes, tile, kind: (
            tile is TALL[0]
            and (
                kind in ("blocks", "float32", "token")
                if sizes[0] == 384
                else kind == "blocks" and sizes[1] == 384
            )
        ),
    ),
)
def test_each_row_meets_its_own_experts(sizes: tuple[int, int], tile: GroupedTile, kind: str) -> None:
    """k has one step, two, or more: `down` keeps a block's rows, or walks k."""
    x, experts, weights = random(ROWS, sizes[0]), experts_of(ROWS), layers(kind, *sizes)
    shared = with_tile(tile, weights, experts.numel())
    found, expected = run(shared, x, experts, weights), computed(x, experts, weights)
    close(found[0], expected[0], kind)
    error = (found[1].double().cpu() - expected[1]).norm() / expected[1].norm()
    assert error < (2e-6 if kind == "float32" else 5e-3)  # rounding may tip a number of the inner rows
    with pytest.raises(AssertionError):  # a choice that goes to its neighbour's expert
        close(found[0], computed(x, experts.flip(1), weights)[0], kind)


@pytest.mark.usefixtures("only_wide")
def test_blocks_that_are_half_empty_have_tiles_of_half_their_rows() -> None:
    """Of blocks of 128 rows that of expert 0 has more than 64, those of experts 1 and 3 have no more."""
    experts, weights, tile = experts_of(ROWS), layers("float32", 256, 384), TALL[1]
    counts = experts.flatten().bincount(minlength=EXPERTS).tolist()
    half = grouped_wide.half_of(tile.rows, 4)
    assert half == 64 < counts[0] < tile.rows and 0 < counts[1] < half and 0 < counts[3] < half
    assert [grouped_wide.half_of(*each) for each in ((64, 2), (128, 1), (256, 2))] == [0, 0, 128]
    x, shared = random(ROWS, 256), with_tile(tile, weights, experts.numel())
    expected = computed(x, experts, weights)
    for made, right in zip(run(shared, x, experts, weights), expected, strict=True):
        assert (made.double().cpu() - right).norm() < 2e-6 * right.norm()


@pytest.mark.usefixtures("only_wide")
@pytest.mark.parametrize("kind", ["float32", pytest.param("token", marks=pytest.mark.slow)])
def test_sides_that_are_no_multiple_of_a_tile(kind: str) -> None:
    sizes = (208, 80)
    x, experts, weights = random(ROWS, sizes[0]), experts_of(ROWS), layers(kind, *sizes)
    for tile in TALL[:2]:
        found = run(with_tile(tile, weights, experts.numel()), x, experts, weights)
        close(found[0], computed(x, experts, weights)[0], kind)
        plain = run(products(), x, experts, weights)[1] if kind == "float32" else None
        assert plain is None or torch.allclose(found[1], plain, atol=1e-5)


@pytest.mark.parametrize("powers", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_a_gate_passes_is_rounded_as_quantise_does(powers: bool) -> None:
    rounding = RowRounding("block", powers)
    x, experts = random(ROWS, 256), experts_of(ROWS)
    weights = layers("powers" if powers else "blocks", 256, 256)
    shared = with_tile(TALL[0], weights, experts.numel())
    order = shared.group(experts, weights)
    plain, found = (
        shared.gate_up(x.to(DEVICE), weights[0], order, PER_ROW, GateActivation(rounding=how))
        for how in (None, rounding)
    )
    assert isinstance(plain, torch.Tensor) and isinstance(found, Fp8Rows)
    expected = quantise(plain, rounding)
    assert torch.equal(found.stored.view(torch.uint8), expected.stored.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(shared.down(found, weights[1], order), shared.down(plain, weights[1], order))


SHORT = GroupedTile(16, 64, 64, 4, 3)


@pytest.mark.parametrize("sizes", [(256, 128), (256, 384)], ids=str)
def test_choices_that_an_order_leaves_out(sizes: tuple[int, int]) -> None:
    experts, weights = experts_of(ROWS), layers("float32", *sizes)
    experts[3:50, 1] = -1
    there = (experts.flatten() >= 0).nonzero()[:, 0]
    inner, found = random(experts.numel(), sizes[1]).to(DEVICE), []
    for tile in (TALL[0], SHORT):
        shared = with_tile(tile, weights, experts.numel())
        found.append(shared.down(inner, weights[1], shared.group(experts, weights))[there])
    close(found[0], found[1].double().cpu(), "float32")


def test_few_rows_of_a_short_k_lie_in_tall_tiles_that_are_mostly_empty() -> None:
    """In float16; a block's end is kept, though the tile goes on with the next one's rows."""
    experts, weight = experts_of(12), StoredWeight(layers("float32", 256, 128)[1].stored.half())
    shared = products()
    order = group(experts, EXPERTS, 16)
    inner = random(experts.numel(), 128).half().to(DEVICE)
    tile = tile_over(shape_of(weight, None), experts.numel(), {}, order.rows)
    assert tile.rows == grouped_wide.FEWEST > order.rows == 16
    found, chosen = shared.down(inner, weight, order).float().cpu(), experts.flatten().long()
    by_choice = torch.empty_like(inner)
    by_choice[order.order.long()] = inner

    def expected(chosen: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nk,nhk->nh", by_choice.float().cpu(), weight.stored.float().cpu()[chosen.cpu()])

    assert torch.allclose(found, expected(chosen), atol=2e-2)
    assert not torch.allclose(found, expected(chosen.roll(1)), atol=2e-2)  # a neighbour's expert


def test_exact_products_and_short_blocks_go_the_other_way() -> None:
    """The bits of a row must not change where its expert has many."""
    weights, experts = layers("float32", 256, 256), experts_of(ROWS)
    shared = with_tile(TALL[0], weights, experts.numel())
    exact = GroupedProducts(replace(shared.launch, exact=True), shared.tiles)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_wide, "start", lambda *_: pytest.fail("a tall block"))
        run(exact, random(ROWS, 256), experts, weights)
        run(with_tile(SHORT, weights, experts.numel()), random(ROWS, 256), experts, weights)


def test_tall_blocks_are_the_rule_where_experts_have_many_rows() -> None:
    gate_up = GroupedShape(256, 512, 7168, gated=True, itemsize=4)
    assert tile_for(gate_up, 256 * 128, {}).rows == grouped_wide.FEWEST
    assert tile_for(gate_up, 256 * 8, {}).rows == 16
    tuned = {key_of(gate_up, 256 * 128): GroupedTile(16, 64, 64, 4, 3)}
    assert tile_for(gate_up, 256 * 128, tuned).rows == 16


@pytest.mark.parametrize(("each", "rows"), [(18, 64), (40, 64), (96, 128), (144, 128), (300, 128)])
def test_blocks_of_sixteen_bits_are_as_tall_as_wastes_least(each: int, rows: int) -> None:
    gate_up, down = (GroupedShape(257, 1024, 2048, gated=gated, itemsize=2) for gated in (True, False))
    tiles = [tile_for(gate_up, 257 * each, {}), tile_for(down, 257 * each, {}, rows)]
    assert [tile.rows for tile in tiles] == [rows, rows]
    beside = [programs(tile, shape) for tile, shape in zip(tiles, (gate_up, down), strict=True)]
    assert beside == [132, 264]  # of down two on a multiprocessor


@pytest.mark.parametrize(
    ("k", "itemsize", "rows"), [(512, 2, 64), (512, 4, 16), (512, 1, 16), (512, 0, 16), (768, 2, 16)]
)
def test_tiles_are_taller_than_blocks_where_that_was_faster(k: int, itemsize: int, rows: int) -> None:
    shape = GroupedShape(257, 2048, k, gated=False, itemsize=itemsize)
    assert tile_over(shape, 257 * 4, {}, 16).rows == rows
    assert tile_over(shape, 257 * 144, {}, 128).rows == 128
