"""Normalisation of rows: by their root mean square, or by that of their differences from their mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import WeightSource


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows x [..., n] over their root mean square, times gain [n], computed in the gain's type."""
    return F.rms_norm(x.to(gain.dtype), gain.shape, gain, eps).to(x.dtype)


@dataclass(frozen=True)
class LayerNorm:
    """Rows less their mean, over the root mean square of that, times gain [n], plus bias [n] if there is one;
    computed in float32.
    """

    eps: float
    gain: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The gain's."""
        return self.gain.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rows x [..., n], in x's type."""
        return F.layer_norm(x.float(), self.shape, self.gain, self.bias, self.eps).to(x.dtype)


Gain = torch.Tensor | LayerNorm
"""Of a norm by a root mean square; a centred norm is whole."""


def load_norm(config: ModelConfig, weights: WeightSource, name: str, size: int) -> Gain:
    """The norm of rows [size] whose tensors are those below `name`."""
    gain = load_gain(config, weights, f"{name}.weight", size)
    if not config.centred:
        return gain
    bias = weights.take(f"{name}.bias", (size,), torch.float32) if config.norm_bias else None
    return LayerNorm(config.norm_eps, gain.float(), bias)


def centred(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., heads, dim] as `LayerNorm`, with a gain [heads, dim] for each head."""
    return F.layer_norm(x.float(), x.shape[-1:], eps=eps).mul_(gain).to(x.dtype)


def load_gain(config: ModelConfig, weights: WeightSource, name: str, size: int) -> torch.Tensor:
    """The gain [size] of a norm, stored less the model's offset.

    With an offset it is float32: near 1 a shorter type would lose the digits that are stored.
    """
    if config.norm_offset == 0.0:
        return weights.take(name, (size,))
    return weights.take(name, (size,), torch.float32).add_(config.norm_offset)
