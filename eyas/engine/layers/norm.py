"""RMS normalisation of rows. It knows a gain and an epsilon."""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F

from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import WeightSource


class RmsNorm:
    """Scales each row of the last dimension to unit root mean square, times a gain, in its precision."""

    def __init__(self, gain: torch.Tensor, eps: float) -> None:
        self._gain, self.eps = gain, eps

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource, name: str, size: int) -> Self:
        """The norm whose gain is stored as `name`."""
        return cls(load_gain(config, weights, name, size), config.norm_eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self._gain, self.eps)


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
