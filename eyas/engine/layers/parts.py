"""The two parts of a layer: the block that computes each kind of attention and each kind of feed-forward.

A decoder layer knows that it has one of either; which one its specification says.
"""

from __future__ import annotations

from typing import Protocol

import torch

from eyas.engine.checkpoint.config import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    ModelConfig,
)
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.layers.attention import Attention, Step
from eyas.engine.layers.experts import Experts
from eyas.engine.layers.latent import LatentAttention
from eyas.engine.layers.mlp import GatedMlp
from eyas.engine.parallel.expert_ranks import ExpertRanks


class AttentionPart(Protocol):
    """Mixes rows of one sequence, and writes what later rows read of them."""

    def __call__(self, x: torch.Tensor, layer: int, step: Step) -> torch.Tensor:
        """x [R, width] -> [R, hidden]; the pool's `layer`-th is this layer's."""


class FeedForwardPart(Protocol):
    """What every row passes by itself."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, hidden] -> [R, hidden]."""


def attention_part(
    config: ModelConfig, spec: AttentionSpec, weights: Weights, prefix: str, width: int
) -> AttentionPart:
    """The block of this specification; its tensors are those below `prefix`."""
    if isinstance(spec, LatentSpec):
        return LatentAttention(spec, weights, prefix, width)
    return Attention(config, spec, weights, prefix, width)


def feed_forward_part(
    spec: FeedForwardSpec, weights: Weights, prefix: str, hidden: int, ranks: ExpertRanks | None = None
) -> FeedForwardPart:
    """The block of this specification; its tensors are those below `prefix`. `ranks`: as of `Experts`."""
    if isinstance(spec, ExpertsSpec):
        return Experts(spec, weights, prefix, hidden, ranks)
    return GatedMlp(spec, weights, prefix, hidden)
