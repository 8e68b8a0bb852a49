"""The embedded model as it is trained: a compact Llama on PyTorch's own operations.

The forward pass is exactly that of Hugging Face's LlamaForCausalLM, which a test asserts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.train.model import CacheView, GroupedAttention, LlamaShape, SwigluMlp, TrainedNorm, rope_table


class DecoderBlock(nn.Module):
    """One decoder layer."""

    def __init__(self, config: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = TrainedNorm(config.hidden, config.norm_eps)
        self.self_attn = GroupedAttention(config, config.hidden)
        self.post_attention_layernorm = TrainedNorm(config.hidden, config.norm_eps)
        self.mlp = SwigluMlp(config.hidden, config.intermediate)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, view: CacheView | None) -> Tensor:
        """Attention and MLP on the residual stream."""
        x = x + self.self_attn(self.input_layernorm(x), rope, layer, view)
        fed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + fed


class NanoModel(nn.Module):
    """The target model. Its output matrix is the embedding."""

    def __init__(self, config: LlamaShape) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(DecoderBlock(config) for _ in range(config.layers))
        self.norm = TrainedNorm(config.hidden, config.norm_eps)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(
        self, ids: Tensor, positions: Tensor | None = None, view: CacheView | None = None
    ) -> tuple[Tensor, Tensor]:
        """ids [batch, length] -> the last hidden state before the final norm [batch, length, hidden], and
        the captured features [batch, length, 3 * hidden].
        """
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        cos, sin = rope_table(self.config, positions)
        rope = (cos[:, None], sin[:, None])
        x = self.embed_tokens(ids)
        features = []
        for index, layer in enumerate(self.layers):
            if index in self.config.captured:
                features.append(x)
            x = layer(x, rope, index, view)
        return x, torch.cat(features, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """The scores of all tokens: float32 [..., vocab]."""
        return F.linear(self.norm(hidden), self.embed_tokens.weight).float()
