"""Experts in four bits, and what their numbers mean."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from eyas.engine.kernels.products import fp4
from eyas.engine.kernels.products.fp4 import Fp4Weight
from tests.unit.grouped_products import DEVICE, random

EXPERTS, PER_ROW, HIDDEN, WIDTH = 4, 2, 160, 96  # a last step that is not whole; sides of no power of two
DTYPE = torch.float32 if triton.knobs.runtime.interpret else torch.bfloat16
CLOSE = 2e-6 if DTYPE is torch.float32 else 6e-3


def numbers_of(n: int, k: int, seed: int, power: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[experts, n, k] of every kind, and [experts, n, k / 32] about that power of two."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(16, (EXPERTS, n, k), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(power - 1, power + 2, (EXPERTS, n, k // 32), generator=generator)
    return numbers, exponents.int()


FORTH, BACK = numbers_of(2 * WIDTH, HIDDEN, 1, -3), numbers_of(HIDDEN, WIDTH, 2, -5)
Numbers = tuple[torch.Tensor, torch.Tensor]


def packed(numbers: Numbers) -> Fp4Weight:
    each = [fp4.packed(*pair, DTYPE) for pair in zip(*numbers, strict=True)]
    whole = each[0].room(EXPERTS)
    for place, part in enumerate(each):
        whole.put(place, part)
    return replace(whole, words=whole.words.to(DEVICE), scales=whole.scales.to(DEVICE))


def biases() -> tuple[torch.Tensor, torch.Tensor]:
    return random(EXPERTS, 2 * WIDTH, seed=3), random(EXPERTS, HIDDEN, seed=4)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found.double().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < CLOSE, error.max()
