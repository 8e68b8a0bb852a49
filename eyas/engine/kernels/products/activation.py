"""The activation of a gate: SiLU, GELU (its tanh form), or one with limits; x times a logistic function."""

from __future__ import annotations

import triton
import triton.language as tl

TWICE_ROOT = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi), since (1 + tanh x) / 2 is the logistic of 2 x
LIMIT = tl.constexpr(7.0)
CLAMPED_STEEPNESS = tl.constexpr(1.702)


@triton.jit
def steepness(gate, GELU: tl.constexpr):
    """The activation of `gate` is gate times the logistic function of this."""
    if GELU:
        return (gate + 0.044715 * gate * gate * gate) * TWICE_ROOT
    else:
        return gate


@triton.jit
def passed(gate, up, GELU: tl.constexpr, CLAMPED: tl.constexpr):
    """act(gate) * up. CLAMPED: as `clamped_swiglu` of `eyas.engine.layers.activations`."""
    if CLAMPED:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL) + 1.0
        return gate * up / (1.0 + tl.exp(gate * -CLAMPED_STEEPNESS))
    else:
        return gate * up / (1.0 + tl.exp(-steepness(gate, GELU)))


@triton.jit
def with_bias(gate, up, bias, at, there, WIDTH: tl.constexpr, GATED: tl.constexpr):
    """Both with a bias. `at`: the numbers of the gate's columns in it; those of up are WIDTH behind them."""
    gate += tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
    if GATED:
        up += tl.load(bias + at + WIDTH, mask=there, other=0.0).to(tl.float32)
    return gate, up
