"""The activation of a gate, SiLU or GELU (its tanh form): each x times a logistic function."""

from __future__ import annotations

import triton
import triton.language as tl

TWICE_ROOT = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi), since (1 + tanh x) / 2 is the logistic of 2 x


@triton.jit
def steepness(gate, GELU: tl.constexpr):
    """The activation of `gate` is gate times the logistic function of this."""
    if GELU:
        return (gate + 0.044715 * gate * gate * gate) * TWICE_ROOT
    else:
        return gate
