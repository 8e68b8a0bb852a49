"""Soft caps: values bent into a bounded range, element by element."""

from __future__ import annotations

import torch


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap), in place.

    Not torch.tanh: its vector body and scalar tail may round differently, so a value's bits would depend on
    where in the tensor it stands. exp, sums and quotients do not have that fault.
    """
    return x.mul_(2.0 / cap).exp_().add_(1.0).reciprocal_().mul_(-2.0 * cap).add_(cap)
