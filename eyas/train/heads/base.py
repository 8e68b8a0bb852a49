"""The interface of a draft head in training, whatever its kind, and what kinds share.

The pair at position i is (feature of token i, embedding of token i + 1). Its rotary position is i, and the
next step receives what the pair became instead of a feature.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import FeedForwardSpec, ModelConfig
from eyas.train.block_attention import BlockView
from eyas.train.model import LlamaShape, rope_table

DISCOUNT = 0.8
"""Of the loss, per step."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q, k, v) [batch, its heads, rows, dim] -> [batch, heads, rows, dim]: which rows each query sees."""


@dataclass(frozen=True)
class TargetTensors:
    """Tensors that a head may share with its target, or begin as: all of them stay as they are.

    `embedding`, `lm_head`: [vocab, hidden]. `gain`: of the norm before the output head, [hidden].
    """

    embedding: Tensor
    lm_head: Tensor
    gain: Tensor


@dataclass(frozen=True)
class TrainingBatch:
    """The inputs of one step and what it must learn. B rows of the batch, T pairs in each.

    `embeds` [B, T, hidden]; `positions` [B or 1, T]; `mask` bool [B, 1, T, T]: which pairs see which, None:
    all earlier ones; `target_logits` [B, T, outputs]: the target's scores of the head's outputs; `hidden`
    [B, T, hidden]: the target's rows behind these scores, after its final norm; `learnt` bool [B, T]: which
    pairs count.
    """

    embeds: Tensor
    positions: Tensor
    mask: Tensor | None
    target_logits: Tensor
    hidden: Tensor
    learnt: Tensor


class DraftHead(nn.Module, ABC):
    """A head in training. `state_dict` holds the tensors of the public format under their names.

    `token_map` int64 [outputs]: the target's id of each output; None: they are the same.
    """

    token_map: Tensor | None

    def __init__(self, shape: LlamaShape, token_map: Tensor | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("token_map", token_map, persistent=False)

    @abstractmethod
    def enter(self, features: Tensor) -> Tensor:
        """The target's features [B, T, width] -> the states of the first step [B, T, hidden]."""

    @abstractmethod
    def logits(self, state: Tensor) -> Tensor:
        """The scores of the head's outputs: float32 [..., outputs]."""

    @abstractmethod
    def loss(self, state: Tensor, lesson: TrainingBatch) -> Tensor:
        """The loss of each pair's next state, [B * T]."""

    def share(self, step: int, unroll: int) -> float:
        """The weight of a step's loss beside the first one's: EAGLE-3's (section 3.2)."""
        return DISCOUNT**step


class ChainHead(DraftHead):
    """A head that drafts step after step."""

    @abstractmethod
    def forward(self, embeds: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One step: the next states [B, T, hidden], which `logits` reads and the next step receives."""


class MaskedHead(ChainHead):
    """A head whose drafts after the first come of one more pass: rows of one mask token and one state."""

    mask_embedding: Tensor

    @abstractmethod
    def mask_state(self) -> Tensor:
        """The state [1, hidden] that all these rows begin with."""


class BlockHead(DraftHead):
    """A head that drafts a block at once, of `enter`'s states of the pairs and of one mask token."""

    mask_embedding: Tensor

    @abstractmethod
    def forward(self, pairs: Tensor, embeds: Tensor, view: BlockView) -> Tensor:
        """pairs [B, T, hidden], embeds [B, A, W, hidden] of each block's root and W - 1 masks -> what
        `logits` reads of these rows, [B, A, W, hidden].
        """


def shape_for(target: ModelConfig) -> LlamaShape:
    """One layer with the sizes of the target's last one, and a plain rotary embedding of its base.

    Raises ConfigError for a target whose last layer has sizes of another kind.
    """
    layer = target.layers[-1]
    if layer.attention.latent or type(layer.feed_forward) is not FeedForwardSpec:
        raise ConfigError("--target: a head is a dense layer, and the target's last is none")
    return LlamaShape(
        hidden=target.hidden_size,
        layers=1,
        heads=layer.attention.num_heads,
        kv_heads=layer.attention.num_kv_heads,
        head_dim=layer.attention.head_dim,
        intermediate=layer.feed_forward.width,
        vocab=target.vocab_size,
        context=target.context_length,
        rope_theta=layer.attention.rope.theta,
        norm_eps=target.norm_eps,
    )


def share_in_block(step: int, drafts: int) -> float:
    """The weight of a draft's loss beside the first one's: exp(-step / g), where g is 4 for blocks of 8 and
    7 for 16, the root counted. The first drafts decide whether others count (DFlash, section 4).
    """
    return math.exp(-step / (1 + 3 / 8 * (drafts + 1)))


def soft_cross_entropy(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Minus the target's mean of the head's log-probabilities: both are scores [B, T, outputs]; [B * T]."""
    return F.cross_entropy(logits.flatten(0, 1), target_logits.flatten(0, 1).softmax(-1), reduction="none")


def initialise(head: nn.Module) -> None:
    """Draws all matrices anew, and sets biases to 0."""
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def rotation(shape: LlamaShape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines as attention takes them: [B or 1, 1, T, head_dim]."""
    cos, sin = rope_table(shape, positions)
    return cos[:, None], sin[:, None]


class SharedOutput(nn.Module):
    """The target's output head, which a head uses, does not train and does not store."""

    weight: Tensor

    def __init__(self, ends: TargetTensors) -> None:
        super().__init__()
        self.register_buffer("weight", ends.lm_head, persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """rows [..., hidden] -> float32 [..., vocab]."""
        return F.linear(rows, self.weight.to(rows.dtype)).float()


def joined(first: Tensor, second: Tensor) -> Tensor:
    """Two rows side by side."""
    return torch.cat((first, second), -1)
