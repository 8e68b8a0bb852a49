"""The plain decoder: any `ModelConfig` in torch operations whose rows do not depend on their company.

It is the specification that the device path is held to. It knows specifications, never families: what is
special about one is a number or a name there, and a block of `eyas.engine.layers` that serves it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from eyas.engine.attention.base import AttentionBackend
from eyas.engine.attention.forward import ForwardBatch
from eyas.engine.attention.soft_cap import soft_cap
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.checkpoint.rope import Rope
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.attention import Step
from eyas.engine.layers.experts import Experts
from eyas.engine.layers.linear import Linear, pad_rows
from eyas.engine.layers.norm import RmsNorm
from eyas.engine.layers.parts import attention_part, feed_forward_part
from eyas.engine.layers.rotary import Rotary
from eyas.engine.models.unread import check_layers, check_tied
from eyas.engine.parallel.expert_ranks import ExpertRanks


@dataclass(frozen=True)
class EmbeddingAndHead:
    """A model's two ends, embedding [vocab, hidden] and output head; draft heads share them."""

    embedding: torch.Tensor
    lm_head: Linear

    @classmethod
    def load(cls, config: ModelConfig, weights: Weights) -> EmbeddingAndHead:
        """Takes both ends from `weights`; a tied head is the embedding itself."""
        shape = (config.vocab_size, config.hidden_size)
        check_tied(config, weights)
        embedding = weights.take("model.embed_tokens.weight", shape)
        head = embedding if config.tied_head else weights.take("lm_head.weight", shape)
        return cls(embedding, Linear(head))

    def limited_to(self, ids: tuple[int, ...]) -> EmbeddingAndHead:
        """With those rows of the output head alone, in this order; (): with all."""
        if not ids:
            return self
        return EmbeddingAndHead(self.embedding, self.lm_head.rows(torch.tensor(ids)))


class DecoderLayer:
    """Attention, then the feed-forward, as `spec` says; their tensors are those below `prefix`.

    `ranks`: over which its experts are spread; None: they are here.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        weights: Weights,
        prefix: str,
        ranks: ExpertRanks | None = None,
    ) -> None:
        hidden, norms = config.hidden_size, spec.norms

        def norm(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
            return RmsNorm.load(config, weights, f"{prefix}.{name}.weight", hidden) if name else _unchanged

        self._attention = attention_part(config, spec.attention, weights, f"{prefix}.self_attn", hidden)
        self._mlp = feed_forward_part(spec.feed_forward, weights, f"{prefix}.mlp", hidden, ranks)
        self._before_attention, self._after_attention = (
            norm(norms.before_attention),
            norm(norms.after_attention),
        )
        self._before_mlp, self._after_mlp = norm(norms.before_feed_forward), norm(norms.after_feed_forward)

    def __call__(self, x: torch.Tensor, layer: int, step: Step) -> torch.Tensor:
        """The residual rows [R, hidden] that enter it, the pool's `layer`-th -> those that leave it."""
        x = x + self._after_attention(self._attention(self._before_attention(x), layer, step))
        x += self._after_mlp(self._mlp(self._before_mlp(x)))
        return x

    def serve_others(self) -> None:
        """As `Decoder.serve_others`."""
        if isinstance(self._mlp, Experts):
            self._mlp.serve_others()


class Decoder:
    """A `DecoderModel` over a paged pool. It takes its tensors from `weights`; no state between calls.

    `ranks`: over which the experts of its layers are spread; None: all are here.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        backend: AttentionBackend,
        ranks: ExpertRanks | None = None,
    ) -> None:
        self.config = config
        self.ends = EmbeddingAndHead.load(config, weights)
        self._layers = [
            DecoderLayer(config, spec, weights, f"model.layers.{i}", ranks)
            for i, spec in enumerate(config.layers)
        ]
        self._norm = RmsNorm.load(config, weights, "model.norm.weight", config.hidden_size)
        check_layers(config, weights)
        self._rotaries = rotaries(config, weights.placement.device)
        self._backend = backend

    @property
    def kv_format(self) -> KvFormat:
        """What one row of KV holds in every layer."""
        return self.config.kv_format

    @torch.inference_mode()
    def forward(
        self, rows: ForwardBatch, pool: KvPool, taps: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs R rows and writes their KV.

        Returns the residual rows that leave the last layer [R, hidden], before any norm, and
        [R, len(taps) * hidden]: those that enter each tapped layer (past the last: leave it).
        """
        count = rows.tokens.shape[0]
        x = F.embedding(pad_rows(rows.tokens), self.ends.embedding)
        if self.config.embedding_scale != 1.0:
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)
        tapped = x.new_empty(count, len(taps), x.shape[1])
        step = step_of(rows, pool, self._rotaries, self._backend)
        for i, layer in enumerate(self._layers):
            _keep(tapped, taps, i, x)
            x = layer(x, i, step)
        _keep(tapped, taps, len(self._layers), x)
        return x[:count], tapped.view(count, -1)

    @torch.inference_mode()
    def serve_others(self) -> None:
        """A step without rows on this rank: layer by layer its experts take the rows of the other ranks."""
        for layer in self._layers:
            layer.serve_others()

    @torch.inference_mode()
    def final_norm(self, residual: torch.Tensor) -> torch.Tensor:
        """Residual rows [r, hidden] that left the last layer -> what the output head reads."""
        return self._norm(residual)

    @torch.inference_mode()
    def logits(self, residual: torch.Tensor, picked: torch.Tensor | None = None) -> torch.Tensor:
        """Rows as `forward` gave them, all or those `picked` (int64 [r]) -> float32 [r, vocab]."""
        logits = self.ends.lm_head(self.final_norm(residual if picked is None else residual[picked])).float()
        return soft_cap(logits, self.config.logit_soft_cap) if self.config.logit_soft_cap else logits


def rotaries(config: ModelConfig, device: str) -> dict[Rope, Rotary]:
    """The tables of each RoPE that a layer has."""
    ropes = dict.fromkeys(layer.attention.rope for layer in config.layers)
    dim = config.layers[0].attention.rotated_dim  # the same in all layers, as head_dim is
    return {rope: Rotary(rope, dim, config.context_length, device) for rope in ropes}


def step_of(
    rows: ForwardBatch, pool: KvPool, rotaries: dict[Rope, Rotary], backend: AttentionBackend
) -> Step:
    """What the layers of one forward of `rows` share."""
    positions = pad_rows(rows.positions)
    angles = {rope: rotary.angles(positions) for rope, rotary in rotaries.items()}
    return Step(pool, pool.slots(rows.kv_rows), rows.plan, angles, backend)


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


def _keep(tapped: torch.Tensor, taps: tuple[int, ...], layer: int, x: torch.Tensor) -> None:
    for place, wanted in enumerate(taps):
        if wanted == layer:
            tapped[:, place] = x[: tapped.shape[0]]
