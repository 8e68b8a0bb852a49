"""The plain decoder: any `ModelConfig` in torch operations whose rows do not depend on their company.

It is the specification that the device path is held to. A layer is `eyas.engine.models.layer`'s, over verbs
in plain torch. It knows specifications, never families: what is special about one is a number or a name in
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from eyas.engine.attention.base import AttentionBackend
from eyas.engine.attention.forward import ForwardBatch
from eyas.engine.attention.soft_cap import soft_cap
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.linear import Linear
from eyas.engine.layers.norm import RmsNorm
from eyas.engine.layers.rotary import Rotary
from eyas.engine.layers.step import Step
from eyas.engine.models.blocks import Blocks
from eyas.engine.models.layer import load_layers, run_layers
from eyas.engine.models.ops.torch_ops import TorchMachine, TorchOps
from eyas.engine.models.unread import check_layers, check_tied
from eyas.engine.parallel.expert_ranks import ExpertRanks


@dataclass(frozen=True)
class EmbeddingAndHead:
    """A model's two ends, embedding [vocab, hidden] and output head; draft heads share them."""

    embedding: torch.Tensor
    lm_head: Linear

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource) -> EmbeddingAndHead:
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
        return EmbeddingAndHead(self.embedding, self.lm_head.in_order(torch.tensor(ids)))


class Decoder:
    """A `DecoderModel` over a paged pool. It takes its tensors from `weights`; no state between calls.

    `ranks`: over which the experts of its layers are spread; None: all are here.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        backend: AttentionBackend,
        ranks: ExpertRanks | None = None,
    ) -> None:
        self.config = config
        self.ends = EmbeddingAndHead.load(config, weights)
        self._machine = TorchMachine(ranks)
        self._layers = load_layers(Blocks(config, weights, self._machine))
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
        ops = TorchOps(
            Step.of(rows, pool, self._rotaries, self._backend), self.config.norm_eps, self._machine.ranks
        )
        tapped = self.ends.embedding.new_empty(count, len(taps), self.config.hidden_size)
        embedding, scale = self.ends.embedding, self.config.embedding_scale
        x = run_layers(self._layers, ops, ops.embed(embedding, scale), partial(_keep, tapped, taps))
        return x[:count], tapped.view(count, -1)

    @torch.inference_mode()
    def serve_others(self) -> None:
        """A step without rows on this rank: layer by layer its experts take the rows of the other ranks."""
        self._machine.serve_others(self._layers, self.ends.embedding.new_empty(0, self.config.hidden_size))

    @torch.inference_mode()
    def final_norm(self, residual: torch.Tensor) -> torch.Tensor:
        """Residual rows [r, hidden] that left the last layer -> what the output head reads."""
        return self._norm(residual)

    @torch.inference_mode()
    def logits(self, residual: torch.Tensor, picked: torch.Tensor | None = None) -> torch.Tensor:
        """Rows as `forward` gave them, all or those `picked` (int64 [r]) -> float32 [r, vocab]."""
        logits = self.ends.lm_head(self.final_norm(residual if picked is None else residual[picked])).float()
        return soft_cap(logits, self.config.logit_soft_cap) if self.config.logit_soft_cap else logits


def rotaries(config: ModelConfig, device: str) -> dict[RopeConfig, Rotary]:
    """The tables of each RoPE that a layer has."""
    ropes = dict.fromkeys(layer.attention.rope for layer in config.layers)
    dim = config.layers[0].attention.rotated_dim  # the same in all layers, as head_dim is
    return {rope: Rotary(rope, dim, config.context_length, device) for rope in ropes}


def _keep(tapped: torch.Tensor, taps: tuple[int, ...], layer: int, x: torch.Tensor) -> None:
    for place, wanted in enumerate(taps):
        if wanted == layer:
            tapped[:, place] = x[: tapped.shape[0]]
