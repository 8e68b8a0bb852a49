"""Experts with biases, in each kind of numbers."""

from __future__ import annotations

import torch

from eyas.engine.kernels.experts.grouped_task import GateActivation
from tests.unit.grouped_products import DEVICE

KINDS = {
    "clamped_swiglu": GateActivation(clamped=True),
    "silu": GateActivation(),
    "gelu_tanh": GateActivation(gelu=True),
}
Biases = tuple[torch.Tensor | None, torch.Tensor | None]


def experts_of(rows: int) -> torch.Tensor:
    """Expert 2 is nowhere; a row's two are different ones."""
    first = torch.arange(rows) % 2
    return torch.stack((first, torch.where(torch.arange(rows) % 3 == 0, 1 - first, 3)), 1).int().to(DEVICE)
