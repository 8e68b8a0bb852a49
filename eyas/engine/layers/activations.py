"""Activations between gate and up of a feed-forward, by name: a line here is all that a new one needs.

None uses F.silu, F.softplus or F.gelu: their vector bodies and scalar tails round differently, so a value's
bits would depend on where in the tensor it stands. exp, log1p, products and quotients do not have that fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""gate [R, width], up [R, width] -> [R, width]; both stay as they are."""


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate / (1 + exp(-gate)) * up."""
    return (gate * up).div_((-gate).exp_().add_(1.0))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x))."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0.0))


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


Inner = Callable[[torch.Tensor], torch.Tensor]
"""What the first product of a feed-forward made -> what the second one reads [R, width]."""


def behind_a_gate(activation: Activation) -> Inner:
    """The activation of rows [R, 2 width] of gate and up, side by side."""
    return lambda made: activation(*made.chunk(2, dim=-1))


_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def relu2(up: torch.Tensor) -> torch.Tensor:
    """max(up, 0) squared."""
    return up.clamp(min=0.0).square()


def gelu(up: torch.Tensor) -> torch.Tensor:
    """up * (1 + erf(up / sqrt(2))) / 2, erf within 2e-7 (Abramowitz and Stegun, 7.1.26)."""
    wide = up.float()
    turned = wide.abs().mul_(math.sqrt(0.5))
    t = turned.mul(0.3275911).add_(1.0).reciprocal_()
    series = t * _ERF[0]
    for factor in _ERF[1:]:
        series.add_(factor).mul_(t)
    tail = series.mul_(turned.square_().neg_().exp_()).mul_(0.5)  # of the normal distribution, beyond |up|
    return torch.where(wide > 0, 1.0 - tail, tail).mul_(wide).to(up.dtype)


@dataclass(frozen=True)
class Xielu:
    """xIELU (arXiv 2411.13010): rising * x * x + beta * x above 0, and below
    falling * (exp(min(x, eps)) - 1 - x) + beta * x. All four are float32, of one number.
    """

    rising: torch.Tensor
    falling: torch.Tensor
    beta: torch.Tensor
    eps: torch.Tensor

    @classmethod
    def of(
        cls,
        rising: torch.Tensor,
        falling: torch.Tensor,
        beta: torch.Tensor | float = 0.5,
        eps: torch.Tensor | float = -1e-6,
    ) -> Xielu:
        """`rising` and `falling`: as they are stored, of any sign."""
        beta, eps = (torch.as_tensor(each, dtype=torch.float32).to(rising.device) for each in (beta, eps))
        return cls(F.softplus(rising), beta + F.softplus(falling), beta, eps)

    def __call__(self, up: torch.Tensor) -> torch.Tensor:
        """up [R, width] -> [R, width]."""
        x = up.float()
        below = torch.minimum(x, self.eps).exp_().sub_(1.0).sub_(x).mul_(self.falling)
        return torch.where(x > 0, x * x * self.rising, below).add_(x * self.beta).to(up.dtype)


PLAIN: dict[str, Inner] = {
    "relu": lambda up: up.clamp(min=0.0),
    "relu2": relu2,
    "gelu": gelu,
    "gelu_tanh": lambda up: gelu_tanh(up, torch.ones_like(up)),
    "silu": lambda up: silu(up, torch.ones_like(up)),
}
"""What one without a gate may name, and "xielu" besides, which has numbers of its own."""
