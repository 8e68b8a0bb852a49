"""EAGLE-1 and EAGLE-2 heads, which are the same: the second only grows other trees.

The feature is the target's last hidden state, as its output head reads it; the draft model joins it with the
embedding of the next token and predicts the next feature, which the target's output head turns into logits
(EAGLE, arXiv 2401.15077, section 4; EAGLE-2, arXiv 2406.16858).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
import torch.nn.functional as F

from eyas.engine.attention.base import AttentionBackend
from eyas.engine.attention.forward import ForwardBatch
from eyas.engine.checkpoint.config import DraftConfig, ModelConfig, NormNames
from eyas.engine.checkpoint.values import Raw
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.linear import Linear, pad_rows
from eyas.engine.layers.step import Step
from eyas.engine.models.base import Drafted, FinalNorm
from eyas.engine.models.blocks import Blocks
from eyas.engine.models.decoder import EmbeddingAndHead, rotaries
from eyas.engine.models.head_parts import (
    NO_SHAPE,
    LastHiddenTap,
    own_decoder,
    stored_layers,
    stored_shapes,
    token_embedding,
)
from eyas.engine.models.keys import Fit
from eyas.engine.models.layer import load_layer, run_layers
from eyas.engine.models.ops.torch_ops import TorchMachine, TorchOps

NAME = "an EAGLE-1/2 head"
UNREAD = ("layers.0.input_layernorm.weight", "norm.weight")
"""Norms that these heads do not have: another kind's, whose equations would be others."""


def describe_head(raw: Raw, folder: Path, target: ModelConfig, load_format: str) -> DraftConfig | None:
    """The head of these tensors; None if they are another kind's. ConfigError if it does not fit `target`.

    Without tensors ("dummy") a head is taken for another kind.
    """
    if load_format == "dummy":
        return None
    shapes = stored_shapes(folder, spelling)
    hidden, joined = shapes.get("fc.weight", NO_SHAPE)
    reads = shapes.get("layers.0.self_attn.q_proj.weight", NO_SHAPE)[1]
    if not hidden or joined != 2 * hidden or reads != hidden:
        return None
    fit = Fit(folder)
    decoder = own_decoder(raw, folder, target, fit)
    fit.wants(decoder.hidden_size == target.hidden_size, "its hidden_size is not the target's")
    for name in UNREAD:
        fit.wants(name not in shapes, f"{NAME} has no {name}, and it has one")
    first, *others = stored_layers(decoder.layers[0], shapes, fit)
    fit.settle()
    first = dataclasses.replace(first, norms=NormNames(before_attention=""))
    return DraftConfig(
        folder=folder,
        algorithm="eagle",
        decoder=dataclasses.replace(decoder, layers=(first, *others)),
        draft_vocab_size=target.vocab_size,
        capture_layers=(target.num_layers,),
    )


def spelling(name: str) -> str:
    """A stored tensor's name in the official spelling, without the prefix of other exports."""
    return name.removeprefix("model.")


class EagleDraft:
    """Decoder layers over fc [token embedding ; feature], the first of them without a norm before it."""

    def __init__(
        self, config: DraftConfig, weights: WeightSource, ends: EmbeddingAndHead, backend: AttentionBackend
    ) -> None:
        """`ends` are the target's; an lm_head in the file, a copy of the target's, is not read."""
        decoder = config.decoder
        self.token_map = None
        self._embedding = token_embedding(config, weights, ends.embedding)
        self._lm_head = ends.lm_head
        fc, self._bias = fc_tensors(config, weights)
        self._fc, self._eps = Linear(fc), decoder.norm_eps
        blocks = Blocks(decoder, weights, TorchMachine())
        self._layers = [load_layer(blocks, i, f"layers.{i}") for i in range(decoder.num_layers)]
        self._rotaries = rotaries(decoder, weights.placement.device)
        self._backend = backend

    @torch.inference_mode()
    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, rows: ForwardBatch, pool: KvPool
    ) -> Drafted:
        """features [R, hidden] joined with tokens int64 [R] -> features of the next positions [R, hidden].

        They are both what `logits` takes and what the next, recurrent rows are made of: no norm follows.
        """
        count = tokens.shape[0]
        embedded = F.embedding(pad_rows(tokens), self._embedding)
        x = self._fc(torch.cat((embedded, pad_rows(features)), dim=-1), self._bias)
        ops = TorchOps(Step.of(rows, pool, self._rotaries, self._backend), self._eps)
        x = run_layers(self._layers, ops, ops.residual(x))
        return Drafted(x[:count], x[:count])

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [r, hidden] as `forward` gave them -> float32 [r, vocab]."""
        return self._lm_head(rows).float()


def fc_tensors(config: DraftConfig, weights: WeightSource) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight [hidden, 2 * hidden] of fc, and its bias [hidden], if the head has one."""
    hidden = config.decoder.hidden_size
    weight = weights.take("fc.weight", (hidden, 2 * hidden))
    return weight, weights.take("fc.bias", (hidden,)) if "fc.bias" in weights else None


def load_tap(config: DraftConfig, _: WeightSource, final_norm: FinalNorm) -> LastHiddenTap:
    """The half beside the target, which has no tensors of its own."""
    return LastHiddenTap(config, final_norm)


def load_draft(
    config: DraftConfig, weights: WeightSource, ends: EmbeddingAndHead, backend: AttentionBackend
) -> EagleDraft:
    """The half that drafts. `ends`: the target's."""
    return EagleDraft(config, weights, ends, backend)
