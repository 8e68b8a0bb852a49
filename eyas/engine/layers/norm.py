"""RMS normalisation of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import WeightSource


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows x [..., n] over their root mean square, times gain [n], computed in the gain's type."""
    return F.rms_norm(x.to(gain.dtype), gain.shape, gain, eps).to(x.dtype)


def load_gain(config: ModelConfig, weights: WeightSource, name: str, size: int) -> torch.Tensor:
    """The gain [size] of a norm, stored less the model's offset.

    With an offset it is float32: near 1 a shorter type would lose the digits that are stored.
    """
    if config.norm_offset == 0.0:
        return weights.take(name, (size,))
    return weights.take(name, (size,), torch.float32).add_(config.norm_offset)
