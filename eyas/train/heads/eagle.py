"""The EAGLE-1/2 head: it predicts the target's next feature, and the target's output head reads that.

Tensors as in the official checkpoints: `fc.weight` and `layers.0.*`, whose layer has no norm before its
attention (EAGLE, arXiv 2401.15077, sections 4.1 and 4.2). EAGLE-2 changes the tree alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.engine.checkpoint.config import ModelConfig
from eyas.train.heads.base import (
    Attend,
    ChainHead,
    DraftHead,
    SharedOutput,
    TargetTensors,
    TrainingBatch,
    initialise,
    joined,
    rotation,
    shape_for,
    soft_cross_entropy,
)
from eyas.train.model import GroupedAttention, LlamaShape, SwigluMlp, TrainedNorm

TOKENS_WEIGHT = 0.1
"""Of the distribution's part of the loss; the feature's part has 1."""

UNROLL = 1

NOISE = 0.2 * 512
"""The width of the uniform noise on features in training, times the rows of a text: it teaches the head to
live with features that it predicted itself (section 4.2).
"""


def taps(target: ModelConfig) -> tuple[int, ...]:
    """Taps none: the feature has passed the final norm."""
    return ()


def head_for(target: ModelConfig, ends: TargetTensors, token_map: Tensor | None) -> EagleHead:
    """A new head; its vocabulary is the target's."""
    return EagleHead(shape_for(target), ends)


def described(head: DraftHead, unroll: int) -> dict[str, object]:
    """The fields of config.json beside the sizes."""
    return {"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama", "bias": False}


class FirstLayer(nn.Module):
    """A decoder layer without a norm before its attention."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = GroupedAttention(shape, shape.hidden)
        self.post_attention_layernorm = TrainedNorm(shape.hidden, shape.norm_eps)
        self.mlp = SwigluMlp(shape.hidden, shape.intermediate)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """x [batch, rows, hidden] -> the same."""
        q, k, v = self.self_attn.project(x, rope)
        x = x + self.self_attn.join(attend(q, k, v))
        fed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + fed


class EagleHead(ChainHead):
    """An EAGLE head.

    Its state is the feature: the target's hidden state after the final norm, or the prediction of it.
    """

    def __init__(self, shape: LlamaShape, ends: TargetTensors) -> None:
        """`ends`: the target's, of which it uses the output head."""
        super().__init__(shape)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([FirstLayer(shape)])
        initialise(self)
        self.output = SharedOutput(ends)

    def enter(self, features: Tensor) -> Tensor:
        """The features that the head works on; in training, with noise."""
        if not self.training:
            return features
        return features + (torch.rand_like(features) - 0.5) * (NOISE / features.shape[1])

    def forward(self, embeds: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The predicted feature of the next position."""
        both = self.fc(joined(embeds, state))
        state = self.layers[0](both, rotation(self.shape, positions), attend)
        return state

    def logits(self, state: Tensor) -> Tensor:
        """Logits of the target's output head."""
        scores: Tensor = self.output(state)
        return scores

    def loss(self, state: Tensor, lesson: TrainingBatch) -> Tensor:
        """Smooth L1 to the target's feature, and a share of the soft cross-entropy (section 4.2)."""
        feature = F.smooth_l1_loss(state.float(), lesson.hidden.float(), reduction="none").mean(-1)
        tokens = soft_cross_entropy(self.logits(state), lesson.target_logits)
        return feature.flatten() + TOKENS_WEIGHT * tokens
