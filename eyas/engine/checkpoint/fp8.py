"""Numbers in FP8 (e4m3) with scales: what stored weights mean, and how rows that they multiply are rounded.

A weight [N, K] is q * scale; of scales there is one for each block of 128 x 128 (arXiv 2412.19437, section
3.3.2), for each row of it, or for all of it. They are stored in any float type, or as powers of two in eight
bits (UE8M0). A row is rounded to q * s by the same rule, whatever shares the step with it. This is the plain
statement in float32, to which kernels are held.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.engine.checkpoint.quantized import FP8_SIDE as SIDE
from eyas.engine.checkpoint.quantized import RowScales, WeightScales

STORED = "F8_E4M3"
"""What a safetensors file calls the dtype."""

POWERS = "F8_E8M0"
"""And that of scales that are powers of two."""

LARGEST = 448.0
"""Of its values."""

LEAST = 1e-4
"""Of what a row's scale is computed from, so that rows of zeros have one."""

SCALES = ("_scale", "_scale_inv")
"""Behind a weight's name: its scales, by which to multiply, whatever the name says."""

ROW_SCALE = ("input_scale", "activation_scale")
"""In the place of "weight": the scale of all rows that it multiplies."""


def scales_of(shape: tuple[int, ...], weights: WeightScales) -> tuple[int, ...]:
    """The shape of the scales of a weight [N, K]; the last block of a row or a column may be smaller.

    They are held for each row where there is one for the tensor: below it may stand another with its own.
    """
    if weights == "block":
        return tuple(-(-size // SIDE) for size in shape)
    return (shape[0],)


def widened(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """stored [N, K] in e4m3, scales as `scales_of` -> the weight, float32 [N, K]."""
    rows, columns = stored.shape
    if scales.dim() == 1:
        return stored.float().mul_(scales.float()[:, None])
    each = scales.float().repeat_interleave(SIDE, 0)[:rows].repeat_interleave(SIDE, 1)[:, :columns]
    return stored.float().mul_(each)


@dataclass(frozen=True)
class RowRounding:
    """A way to round rows: which part of a row shares one scale (never ""), and whether scales are powers of
    two.

    `scale`: of "tensor", the one of all rows.
    """

    rows: RowScales
    powers: bool = False
    scale: float = 0.0

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, K] -> what is stored of it times its scales, in x's dtype.

        s = max(largest, 1e-4) / 448, of 128 elements or of a row; q = x / s, at most 448, to the nearest of
        e4m3, of two to the even one. A NaN stays one, and its row's alone.
        """
        wide = x.float()
        cut = wide.split(SIDE, 1) if self.rows == "block" else (wide,)
        return torch.cat([self._rounded(part) for part in cut], 1).to(x.dtype)

    def _rounded(self, part: torch.Tensor) -> torch.Tensor:
        scale = self._scale(part)
        stored = (part / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return stored.float() * scale

    def _scale(self, part: torch.Tensor) -> torch.Tensor:
        """float32 [R, 1]; divided by tensors: by a Python number a GPU multiplies with its reciprocal."""
        if self.rows == "tensor":
            return part.new_full((part.shape[0], 1), self.scale)
        scale = part.abs().amax(1, keepdim=True).clamp(min=LEAST) / part.new_tensor(LARGEST)
        return next_power(scale) if self.powers else scale


def next_power(scale: torch.Tensor) -> torch.Tensor:
    """The smallest powers of two that are not below positive float32 numbers."""
    bits = scale.view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
