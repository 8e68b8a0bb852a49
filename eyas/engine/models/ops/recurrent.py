"""Operations before and behind the state of a layer that has one, in primitive torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from eyas.engine.layers.activations import softplus
from eyas.engine.layers.norm import rms_norm
from eyas.engine.layers.routing import sigmoid
from eyas.engine.models.ops.parts import DeltaPart
from eyas.engine.states.shape import SpaceShape


def gates(numbers: Sequence[torch.Tensor], part: DeltaPart[Any]) -> torch.Tensor:
    """The numbers [m, value heads] that a layer's product gives beside its inputs: of corrections, if it
    corrects, and of steps -> the gates of `Ops.recur`.
    """
    steps, shape = softplus(numbers[-1].float() + part.step_bias), part.rule.shape
    if isinstance(shape, SpaceShape):
        steps = steps.clamp_(*shape.limits)
    factors = sigmoid(numbers[0].float()).mul_(shape.reach) if shape.corrects else steps
    return torch.cat((steps * part.rate, factors), 1)


def gated(made: torch.Tensor, gate: torch.Tensor, part: DeltaPart[Any], eps: float) -> torch.Tensor:
    """The rows that heads have read, made [m, values], normed, and times the silu of `gate` [m, values],
    before or after that.
    """
    shape, wide = part.rule.shape, gate.float()
    weights = wide.neg().exp_().add_(1.0).reciprocal_().mul_(wide)
    if isinstance(shape, SpaceShape):
        return _of_all_heads(made, weights, part, shape, eps)
    assert part.gain is not None
    normed = normed_heads(made, part.gain, shape.norm_eps or eps)
    return weights.mul_(normed).to(made.dtype)


def normed_heads(made: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """made [m, heads * size], each head normed, times gain [size]."""
    return rms_norm(made.unflatten(1, (-1, len(gain))), gain, eps).flatten(1)


def _of_all_heads(
    made: torch.Tensor, weights: torch.Tensor, part: DeltaPart[Any], shape: SpaceShape, eps: float
) -> torch.Tensor:
    """made [m, values] times `weights` [m, values], and their norm by groups, one before the other."""
    wide = made.float() if shape.norm_first else made.float() * weights
    if part.gain is not None:
        groups = wide.unflatten(1, (shape.norm_groups, -1))
        wide = rms_norm(groups, torch.ones_like(groups[0, 0]), eps).flatten(1)
        wide = wide.to(made.dtype).mul_(part.gain)
    return (wide.float() * weights if shape.norm_first else wide).to(made.dtype)
