"""EAGLE-1 and EAGLE-2 heads, which are the same: the second only grows other trees.

The feature is the target's last hidden state, as its output head reads it; the draft model joins it with the
embedding of the next token and predicts the next feature, which the target's output head turns into logits
(EAGLE, arXiv 2401.15077, section 4; EAGLE-2, arXiv 2406.16858).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Generic

import torch

from eyas.engine.checkpoint.config import DraftConfig, ModelConfig, NormNames
from eyas.engine.checkpoint.values import Raw
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import ProjectionT
from eyas.engine.kv.pool import KvPool
from eyas.engine.models.base import Drafted, FinalNorm
from eyas.engine.models.blocks import Blocks
from eyas.engine.models.decoder import ModelEnds
from eyas.engine.models.head_parts import (
    NO_SHAPE,
    HeadLayers,
    LastHiddenTap,
    own_decoder,
    stored_layers,
    stored_shapes,
    token_embedding,
)
from eyas.engine.models.keys import Fit
from eyas.engine.models.ops.machine import Machine
from eyas.engine.models.ops.parts import JoinPart

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


class EagleDraft(Generic[ProjectionT]):
    """Decoder layers over fc [token embedding ; feature], the first of them without a norm before it."""

    token_map: torch.Tensor | None = None

    def __init__(
        self, config: DraftConfig, weights: WeightSource, ends: ModelEnds, machine: Machine[ProjectionT]
    ) -> None:
        """`ends` are the target's; an lm_head in the file, a copy of the target's, is not read."""
        decoder, hidden = config.decoder, config.decoder.hidden_size
        self._machine, self._lm_head = machine, ends.lm_head
        self._join = JoinPart(token_embedding(config, weights, ends.embedding), decoder.norm_eps)
        self._fc = machine.matrix(weights.take("fc.weight", (hidden, 2 * hidden)))
        self._bias = weights.take("fc.bias", (hidden,)) if "fc.bias" in weights else None
        self._layers = HeadLayers(Blocks(decoder, weights, machine), gain=None)

    @torch.inference_mode()
    def forward(self, features: torch.Tensor, tokens: torch.Tensor, rows: Any, pool: KvPool) -> Drafted:
        """features [R, hidden] joined with tokens [R] -> features of the next positions [R, hidden].

        They are both what `logits` takes and what the next, recurrent rows are made of: no norm follows.
        """
        x = self._entering(features, tokens, rows)
        x = self._layers(x, x, rows, pool)
        return Drafted(x, x)

    @torch.inference_mode()
    def keep(self, features: torch.Tensor, tokens: torch.Tensor, rows: Any, pool: KvPool) -> None:
        """As of `DraftModel`."""
        x = self._entering(features, tokens, rows)
        self._layers.keep(x, x, rows, pool)

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [r, hidden] as `forward` gave them -> float32 [r, vocab]."""
        return self._machine.logits(rows, self._lm_head)

    def _entering(self, features: torch.Tensor, tokens: torch.Tensor, rows: Any) -> torch.Tensor:
        joined = self._machine.join(features, tokens, rows.positions, self._join)
        return self._machine.product(joined, self._fc, self._bias)


def load_tap(
    config: DraftConfig, weights: WeightSource, final_norm: FinalNorm, machine: Machine[Any]
) -> LastHiddenTap:
    """The half beside the target, which has no tensors of its own."""
    return LastHiddenTap(config, final_norm)


def load_draft(
    config: DraftConfig, weights: WeightSource, ends: ModelEnds, machine: Machine[Any]
) -> EagleDraft[Any]:
    """The half that drafts. `ends`: the target's."""
    return EagleDraft(config, weights, ends, machine)
