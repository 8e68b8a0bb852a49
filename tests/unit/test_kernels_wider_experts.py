"""Products of experts in whole numbers of eight bits and in NVFP4, against what they mean in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import ExpertWeight
from eyas.engine.kernels.products import fp4, int8
from eyas.engine.kernels.products.skinny import ProductLaunch
from tests.unit.biased_experts import experts_of
from tests.unit.crossed import crossed
from tests.unit.fp4_formats import VALUES
from tests.unit.grouped_products import DEVICE, PDL, random
from tests.unit.int4_experts import N, computed, run
from tests.unit.packed_experts import DTYPE, EXPERTS, close

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
EIGHT = [(160, 160, False), (192, 64, True), (384, 128, False)]
"""Columns, those of a group, and whether there are zero points."""

FOURS = [160, 384]


def joined(each: Sequence[int8.Int8Weight | fp4.Fp4Weight]) -> ExpertWeight:
    whole = each[0].room(len(each))
    for place, part in enumerate(each):
        whole.put(place, part)  # type: ignore[arg-type]
    return whole


def eight_bits(k: int, group: int, asymmetric: bool) -> Parts:
    """Numbers, zero points and scales of each expert."""
    chance = torch.Generator().manual_seed(k)
    numbers = torch.randint(256, (EXPERTS, N, k), generator=chance, dtype=torch.uint8)
    zeros = torch.full((EXPERTS, N, k // group), 128, dtype=torch.uint8)
    if asymmetric:
        zeros.random_(0, 256, generator=chance)
    return numbers, zeros, (torch.rand(EXPERTS, N, k // group, generator=chance) + 0.1) / k**0.5 / 64


def packed_eight(parts: Parts, asymmetric: bool) -> ExpertWeight:
    there = [[part.to(DEVICE) for part in each] for each in zip(*parts, strict=True)]
    return joined([int8.packed(n, z if asymmetric else 128, s, DTYPE) for n, z, s in there])


def meant_eight(parts: Parts) -> torch.Tensor:
    numbers, zeros, scales = parts
    each = numbers.shape[2] // scales.shape[2]
    wide = numbers.double() - zeros.double().repeat_interleave(each, 2)
    return wide * scales.double().repeat_interleave(each, 2)


@pytest.mark.parametrize(
    ("shape", "gated"), crossed(EIGHT, [False, True], quick=lambda shape, gated: shape[2] and gated)
)
def test_experts_in_eight_bits(shape: tuple[int, int, bool], gated: bool) -> None:
    k, group, asymmetric = shape
    parts, x, experts = eight_bits(*shape), random(9, k, seed=9), experts_of(9)
    numbers, zeros, scales = parts
    found = run(x, experts, packed_eight(parts, asymmetric), gated, 2 if k == 384 else 1)
    close(found, computed(x, experts, meant_eight(parts), gated))
    wrong = [
        (numbers, zeros, scales.roll(1, 0)),
        (numbers, zeros, scales.roll(1, 1)),
        (numbers, zeros + 1, scales),
        (numbers.roll(32, 2), zeros, scales),
    ]
    if k > group:
        wrong += [(numbers, zeros, scales.roll(1, 2))]
    if asymmetric:
        wrong += [(numbers, zeros.roll(1, each), scales) for each in (0, 1, 2)]
    for other in wrong:
        with pytest.raises(AssertionError):
            close(found, computed(x, experts, meant_eight(other), gated))


def nvfp4(k: int) -> Parts:
    """Numbers, scales in FP8, and a factor for each expert's gate, and for the rows below."""
    chance = torch.Generator().manual_seed(k)
    numbers = torch.randint(16, (EXPERTS, N, k), generator=chance, dtype=torch.uint8)
    scales = 448 * 2.0 ** -torch.randint(0, 9, (EXPERTS, N, k // 16), generator=chance).float()
    factors = torch.tensor([[2e-4 * (1 + e), 5e-4 / (1 + e)] for e in range(EXPERTS)])
    return numbers, scales.to(torch.float8_e4m3fn), factors


def packed_fours(parts: Parts) -> ExpertWeight:
    each = []
    for numbers, scales, factors in zip(*(part.to(DEVICE) for part in parts), strict=True):
        half = N // 2, N // 2
        cut = zip(numbers.split(half), scales.split(half), factors.split((1, 1)), strict=True)
        upper, lower = (fp4.packed_of_16(*one, DTYPE) for one in cut)
        each.append(upper.below(lower))
    return joined(each)


def meant_fours(parts: Parts) -> torch.Tensor:
    numbers, scales, factors = parts
    wide = torch.tensor(VALUES).double()[numbers.long()]
    wide *= scales.double().repeat_interleave(16, 2)
    return wide * factors.double().repeat_interleave(N // 2, 1)[..., None]


@pytest.mark.parametrize(
    ("k", "gated"), crossed(FOURS, [False, True], quick=lambda k, gated: k == 160 and gated)
)
def test_experts_in_nvfp4(k: int, gated: bool) -> None:
    parts, x, experts = nvfp4(k), random(9, k, seed=9), experts_of(9)
    numbers, scales, factors = parts
    found = run(x, experts, packed_fours(parts), gated, 2 if k == 384 else 1)
    close(found, computed(x, experts, meant_fours(parts), gated))
    turned = scales.view(torch.uint8)
    wrong: list[Parts] = [
        (numbers, scales, factors.roll(1, 0)),
        (numbers, scales, factors.flip(1)),
        *((numbers, turned.roll(1, each).view(scales.dtype), factors) for each in (0, 1, 2)),
        (numbers & 7, scales, factors),
        (numbers.roll(16, 2), scales, factors),
        (numbers.unflatten(2, (-1, 2)).flip(3).flatten(2), scales, factors),
    ]
    for other in wrong:
        with pytest.raises(AssertionError):
            close(found, computed(x, experts, meant_fours(other), gated))


@pytest.mark.parametrize("form", ["eight bits", "nvfp4"])
def test_one_rows_choices_need_no_order(form: str) -> None:
    k, parts = 192, eight_bits(192, 64, True) if form == "eight bits" else nvfp4(192)
    weight = packed_eight(parts, True) if form == "eight bits" else packed_fours(parts)
    wide = meant_eight(parts) if form == "eight bits" else meant_fours(parts)
    x, experts = random(1, k, seed=5), torch.tensor([[3, 1]], dtype=torch.int32, device=DEVICE)
    shared = GroupedProducts(ProductLaunch.on(DEVICE, pdl=PDL))
    found = shared.each(x.to(DEVICE, DTYPE), weight, shared.walked(experts, (weight, weight)), 2)
    close(found, computed(x, experts, wide, False))
    with pytest.raises(AssertionError):
        close(found, computed(x, experts.flip(1), wide, False))


def test_zero_points_are_all_experts_or_nones() -> None:
    numbers, zeros, scales = (each[0] for each in eight_bits(192, 64, True))
    bare, pointed = int8.packed(numbers, 128, scales, DTYPE), int8.packed(numbers, zeros, scales, DTYPE)
    whole = pointed.room(2)
    whole.put(1, bare)
    assert whole.zeros is not None and not whole.zeros[1].any()
    with pytest.raises(ValueError, match="zero points"):
        bare.room(2).put(0, pointed)
