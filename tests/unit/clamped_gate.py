"""An activation that no kernel knows."""

from __future__ import annotations

import torch

LIMIT = 0.5


def clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (gate * (up + 1.0)).div_((gate * -1.7).exp_().add_(1.0))
