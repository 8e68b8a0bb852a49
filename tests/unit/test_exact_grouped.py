"""A row of a grouped product has one set of bits, however many rows there are and however they are cut.

As tests/unit/test_exact_products.py, of experts and of dense weights that go by the same kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.kernels.experts import combine, grouped
from eyas.engine.kernels.experts.group import GroupedChoices, OneRow
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation
from eyas.engine.kernels.experts.grouped_tiles import (
    GroupedShape,
    GroupedTile,
    exact_tile_for,
    key_of,
    stretches_of,
    tile_for,
)
from eyas.engine.kernels.products import skinny
from eyas.engine.kernels.products.blocks import StoredWeight
from eyas.engine.loading import bit_checks
from eyas.engine.loading.bit_checks import CheckedProduct, check_tiles
from tests.bits.compare import Composition, differences
from tests.bits.grouped import DenseRows, ExpertRows, Table, Where, compositions
from tests.unit import tensor_core
from tests.unit.crossed import crossed

HALF = Where("cpu", torch.float16)
FORTH, BACK = (0, 1, 2, 3), (3, 2, 1, 0)
EXPERTS = ExpertsSpec(width=32, experts=4, per_row=2, scores="softmax", normalised=True)
COUNTS = (1, 60, 130)
NARROW = GroupedShape(1, 128, 1024, False, 2)
"""Of a weight whose k is cut in two."""


@pytest.fixture(autouse=True)
def _matrix_unit() -> Iterator[None]:
    with tensor_core.hopper():
        yield


def products(exact: bool = True) -> GroupedProducts:
    return GroupedProducts(skinny.ProductLaunch.on("cpu", pdl=False, exact=exact))


def said(table: Table, by: GroupedProducts, counts: tuple[int, ...] = COUNTS) -> list[str]:
    return [str(difference) for difference in differences(compositions(table, by, counts))]


@pytest.fixture(scope="module")
def experts() -> ExpertRows:
    return ExpertRows(EXPERTS, 64, HALF)


def test_experts(experts: ExpertRows) -> None:
    """Of few rows, by tiles of 16, and of many, which are added to the residual by another kernel."""
    rows = {exact_tile_for(GroupedShape(4, 64, 64, True, 2), 2 * count, {}).rows for count in COUNTS}
    assert len(rows) > 1
    assert said(experts, products()) == []


def test_one_rows_experts_need_no_order() -> None:
    """Neither one that is none."""
    shared, weights = products(), (HALF.weight(4, 128, 64), HALF.weight(4, 64, 64))
    chosen, x = torch.tensor([[3, -1, 0]], dtype=torch.int32), HALF.rows(1, 64)
    found = []
    for order in (shared.walked(chosen, weights), shared.group(chosen, weights)):
        inner = shared.gate_up(x, weights[0], order, 3, GateActivation())
        found.append(shared.down(inner, weights[1], order))
    assert isinstance(shared.walked(chosen, weights), OneRow)
    assert torch.equal(*(made[[0, 2]] for made in found))
    assert isinstance(products(exact=False).walked(chosen, weights), GroupedChoices)


@pytest.mark.slow
def test_a_residual_that_is_added_before_rounding_is_noticed(
    experts: ExpertRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As today, where few rows are rounded once and many twice."""
    today = combine.combine_add
    monkeypatch.setattr(combine, "combine_add", lambda *parts, exact: today(*parts))
    assert said(experts, products())


def test_experts_are_added_up_in_the_order_of_the_choices() -> None:
    """Another order shows."""
    made, weights = torch.randn(20, 4, 64), torch.rand(20, 4)
    found = combine.combine(made.view(-1, 64), weights, exact=True)
    zeros = torch.zeros(20, 64)
    orders = [sum((weights[:, k, None] * made[:, k] for k in ks), zeros) for ks in (FORTH, BACK)]
    assert torch.equal(found, orders[0]) and not torch.equal(found, orders[1])


@pytest.mark.parametrize("gate", [None, GateActivation()])
def test_a_dense_weight_whose_k_is_cut_in_two(gate: GateActivation | None) -> None:
    """By two programs for few rows, by one for many."""
    tiles = [exact_tile_for(NARROW, count, {}) for count in (1, 50000)]
    assert stretches_of(NARROW) == 2 and [tile.split for tile in tiles] == [2, 1]
    dense = DenseRows(NARROW.n, NARROW.k, HALF, gate)
    by_one = {
        key_of(GroupedShape(1, NARROW.n, NARROW.k, gate is not None, 2), 16): GroupedTile(16, 64, 64, 4, 2)
    }
    runs = [
        Composition(str(table), partial(dense.run, range(9), GroupedProducts(products().launch, table)))
        for table in ({}, by_one)
    ]
    assert [str(difference) for difference in differences(runs)] == []


def test_a_cut_of_k_by_the_rows_is_noticed() -> None:
    """Into eight for one row, into none for 40: as today."""
    dense, shape = DenseRows(64, 1024, HALF), GroupedShape(1, 64, 1024, False, 2)
    tiles = {key_of(shape, 40): GroupedTile(64, 64, 64, 4, 2)}
    assert tile_for(shape, 1, tiles).split > 2
    exact, fast = (GroupedProducts(products(exact).launch, tiles) for exact in (True, False))
    assert said(dense, exact, (1, 40)) == []
    assert said(dense, fast, (1, 40))


ROUNDINGS = (
    RowRounding("block"),
    RowRounding("block", powers=True),
    RowRounding("token"),
    RowRounding("tensor", scale=0.05),
)


@pytest.mark.parametrize(
    "rounding", crossed(ROUNDINGS, quick=lambda rounding: rounding.rows == "tensor" or rounding.powers)
)
def test_a_weight_in_fp8(rounding: RowRounding) -> None:
    """Its k cut in two by the weight, by two programs for one row and by one for others; unrounded."""
    dense = DenseRows(64, 1024, Where("cpu", torch.float32, rounding))
    shape = GroupedShape(1, 64, 1024, False, 1)
    tiles = {
        key_of(shape, 20): GroupedTile(32, 64, 128, 4, 2, split=2),
        key_of(shape, 40): GroupedTile(64, 64, 128, 4, 2),
    }
    exact, fast = (GroupedProducts(products(exact).launch, tiles) for exact in (True, False))
    assert said(dense, exact, (1, 20, 40)) == []
    assert said(dense, fast, (20, 40))


def test_another_step_of_k_in_fp8_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is multiplied at a time keeps few bits, until float32 takes it over."""
    dense = DenseRows(64, 1024, replace(HALF, rounding=RowRounding("block")))

    def by_rows(shape: GroupedShape, choices: int, *rest: Any) -> GroupedTile:
        tile = exact_tile_for(shape, choices, *rest)
        return replace(tile, depth=64) if choices > 16 else tile

    monkeypatch.setattr(grouped, "exact_tile_for", by_rows)
    assert said(dense, products(), (1, 40))


def test_experts_in_fp8() -> None:
    spec = replace(EXPERTS, width=128)
    table = ExpertRows(spec, 128, replace(HALF, rounding=RowRounding("block")))
    assert said(table, products(), (1, 30)) == []


@pytest.mark.parametrize(
    "shape", [GroupedShape(1, 9216, 1536, True, 1), GroupedShape(8, 3072, 256, False, 2), NARROW]
)
def test_every_tile_that_rows_may_meet_is_asked_for(shape: GroupedShape) -> None:
    """Also where a number of rows is none of a table's bounds."""
    measured = {key_of(shape, count): GroupedTile(32, 64, 64, 4, 4, split=2) for count in (64, 4096, 16384)}
    for table in ({}, measured):
        asked = CheckedProduct(shape).tiles(table)
        counts = (*range(1, 600), *range(600, 140000, 97))
        assert {exact_tile_for(shape, count, table) for count in counts} <= {*asked}


def test_a_tile_that_adds_up_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bit_checks, "ROWS", 20)
    monkeypatch.setattr(bit_checks, "CHOICES", (1, 4096))
    launch, asked = (
        products().launch,
        [CheckedProduct(GroupedShape(1, 64, 32, True, 2)), CheckedProduct(GroupedShape(4, 64, 32, False, 2))],
    )
    in_fp8 = [CheckedProduct(GroupedShape(1, 64, 256, False, 1), rounding) for rounding in ROUNDINGS]
    assert check_tiles(in_fp8, launch, {}, torch.float16) == 2 * len(ROUNDINGS)
    assert check_tiles(asked, launch, {}, torch.float16) == 4
    today = GroupedProducts.down

    def down(
        self: GroupedProducts, x: torch.Tensor, weight: StoredWeight, order: grouped.GroupedChoices
    ) -> torch.Tensor:
        return today(self, x, weight, order) + (order.rows > 16)

    monkeypatch.setattr(GroupedProducts, "down", down)
    with pytest.raises(ConfigError, match="sums for a weight of 64 x 32 depend on the shape of a tile"):
        check_tiles(asked, launch, {}, torch.float16)
