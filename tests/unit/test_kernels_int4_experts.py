"""Products of experts in whole numbers of four bits, against what they mean in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eyas.engine.kernels.products import int4
from eyas.engine.kernels.products.int4 import Int4Weight
from tests.unit.biased_experts import experts_of
from tests.unit.crossed import crossed
from tests.unit.grouped_products import DEVICE, random
from tests.unit.int4_experts import N, computed, run
from tests.unit.packed_experts import DTYPE, EXPERTS

CLOSE = 2e-6 if DTYPE is torch.float32 else torch.finfo(DTYPE).eps / 2
"""What is added up in float32, or one rounding of the result."""

SHAPES = [(160, 32), (192, 64), (384, 128)]
"""Columns, and those of a group: of one part of a word, and of two; a last step that is not whole."""


def numbers_of(k: int, group: int, asymmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, zero points and scales of each expert."""
    generator = torch.Generator().manual_seed(k)
    numbers = torch.randint(16, (EXPERTS, N, k), generator=generator, dtype=torch.uint8)
    zeros = torch.full((EXPERTS, N, k // group), 8, dtype=torch.uint8)
    if asymmetric:
        zeros.random_(0, 16, generator=generator)
    return numbers, zeros, torch.rand(EXPERTS, N, k // group, generator=generator) / k**0.5


def packed(numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, asymmetric: bool) -> Int4Weight:
    each = [
        int4.packed(part, zero if asymmetric else 8, scale, DTYPE)
        for part, zero, scale in zip(numbers, zeros, scales, strict=True)
    ]
    whole = each[0].room(EXPERTS)
    for place, part in enumerate(each):
        whole.put(place, part)
    points = None if whole.zeros is None else whole.zeros.to(DEVICE)
    return replace(whole, words=whole.words.to(DEVICE), scales=whole.scales.to(DEVICE), zeros=points)


def meant(numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    each = numbers.shape[2] // scales.shape[2]
    wide = numbers.double() - zeros.double().repeat_interleave(each, 2)
    return wide * scales.double().repeat_interleave(each, 2)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found.double().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < CLOSE, error.max()


@pytest.mark.parametrize(
    ("shape", "asymmetric", "gated"),
    crossed(
        SHAPES,
        [False, True],
        [False, True],
        quick=lambda shape, asymmetric, gated: asymmetric and gated == (shape[0] == 384),
    ),
)
def test_experts_are_what_their_numbers_mean(shape: tuple[int, int], asymmetric: bool, gated: bool) -> None:
    k, group = shape
    parts, x, experts = numbers_of(k, group, asymmetric), random(9, k, seed=9), experts_of(9)
    numbers, zeros, scales = parts
    found = run(x, experts, packed(*parts, asymmetric), gated, 2 if k == 384 else 1)
    close(found, computed(x, experts, meant(*parts), gated))
    wrong = [
        (numbers, zeros, scales.roll(1, 0)),
        (numbers, zeros, scales.roll(1, 1)),
        (numbers, zeros, scales.roll(1, 2)),
        (numbers.unflatten(2, (-1, 2)).flip(3).flatten(2), zeros, scales),
        (numbers, zeros + 1, scales),
    ]
    if asymmetric:
        wrong += [(numbers, zeros.roll(1, 1), scales), (numbers, zeros.roll(1, 2), scales)]
    for other in wrong:
        with pytest.raises(AssertionError):
            close(found, computed(x, experts, meant(*other), gated))


def test_zero_points_are_all_experts_or_nones() -> None:
    numbers, zeros, scales = (each[0] for each in numbers_of(160, 32, asymmetric=True))
    bare, pointed = int4.packed(numbers, 8, scales, DTYPE), int4.packed(numbers, zeros, scales, DTYPE)
    whole = pointed.room(2)
    whole.put(1, bare)
    assert whole.zeros is not None and torch.equal(
        whole.zeros[1], torch.full_like(whole.zeros[1], bare.base + 8)
    )
    with pytest.raises(ValueError, match="zero points"):
        bare.room(2).put(0, pointed)
