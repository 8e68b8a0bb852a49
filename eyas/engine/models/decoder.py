"""The Llama family: Llama 2 / 3, Mistral, Qwen2 and Qwen3 dense (they differ in biases and head norms)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from eyas.engine.attention.base import AttentionBackend
from eyas.engine.attention.forward import ForwardBatch
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.attention import Attention, Step
from eyas.engine.layers.linear import Linear, pad_rows
from eyas.engine.layers.mlp import SwiGlu
from eyas.engine.layers.norm import RmsNorm
from eyas.engine.layers.rotary import Rotary


@dataclass(frozen=True)
class EmbeddingAndHead:
    """A model's two ends, embedding [vocab, hidden] and output head; draft heads share them."""

    embedding: torch.Tensor
    lm_head: Linear

    @classmethod
    def load(cls, config: ModelConfig, weights: Weights) -> EmbeddingAndHead:
        shape = (config.vocab_size, config.hidden_size)
        embedding = weights.take("model.embed_tokens.weight", shape)
        head = embedding if config.tied_head else weights.take("lm_head.weight", shape)
        return cls(embedding, Linear(head))


class _Layer:
    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        hidden, eps = config.hidden_size, config.norm_eps
        self.input_norm = RmsNorm(weights.take(f"{prefix}.input_layernorm.weight", (hidden,)), eps)
        self.attention = Attention(config, weights, f"{prefix}.self_attn", hidden)
        self.mlp_norm = RmsNorm(weights.take(f"{prefix}.post_attention_layernorm.weight", (hidden,)), eps)
        self.mlp = SwiGlu(weights, f"{prefix}.mlp", hidden, config.intermediate_size)


class Decoder:
    """A decoder over a paged pool. It takes its tensors from `weights` and keeps no state between calls."""

    def __init__(self, config: ModelConfig, weights: Weights, backend: AttentionBackend) -> None:
        self.config = config
        self.ends = EmbeddingAndHead.load(config, weights)
        self._layers = [_Layer(config, weights, f"model.layers.{i}") for i in range(config.num_layers)]
        self._norm = RmsNorm(weights.take("model.norm.weight", (config.hidden_size,)), config.norm_eps)
        device = weights.placement.device
        self._rotary = Rotary(config.rope, config.head_dim, config.context_length, device)
        self._backend = backend

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, pool: KvPool, capture: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the batch's R rows and writes their KV.

        Returns the hidden states after the final norm [R, hidden], and [R, len(capture) * hidden]: the
        residual stream entering each captured layer, before any norm (past the last: leaving it).
        """
        rows = batch.tokens.shape[0]
        x = F.embedding(pad_rows(batch.tokens), self.ends.embedding)
        captured = x.new_empty(rows, len(capture), x.shape[1])
        angles = self._rotary.angles(pad_rows(batch.positions))
        step = Step(pool, pool.slots(batch.kv_rows), batch.plan, angles)
        for i, layer in enumerate(self._layers):
            _keep(captured, capture, i, x)
            x = x + layer.attention(layer.input_norm(x), i, step, self._rotary, self._backend)
            x += layer.mlp(layer.mlp_norm(x))
        _keep(captured, capture, len(self._layers), x)
        return self._norm(x)[:rows], captured.view(rows, -1)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [r, hidden] after the final norm -> float32 [r, vocab]."""
        return self.ends.lm_head(hidden).float()


def _keep(captured: torch.Tensor, capture: tuple[int, ...], layer: int, x: torch.Tensor) -> None:
    for place, wanted in enumerate(capture):
        if wanted == layer:
            captured[:, place] = x[: captured.shape[0]]
