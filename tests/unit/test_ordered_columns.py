"""Columns that are put into the order of their groups: the same matrix, and what cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eyas.engine.checkpoint.packed_numbers import PackedNumbers
from eyas.engine.formats.dense import DenseProjection
from eyas.engine.formats.ordered import OrderedProjection, by_groups
from eyas.engine.formats.packed import PackedProjection
from eyas.engine.kernels.products import int4

N, K, GROUPS = 32, 256, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # kernels of packed numbers read a GPU's memory


def part(groups: torch.Tensor | None, n: int = N, count: int = GROUPS) -> PackedNumbers:
    chance = torch.Generator().manual_seed(n)
    numbers = torch.randint(0, 16, (n, K), generator=chance, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (n, count), generator=chance, dtype=torch.uint8)
    scales = torch.rand(n, count, generator=chance) + 0.5
    on_device = None if groups is None else groups.to(DEVICE)
    return PackedNumbers(numbers.to(DEVICE), zeros.to(DEVICE), scales.to(DEVICE), on_device)


def shuffled(seed: int = 0) -> torch.Tensor:
    order = torch.randperm(K, generator=torch.Generator().manual_seed(seed))
    return (torch.arange(K) // (K // GROUPS))[order]


def projection(given: PackedNumbers) -> OrderedProjection:
    (made,), order = by_groups([given])
    assert order is not None
    packed = int4.packed(made.numbers, made.zeros, made.scales, torch.float32)
    return OrderedProjection(PackedProjection(packed), order)


def test_the_matrix_is_the_same() -> None:
    """In the order, and put back; also of rows in another one, and with another matrix below."""
    upper, lower = part(shuffled()), part(shuffled(), 16)
    parts, order = by_groups([upper, lower])
    assert order is not None and [each.groups for each in parts] == [None, None]
    assert torch.equal(parts[0].widened(), upper.widened()[:, order])
    made, rows = projection(upper), torch.arange(N, device=DEVICE).flip(0)
    torch.testing.assert_close(made.weight.stored, upper.widened())
    torch.testing.assert_close(made.in_order(rows).weight.stored, upper.widened().flip(0))
    whole = torch.cat((upper.widened(), lower.widened()))
    torch.testing.assert_close(made.below(projection(lower)).weight.stored, whole)


def test_another_order_below_is_widened() -> None:
    upper, lower = part(shuffled()), part(shuffled(1), 16)
    made = projection(upper).below(projection(lower))
    assert isinstance(made, DenseProjection)
    torch.testing.assert_close(made.matrix, torch.cat((upper.widened(), lower.widened())))


@pytest.mark.parametrize(
    "why", ["two orders", "one has none", "no order", "sizes", "a group is missing", "counts"]
)
def test_what_has_no_common_order_stays(why: str) -> None:
    """The matrices are those that were given."""
    mine = part(shuffled())
    uneven = torch.arange(K).clamp(max=K - 2) % GROUPS
    uneven[0] = 1
    parts = {
        "two orders": [mine, part(shuffled(1))],
        "one has none": [mine, part(None)],
        "no order": [part(None), part(None)],
        "sizes": [part(uneven)],
        "a group is missing": [part(shuffled() % 2)],
        "counts": [mine, part(shuffled(), count=GROUPS * 2)],
    }[why]
    made, order = by_groups(parts)
    assert order is None and all(one is other for one, other in zip(made, parts, strict=True))


def test_tensors_without_values_have_an_order() -> None:
    """So that a recipe has the kernels of packed numbers."""
    there = part(shuffled())
    meta = replace(
        there,
        numbers=there.numbers.to("meta"),
        scales=there.scales.to("meta"),
        groups=there.groups.to("meta"),  # type: ignore[union-attr]
    )
    (made,), order = by_groups([meta])
    assert order is not None and order.is_meta and made.groups is None and made.numbers.shape == (N, K)
