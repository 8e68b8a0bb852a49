"""EAGLE-1 and EAGLE-2 heads, which are the same: the second only grows other trees.

The feature is the target's last hidden state, as its output head reads it; the draft model joins it with the
embedding of the next token and predicts the next feature, which the target's output head turns into logits
(EAGLE, arXiv 2401.15077, section 4; EAGLE-2, arXiv 2406.16858).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from eyas.engine.checkpoint.config import DraftConfig, ModelConfig, NormNames
from eyas.engine.checkpoint.values import Raw
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import ProjectionT
from eyas.engine.models.decoder import ModelEnds
from eyas.engine.models.heads import (
    NO_SHAPE,
    LayeredDraft,
    last_hidden_tap,
    own_decoder,
    stored_layers,
    stored_shapes,
    token_embedding,
)
from eyas.engine.models.keys import Fit
from eyas.engine.models.ops.machine import Blocks, Machine
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
    shapes = stored_shapes(raw, folder, spelling)
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


class EagleDraft(LayeredDraft[ProjectionT]):
    """Decoder layers over fc [token embedding ; feature], the first of them without a norm before it."""

    def __init__(
        self, config: DraftConfig, weights: WeightSource, ends: ModelEnds, machine: Machine[ProjectionT]
    ) -> None:
        """`ends` are the target's; an lm_head in the file, a copy of the target's, is not read."""
        decoder, hidden = config.decoder, config.decoder.hidden_size
        self._join = JoinPart(token_embedding(config, weights, ends.embedding), decoder.norm_eps)
        self._fc = machine.matrix(weights.take("fc.weight", (hidden, 2 * hidden)))
        self._bias = weights.take("fc.bias", (hidden,)) if "fc.bias" in weights else None
        super().__init__(Blocks(decoder, weights, machine), ends.lm_head, gain=None)

    def entering(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """fc [token embedding ; feature], both to be read and as the residual."""
        joined = self._machine.join(features, tokens, positions, self._join)
        x = self._machine.product(joined, self._fc, self._bias)
        return x, x

    def leaving(self, x: torch.Tensor) -> torch.Tensor:
        """The features of the next positions: no norm follows."""
        return x

    def scored(self, rows: torch.Tensor) -> torch.Tensor:
        """The same."""
        return rows


load_tap, load_draft = last_hidden_tap, EagleDraft
