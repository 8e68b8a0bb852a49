"""The EAGLE-3 head: three of the target's residual streams, one layer, an output head of its own.

Tensors as in the official checkpoints: `fc`, `midlayer.*`, `norm`, `lm_head`, and `d2t` and `t2d` where the
head's vocabulary is a part of the target's (EAGLE-3, arXiv 2503.01840, section 3.1).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import ModelConfig
from eyas.train.heads.base import (
    Attend,
    ChainHead,
    DraftHead,
    TargetTensors,
    TrainingBatch,
    initialise,
    joined,
    rotation,
    shape_for,
    soft_cross_entropy,
)
from eyas.train.model import GroupedAttention, LlamaShape, SwigluMlp, TrainedNorm

UNROLL = 7


def taps(target: ModelConfig) -> tuple[int, ...]:
    """The layers whose inputs make the feature: low, middle, high. ConfigError if there are too few."""
    layers = target.num_layers
    if layers < 3:
        raise ConfigError(f"--target: an EAGLE-3 head reads three of its layers, and it has {layers}")
    return 2, layers // 2, layers - 3


def head_for(target: ModelConfig, ends: TargetTensors, token_map: Tensor | None) -> Eagle3Head:
    """A new head, whose output head and norm begin as the target's."""
    head = Eagle3Head(shape_for(target), len(taps(target)), token_map)
    head.begin_as(ends)
    return head


def described(head: DraftHead, unroll: int) -> dict[str, object]:
    """The fields of config.json beside the sizes."""
    outputs = head.shape.vocab if head.token_map is None else len(head.token_map)
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": outputs}


class MidLayer(nn.Module):
    """A decoder layer whose attention reads the embedding and the hidden state, concatenated."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = TrainedNorm(shape.hidden, shape.norm_eps)
        self.hidden_norm = TrainedNorm(shape.hidden, shape.norm_eps)
        self.self_attn = GroupedAttention(shape, 2 * shape.hidden)
        self.post_attention_layernorm = TrainedNorm(shape.hidden, shape.norm_eps)
        self.mlp = SwigluMlp(shape.hidden, shape.intermediate)

    def forward(self, embeds: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """One step: embeds, hidden [batch, rows, hidden] -> [batch, rows, hidden]."""
        both = joined(self.input_layernorm(embeds), self.hidden_norm(hidden))
        q, k, v = self.self_attn.project(both, rope)
        hidden = hidden + self.self_attn.join(attend(q, k, v))
        fed: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + fed


class DeepLayer(nn.Module):
    """A decoder layer behind the first."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = TrainedNorm(shape.hidden, shape.norm_eps)
        self.self_attn = GroupedAttention(shape, shape.hidden)
        self.post_attention_layernorm = TrainedNorm(shape.hidden, shape.norm_eps)
        self.mlp = SwigluMlp(shape.hidden, shape.intermediate)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """x [batch, rows, hidden] -> the same."""
        q, k, v = self.self_attn.project(self.input_layernorm(x), rope)
        x = x + self.self_attn.join(attend(q, k, v))
        fed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + fed


class Eagle3Head(ChainHead):
    """The recurrent state is the hidden state before the head's norm. The embedding is the target's."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: LlamaShape, streams: int, token_map: Tensor | None = None) -> None:
        """`streams`: of the target, joined to one feature. `token_map`: ascending ids; None: all ids."""
        super().__init__(shape, token_map)
        self.fc = nn.Linear(streams * shape.hidden, shape.hidden, bias=False)
        self.midlayer = MidLayer(shape)
        self.layers = nn.ModuleDict({str(i): DeepLayer(shape) for i in range(1, shape.layers)})
        self.norm = TrainedNorm(shape.hidden, shape.norm_eps)
        outputs = shape.vocab if token_map is None else len(token_map)
        self.lm_head = nn.Linear(shape.hidden, outputs, bias=False)
        initialise(self)
        if token_map is not None:
            self.register_buffer("d2t", token_map - torch.arange(outputs))
            in_vocab = torch.zeros(shape.vocab, dtype=torch.bool)
            self.register_buffer("t2d", in_vocab.index_fill_(0, token_map, True))

    def begin_as(self, ends: TargetTensors) -> None:
        """Copies the target's output head, as far as the vocabulary goes, and its norm."""
        rows = (
            ends.lm_head if self.token_map is None else ends.lm_head[self.token_map.to(ends.lm_head.device)]
        )
        with torch.no_grad():
            self.lm_head.weight.copy_(rows)
            self.norm.weight.copy_(ends.gain)

    def enter(self, features: Tensor) -> Tensor:
        """features [B, T, streams * hidden]."""
        state: Tensor = self.fc(features)
        return state

    def forward(self, embeds: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The next hidden state of each pair, before the norm."""
        rope = rotation(self.shape, positions)
        state = self.midlayer(embeds, state, rope, attend)
        for layer in self.layers.values():
            state = layer(state, rope, attend)
        return state

    def logits(self, state: Tensor) -> Tensor:
        """The scores of the head's own vocabulary."""
        scores: Tensor = self.lm_head(self.norm(state))
        return scores.float()

    def loss(self, state: Tensor, lesson: TrainingBatch) -> Tensor:
        """The soft cross-entropy over the head's vocabulary: no feature is learnt (section 3.2)."""
        return soft_cross_entropy(self.logits(state), lesson.target_logits)
