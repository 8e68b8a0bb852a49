"""DFlash heads: a few decoder layers that draft a whole block in one pass, as block diffusion does.

Features stand in the KV of every layer, where rows of tokens have their keys and values: those of position i
are products of the feature of position i alone. The block is the root token and masks behind it, which see
all features before them and each other (DFlash, arXiv 2602.06036). docs/draft-heads.md states the equations,
the tensors and the keys of config.json.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Generic

import torch

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import DraftBlock, DraftConfig, LayerSpec, ModelConfig
from eyas.engine.checkpoint.values import Raw
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import ProjectionT
from eyas.engine.kv.pool import KvPool
from eyas.engine.models.base import Drafted, FeatureTap, FinalNorm
from eyas.engine.models.decoder import ModelEnds
from eyas.engine.models.heads import (
    NO_SHAPE,
    Shapes,
    captures_and_outputs,
    embedding_and_head,
    flat,
    own_decoder,
    stored_layers,
    stored_shapes,
    stored_token_map,
)
from eyas.engine.models.injected import InjectedKv
from eyas.engine.models.keys import MOST_COLUMNS, Fit
from eyas.engine.models.layer import load_layers, run_layers
from eyas.engine.models.ops.machine import Blocks, Machine

NAME = "a DFlash head"
UNKNOWN = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
"""Keys of `dflash_config` for targets of equations unknown here."""
USUAL_BLOCK = 16
DEEPSPEC = "num_anchors"
"""The key of DeepSpec's heads, which draft from the root's row on."""

_READ = frozenset({"layers.0.input_layernorm.weight"})


def describe_head(raw: Raw, folder: Path, target: ModelConfig, load_format: str) -> DraftConfig | None:
    """The head of these tensors; None if they are another kind's. ConfigError if it does not fit `target`.

    A "dummy" one has no tensors yet: its config.json says that it is one.
    """
    raw, dummy = flat(raw), load_format == "dummy"
    shapes: Shapes = {} if dummy else stored_shapes(raw, folder, spelling)
    if not (_says_so(raw) if dummy else _is_dflash(shapes)):
        return None
    own, fit = {**raw, **values.section(raw, "dflash_config")}, Fit(folder)
    decoder = own_decoder({**raw, "sliding_window": None}, folder, target, fit)
    layers = decoder.layers
    if dummy:
        usual = dataclasses.replace(layers[0].attention, head_norms=True)
        layers = tuple(dataclasses.replace(layer, attention=usual) for layer in layers)
    else:
        layers = stored_layers(layers[0], shapes, fit, _READ)
    fit.wants(decoder.hidden_size == target.hidden_size, "its hidden_size is not the target's")
    fit.wants(not any(own.get(key) for key in UNKNOWN), f"{', '.join(UNKNOWN)} are not supported")
    layers = _windowed(layers, own, fit)
    config = DraftConfig(
        folder=folder,
        algorithm="dflash",
        decoder=dataclasses.replace(decoder, layers=layers, load_format=load_format),
        capture_layers=_capture_layers(own, target.num_layers, len(layers)),
        block=_block(own, target.vocab_size),
        **captures_and_outputs(raw, shapes, target),
    )
    fit.settle()
    return config


def spelling(name: str) -> str:
    """The stored name, without the prefix of other exports."""
    return name.removeprefix("model.")


class DFlashTap:
    """Which layers' outputs are tapped, and how they become one feature."""

    def __init__(self, config: DraftConfig, weights: WeightSource, machine: Machine[Any]) -> None:
        hidden, width = config.decoder.hidden_size, config.captured_width
        self.layers = config.capture_layers
        self._machine, self._eps = machine, config.decoder.norm_eps
        self._fc = machine.matrix(weights.take("fc.weight", (hidden, width)))
        self._gain = weights.take("hidden_norm.weight", (hidden,))

    @torch.inference_mode()
    def features(self, tapped: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """tapped [R, layers * target's hidden], low to high -> features [R, hidden]."""
        return self._machine.norm(self._machine.product(tapped, self._fc), self._gain, self._eps)


class DFlashDraft(Generic[ProjectionT]):
    """The `DraftModel`: certain rows only leave keys and values, a block's rows are those of a decoder."""

    whole = False

    def __init__(
        self, config: DraftConfig, weights: WeightSource, ends: ModelEnds, machine: Machine[ProjectionT]
    ) -> None:
        """`ends` are the target's; a head with an embedding or an lm_head of its own uses that instead."""
        decoder, hidden = config.decoder, config.decoder.hidden_size
        blocks = Blocks(decoder, weights, machine)
        self.token_map = stored_token_map(config, weights)
        self.block = config.block
        self._machine, self._eps = machine, decoder.norm_eps
        self._embedding, self._lm_head = embedding_and_head(config, weights, ends, machine)
        self._layers = list(load_layers(blocks, "layers"))
        self._injected = InjectedKv(blocks, self._layers)
        self._few_rows = machine.most_rows(self._layers)
        self._gain = weights.take("norm.weight", (hidden,))

    @torch.inference_mode()
    def forward(self, features: torch.Tensor, tokens: torch.Tensor, rows: Any, pool: KvPool) -> Drafted:
        """Of a block's tokens [R], which alone are read: rows [R, hidden], after the last norm; or as many as
        are said to leave it.
        """
        if not rows.depth:
            self.keep(features, tokens, rows, pool)
            return Drafted(features, features)
        ops = self._machine.ops(rows, pool, self._eps, self._few_rows)
        x = run_layers(self._layers, ops, ops.embed(self._embedding, 1.0))
        x = self._machine.norm(x, self._gain, self._eps)
        return Drafted(x, x)

    @torch.inference_mode()
    def keep(self, features: torch.Tensor, tokens: torch.Tensor, rows: Any, pool: KvPool) -> None:
        """Writes keys and values of features [R, hidden] to every layer; tokens are not read."""
        ops = self._machine.ops(rows, pool, self._eps, self._few_rows, whole=False)
        self._injected.store(features, ops)

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [r, hidden] as `forward` gave them -> float32 [r, draft vocab]."""
        return self._machine.logits(rows, self._lm_head)


def load_tap(
    config: DraftConfig, weights: WeightSource, final_norm: FinalNorm, machine: Machine[Any]
) -> FeatureTap:
    """The half beside the target. Captured layers are tapped before any norm of the target."""
    return DFlashTap(config, weights, machine)


load_draft = DFlashDraft


def _is_dflash(shapes: Shapes) -> bool:
    """Its features have a norm of their own, and the queries of layer 0 read rows as wide as it writes."""
    writes, reads = (shapes.get(f"layers.0.self_attn.{name}_proj.weight", NO_SHAPE) for name in "oq")
    return "hidden_norm.weight" in shapes and writes[0] == reads[1] > 0


def _says_so(raw: Raw) -> bool:
    named = raw.get("speculators_model_type") in ("dflash", "dspark")
    return named or "dflash_config" in raw or DEEPSPEC in raw


def _windowed(layers: tuple[LayerSpec, ...], own: Raw, fit: Fit) -> tuple[LayerSpec, ...]:
    """With the windows that `layer_types` says. Such layers see nothing behind a row, whatever others do."""
    kinds, window = values.words(own, "layer_types"), values.whole(own, "sliding_window", 0)
    if "sliding_attention" not in kinds:
        return layers
    causal = values.switch(own, "is_causal", True)
    ahead = values.switch(own, "sliding_window_non_causal", False) or not causal
    fit.wants(not ahead, "its layers with a window see rows behind their own, which is not supported")
    matched = len(kinds) == len(layers) and window > 0
    fit.wants(matched, "its layer_types and sliding_window do not go together")
    sees = {"sliding_attention": window, "full_attention": 0}
    return tuple(
        dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, window=sees.get(kind, 0)))
        for layer, kind in zip(layers, kinds, strict=False)
    )


def _block(own: Raw, vocab: int) -> DraftBlock:
    """What is published as block_size counts the root token, from whose row only some heads draft."""
    size = values.whole(own, "block_size", USUAL_BLOCK, least=2, most=MOST_COLUMNS)
    mask = values.whole(own, "mask_token_id", most=vocab - 1)
    first = 0 if values.switch(own, "sample_from_anchor", DEEPSPEC in own) else 1
    return DraftBlock(most=size - first, mask_token=mask, first=first)


def _capture_layers(own: Raw, target: int, layers: int) -> tuple[int, ...]:
    """`target_layer_ids` count the layers whose *output* is captured (-1: the embedding), hence + 1;
    `aux_hidden_state_layer_ids` (speculators) those whose input is.

    Without either as many as the head has `layers`, spread evenly from the second to the third last.
    """
    if ids := values.wholes(own, "target_layer_ids", least=-1):
        return tuple(i + 1 for i in ids)
    if ids := values.wholes(own, "aux_hidden_state_layer_ids"):
        return ids
    if layers == 1:
        return (target // 2 + 1,)
    return tuple(2 + round(i * (target - 4) / (layers - 1)) for i in range(layers))
