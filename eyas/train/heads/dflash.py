"""The DFlash head: a few decoder layers that draft a block at once, over keys and values made of features.

Tensors as in z-lab's checkpoints: `fc`, `hidden_norm`, `layers.*` with norms of each head's queries and keys,
`norm`; embedding and output head are the target's (DFlash, arXiv 2602.06036).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from eyas.engine.checkpoint.config import ModelConfig
from eyas.train.block_attention import BlockView, block_attention
from eyas.train.heads import eagle3
from eyas.train.heads.base import (
    BlockHead,
    DraftHead,
    SharedOutput,
    TargetTensors,
    TrainingBatch,
    initialise,
    shape_for,
    share_in_block,
    soft_cross_entropy,
)
from eyas.train.model import GroupedAttention, LlamaShape, SwigluMlp, TrainedNorm, rope_table, rotate

LAYERS = 4
UNROLL = 7
"""With the root a block of 8."""

taps = eagle3.taps


def head_for(target: ModelConfig, ends: TargetTensors, token_map: Tensor | None) -> DFlashHead:
    """A new head, whose norm begins as the target's; its vocabulary is the target's."""
    return DFlashHead(dataclasses.replace(shape_for(target), layers=LAYERS), taps(target), ends)


def described(head: DraftHead, unroll: int) -> dict[str, object]:
    """The fields of config.json beside the sizes. Layers are named by their output, hence - 1."""
    assert isinstance(head, DFlashHead)
    own = {"mask_token_id": mask_token(head.shape), "target_layer_ids": [tap - 1 for tap in head.taps]}
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": unroll + 1,
        "dflash_config": own,
    }


def mask_token(shape: LlamaShape) -> int:
    """The last id: what its embedding says is learnt around it."""
    return shape.vocab - 1


class NormedAttention(GroupedAttention):
    """With norms of each head's queries and keys."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__(shape, shape.hidden)
        self.q_norm = TrainedNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = TrainedNorm(shape.head_dim, shape.norm_eps)


class BlockLayer(nn.Module):
    """A decoder layer whose rows see the pairs of the text, as keys and values, and their whole block."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = TrainedNorm(shape.hidden, shape.norm_eps)
        self.self_attn = NormedAttention(shape)
        self.post_attention_layernorm = TrainedNorm(shape.hidden, shape.norm_eps)
        self.mlp = SwigluMlp(shape.hidden, shape.intermediate)
        self._shape = shape

    def forward(self, x: Tensor, pairs: Tensor, view: BlockView) -> Tensor:
        """x [B, A, W, hidden] -> the same."""
        own, shape = self.self_attn, self._shape
        read = self.input_layernorm(x)
        places = view.places(x.shape[2])
        q = self._turned(own.q_norm(_heads(own.q_proj(read), shape)), places)
        k, v = (
            self._turned(own.k_norm(_heads(own.k_proj(read), shape)), places),
            _heads(own.v_proj(read), shape),
        )
        keys = self._turned(own.k_norm(_heads(own.k_proj(pairs), shape)), view.context)
        values = _heads(own.v_proj(pairs), shape)
        seen = block_attention(q, (k, v), (keys, values), view)
        x = x + own.o_proj(seen.flatten(3))
        fed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + fed

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., heads, head_dim] at positions [...]."""
        cos, sin = rope_table(self._shape, positions)
        return rotate(x, (cos[..., None, :], sin[..., None, :]))


class DFlashHead(BlockHead):
    """`taps`: the target's layers whose inputs make the features."""

    def __init__(self, shape: LlamaShape, taps: tuple[int, ...], ends: TargetTensors) -> None:
        """`ends`: the target's, of which it uses the output head and the mask token's embedding."""
        super().__init__(shape)
        self.taps = taps
        self.fc = nn.Linear(len(taps) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = TrainedNorm(shape.hidden, shape.norm_eps)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(shape.layers))
        self.norm = TrainedNorm(shape.hidden, shape.norm_eps)
        initialise(self)
        self.output = SharedOutput(ends)
        self.register_buffer("mask_embedding", ends.embedding[mask_token(shape)].clone(), persistent=False)
        with torch.no_grad():
            self.norm.weight.copy_(ends.gain)

    def enter(self, features: Tensor) -> Tensor:
        """features [B, T, streams * hidden]."""
        pairs: Tensor = self.hidden_norm(self.fc(features))
        return pairs

    def forward(self, pairs: Tensor, embeds: Tensor, view: BlockView) -> Tensor:
        """After the last norm."""
        x = embeds
        for layer in self.layers:
            x = layer(x, pairs, view)
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, state: Tensor) -> Tensor:
        """Logits of the target's output head."""
        scores: Tensor = self.output(state)
        return scores

    def loss(self, state: Tensor, lesson: TrainingBatch) -> Tensor:
        """The soft cross-entropy of each draft."""
        return soft_cross_entropy(self.logits(state), lesson.target_logits)

    def share(self, step: int, unroll: int) -> float:
        """The share of a step's loss, as in DFlash's paper."""
        return share_in_block(step, unroll)


def _heads(rows: Tensor, shape: LlamaShape) -> Tensor:
    """rows [..., heads * head_dim] -> [..., heads, head_dim]."""
    return rows.view(*rows.shape[:-1], -1, shape.head_dim)
