"""Weights in FP8 (e4m3), with a scale for each block of 128 x 128, as DeepSeek-V3 stores them.

A weight W [N, K] is q * scale, block by block (arXiv 2412.19437, section 3.3.2). Scales are float32, or
powers of two in eight bits (UE8M0). It knows one tensor at a time; its dtype says whether it is stored so.
Activations are left as they are: rounding those as well is how a device is fast, not what the weights say.
"""

from __future__ import annotations

import torch

from eyas.engine.checkpoint.config import FP8_SIDE as SIDE

STORED = "F8_E4M3"
"""What a safetensors file calls the dtype."""

SCALES = "_scale_inv"
"""Behind a weight's name: its scales, by which to multiply, whatever the name says."""


def scales_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight [N, K]; the last block of a row or a column may be smaller."""
    return tuple(-(-size // SIDE) for size in shape)


def widened(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """stored [N, K] in e4m3, scales [ceil(N / 128), ceil(K / 128)] -> the weight, float32 [N, K]."""
    rows, columns = stored.shape
    each = scales.float().repeat_interleave(SIDE, 0)[:rows].repeat_interleave(SIDE, 1)[:, :columns]
    return stored.float().mul_(each)
