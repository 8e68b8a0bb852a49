"""Rows for products with weights of four bits, and how near a result must be."""

from __future__ import annotations

import torch
import triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PDL = torch.cuda.is_available() and not triton.knobs.runtime.interpret
EPS = 1e-2
HALF = torch.float16 if triton.knobs.runtime.interpret else torch.bfloat16  # it rounds bfloat16 down


def rows(m: int, k: int) -> torch.Tensor:
    torch.manual_seed(m)
    return torch.randn(m, k, device=DEVICE).to(HALF)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """To the rounding of the result, and of what the matrix unit adds up."""
    torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=2e-3)
