"""What stands between gate and up of a feed-forward, by name: a line here is all that a new one needs.

None uses F.silu or F.gelu: their vector bodies and scalar tails round differently, so a value's bits would
depend on where in the tensor it stands. exp, products and quotients do not have that fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""gate [R, width], up [R, width] -> [R, width]; both stay as they are."""


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate / (1 + exp(-gate)) * up."""
    return (gate * up).div_((-gate).exp_().add_(1.0))


def gelu_tanh(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate * (1 + tanh(t)) / 2 is gate / (1 + exp(-2 t)), t = sqrt(2 / pi) * (gate + 0.044715 gate ** 3)."""
    turned = (gate * gate).mul_(0.044715).add_(1.0).mul_(gate).mul_(-2.0 * math.sqrt(2.0 / math.pi))
    return (gate * up).div_(turned.exp_().add_(1.0))


CLAMP_LIMIT, CLAMP_STEEPNESS = 7.0, 1.702


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate / (1 + exp(-1.702 gate)) * (up + 1), gate being at most 7, and up from -7 to 7."""
    gate = gate.clamp(max=CLAMP_LIMIT)
    up = up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT).add_(1.0)
    return up.mul_(gate).div_(gate.mul_(-CLAMP_STEEPNESS).exp_().add_(1.0))


ACTIVATIONS: dict[str, Activation] = {"silu": silu, "gelu_tanh": gelu_tanh, "clamped_swiglu": clamped_swiglu}
"""What a `FeedForwardSpec` may name. Kernels know the first two; others run as they stand here."""
