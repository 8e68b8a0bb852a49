"""EAGLE-3 heads: recognised by their tensors, tapped beside the target, decoder layers that draft.

The feature is made of three of the target's residual streams; the draft model joins it with the embedding of
the next token (EAGLE-3, arXiv 2503.01840, section 3.1). `DraftConfig.variants`: `norm_before_residual`, the
first layer adds to the normed feature; `norm_output` (EAGLE-3.1), what comes back as a feature is the normed
output; `last_hidden`, the feature is what the target's output head reads. Norms before fc are seen by their
tensors.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import DraftConfig, ModelConfig
from eyas.engine.checkpoint.values import Raw
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import ProjectionT
from eyas.engine.models.base import FeatureTap, FinalNorm
from eyas.engine.models.decoder import ModelEnds
from eyas.engine.models.heads import (
    NO_SHAPE,
    LastHiddenTap,
    LayeredDraft,
    Shapes,
    captures_and_outputs,
    embedding_and_head,
    flat,
    own_decoder,
    stored_layers,
    stored_shapes,
    stored_token_map,
)
from eyas.engine.models.keys import Fit
from eyas.engine.models.ops.machine import Blocks, Machine
from eyas.engine.models.ops.parts import JoinPart

NAME = "an EAGLE-3 head"
OWN_ENDS = frozenset({"lm_head.weight", "embed_tokens.weight"})
"""What a head of another width than the target's cannot share with it."""

_FEATURE_NORM = "layers.0.hidden_norm.weight"
_IDS = "eagle_aux_hidden_state_layer_ids"


def describe_head(raw: Raw, folder: Path, target: ModelConfig, load_format: str) -> DraftConfig | None:
    """The head of these tensors; None if they are another kind's. ConfigError if it does not fit `target`.

    A "dummy" one has no tensors yet: it is an EAGLE-3 head of the sizes in its config.json.
    """
    raw, dummy = flat(raw), load_format == "dummy"
    shapes: Shapes = {} if dummy else stored_shapes(raw, folder, spelling)
    if not (dummy or _is_eagle3(shapes)):
        return None
    fit = Fit(folder)
    decoder = own_decoder(raw, folder, target, fit)
    layers = decoder.layers
    if not dummy:
        layers = stored_layers(layers[0], shapes, fit, frozenset({_FEATURE_NORM}))
    config = DraftConfig(
        folder=folder,
        algorithm="eagle3",
        decoder=dataclasses.replace(decoder, layers=layers, load_format=load_format),
        capture_layers=_capture_layers(raw, target.num_layers),
        variants=_variants(raw),
        target_hidden_size=target.hidden_size,
        **captures_and_outputs(raw, shapes, target),
    )
    _check_widths(raw, config, shapes, fit)
    fit.settle()
    return config


def spelling(name: str) -> str:
    """The name under which the classes here ask for what is stored as `name`: the official `midlayer.` is
    `layers.0.`, and no name begins with `model.`.
    """
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


class Eagle3Tap:
    """Which layers' inputs are tapped, and how they become one feature."""

    def __init__(self, config: DraftConfig, weights: WeightSource, machine: Machine[Any]) -> None:
        names, width = _fc_norms(config, weights), config.captured_width
        self.layers = config.capture_layers
        self._machine, self._eps = machine, config.decoder.norm_eps
        self._fc = machine.matrix(weights.take("fc.weight", (config.decoder.hidden_size, width)))
        self._gains = [weights.take(name, (width // len(names),)) for name in names]

    @torch.inference_mode()
    def features(self, tapped: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """tapped [R, layers * target's hidden], low to high -> features [R, hidden]."""
        if self._gains:
            tapped = self._machine.norms(tapped, self._gains, self._eps)
        return self._machine.product(tapped, self._fc)


class Eagle3Draft(LayeredDraft[ProjectionT]):
    """Decoder layers, of which the first reads [token embedding ; feature], both normed."""

    def __init__(
        self, config: DraftConfig, weights: WeightSource, ends: ModelEnds, machine: Machine[ProjectionT]
    ) -> None:
        """`ends` are the target's; a head with an embedding or an lm_head of its own uses that instead."""
        decoder, hidden = config.decoder, config.decoder.hidden_size
        self.token_map = stored_token_map(config, weights)
        self._variants = config.variants
        embedding, lm_head = embedding_and_head(config, weights, ends, machine)
        names = "layers.0.input_layernorm.weight", _FEATURE_NORM
        gains = weights.take(names[0], (hidden,)), weights.take(names[1], (hidden,))
        self._join, self._feature_gain = JoinPart(embedding, decoder.norm_eps, gains), gains[1]
        super().__init__(Blocks(decoder, weights, machine), lm_head, torch.cat(gains))
        self._gain = weights.take("norm.weight", (hidden,))

    def entering(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[token embedding ; feature], both normed, and as the residual the feature."""
        joined = self._machine.join(features, tokens, positions, self._join)
        if "norm_before_residual" in self._variants:
            features = self._machine.norm(features, self._feature_gain, self._eps)
        return joined, features

    def leaving(self, x: torch.Tensor) -> torch.Tensor:
        """The rows before the head's norm, or with `norm_output` after it."""
        return self._normed(x) if "norm_output" in self._variants else x

    def scored(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows after the head's norm."""
        return rows if "norm_output" in self._variants else self._normed(rows)

    def _normed(self, rows: torch.Tensor) -> torch.Tensor:
        return self._machine.norm(rows, self._gain, self._eps)


def load_tap(
    config: DraftConfig, weights: WeightSource, final_norm: FinalNorm, machine: Machine[Any]
) -> FeatureTap:
    """The half beside the target. Captured layers are tapped before any norm, the last hidden state after."""
    if "last_hidden" in config.variants:
        return LastHiddenTap(config, final_norm)
    return Eagle3Tap(config, weights, machine)


load_draft = Eagle3Draft


def _fc_norms(config: DraftConfig, weights: WeightSource) -> list[str]:
    """The names of the norms before fc, each over an equal part of what is captured; mostly there is none."""
    if "fc_norm.0.weight" in weights:  # EAGLE-3.1
        return [f"fc_norm.{i}.weight" for i in range(len(config.capture_layers))]
    return ["input_norm.weight"] if "input_norm.weight" in weights else []  # speculators


def _is_eagle3(shapes: Shapes) -> bool:
    """Attention reads twice what it writes."""
    hidden = shapes.get("layers.0.self_attn.o_proj.weight", NO_SHAPE)[0]
    return hidden > 0 and shapes.get("layers.0.self_attn.q_proj.weight", NO_SHAPE)[1] == 2 * hidden


def _variants(raw: Raw) -> frozenset[str]:
    named = {name for name in ("norm_before_residual", "norm_output") if values.switch(raw, name, False)}
    return frozenset(named | ({"last_hidden"} if _is_last_hidden(raw) else set()))


def _is_last_hidden(raw: Raw) -> bool:
    return not values.switch(values.section(raw, "eagle_config"), "use_aux_hidden_state", True)


def _capture_layers(raw: Raw, layers: int) -> tuple[int, ...]:
    """Without a field the paper's three.

    Two fields of one name mean different things: within "eagle_config" (SpecForge, SGLang, NVIDIA) it counts
    the layers whose *output* is captured, hence + 1; outside (speculators, vLLM) those whose input is.
    """
    if _is_last_hidden(raw):
        return (layers,)
    if ids := values.wholes(values.section(raw, "eagle_config"), _IDS, least=-1):
        return tuple(i + 1 for i in ids)
    return values.wholes(raw, _IDS) or (2, layers // 2, layers - 3)


def _check_widths(raw: Raw, config: DraftConfig, shapes: Shapes, fit: Fit) -> None:
    """Was the head made for rows of the target's width?"""
    target = config.target_hidden_size
    same = config.decoder.hidden_size == target
    lacks = " and ".join(sorted(OWN_ENDS - set(shapes)))
    fit.wants(raw.get("target_hidden_size") in (None, target), "its target_hidden_size is not the target's")
    fit.wants(same or not lacks, f"its hidden_size is not the target's, and it lacks {lacks}")
    fit.wants(
        same or "last_hidden" not in config.variants,
        "its hidden_size is not the target's, whose rows it reads",
    )
