"""RMS normalisation of rows. It knows a gain and an epsilon."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RmsNorm:
    """Scales each row of the last dimension to unit root mean square, times a gain."""

    def __init__(self, gain: torch.Tensor, eps: float) -> None:
        self._gain = gain
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._gain.shape, self._gain, self._eps)
