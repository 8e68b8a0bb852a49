"""A whole model as the drafter: any family that is served, of the target's tokenizer, commonly a small one.

It predicts from tokens alone, as its target does (Leviathan et al., arXiv 2211.17192), and needs nothing of
the target's layers. What passes between the two halves is so the token of a position itself, as digits:
rows of features travel by every path that other heads' rows take, and no path is of tokens.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Generic

import torch

from eyas.common.errors import ConfigError
from eyas.common.tokenizers.source import read_tokenizer
from eyas.engine.checkpoint.config import DraftBlock, DraftConfig, ModelConfig
from eyas.engine.checkpoint.folder import tensor_shapes
from eyas.engine.checkpoint.methods import read_quantized
from eyas.engine.checkpoint.values import Raw, words
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import ProjectionT
from eyas.engine.kv.pool import KvPool
from eyas.engine.models.base import Drafted, FinalNorm
from eyas.engine.models.decoder import EMBEDDING, Decoder, ModelEnds
from eyas.engine.models.keys import Fit
from eyas.engine.models.ops.machine import Machine
from eyas.engine.models.table import MODELS, read_model

NAME = "a whole model"
DIGITS, DIGIT_BITS = 8, 4
"""Of a token's id in its feature: small enough to be exact in every dtype, 16 bytes at least for kernels."""
LAST_DIGIT = (1 << DIGIT_BITS) - 1
ALIKE = 0.99
"""The least share of tokens that have the same id in both: some ids were reserved, and named later."""
_HEADS_OWN = (".fc.weight", ".hidden_norm.weight", ".d2t", ".eh_proj.weight")
"""Ends of the names of tensors that a head has, and no model."""


def describe_head(raw: Raw, folder: Path, target: ModelConfig, load_format: str) -> DraftConfig | None:
    """The model of these tensors; None if they are a head's. ConfigError if it does not fit `target`.

    A "dummy" one is recognised by its layers, of which heads have one.
    """
    own_folder = folder.resolve() == target.folder.resolve()
    if own_folder or next(iter(words(raw, "architectures")), "") not in MODELS:
        return None
    stored = () if load_format == "dummy" else tuple(tensor_shapes(folder, read_quantized(raw)))
    if "draft_vocab_size" in raw or any(f".{name}".endswith(_HEADS_OWN) for name in stored):
        return None
    model = read_model(folder, load_format)
    names = {model.spelling(name) for name in stored}
    if EMBEDDING not in names if stored else model.num_layers == 1:
        return None
    fit = Fit(folder)
    alike = _alike(folder, target.folder)
    fit.wants(alike is not False, "its tokenizer's vocabulary is not the target's")
    fit.wants(alike or model.vocab_size == target.vocab_size, "its vocab_size is not the target's")
    fit.wants(model.delta is None, "layers with a recurrent state do not draft")
    context = max(model.context_length, target.context_length)
    reach = model.positions - model.position_offset if model.positions else context
    fit.wants(reach >= target.context_length, "its table of positions is shorter than the context")
    fit.settle()
    return DraftConfig(
        folder=folder,
        algorithm="whole_model",
        decoder=dataclasses.replace(model, context_length=context),
        draft_vocab_size=min(model.vocab_size, target.vocab_size),
        capture_layers=(),
        features=DIGITS,
        own_outputs=True,
    )


def _alike(folder: Path, target: Path) -> bool | None:
    """Whether two folders' tokenizers give nearly all tokens the same id; None: one cannot be read.

    Of those that do, vocab_size may differ: models of one family pad it to what their matrices like.
    """
    try:
        own, other = (read_tokenizer(each).get_vocab(with_added_tokens=True) for each in (folder, target))
    except ConfigError:
        return None
    return sum(other.get(name) == id for name, id in own.items()) >= ALIKE * len(own)


def spelling(name: str) -> str:
    """The stored name, which the model's family spells."""
    return name


class TokenTap:
    """The `FeatureTap`: a token's id in digits."""

    layers: tuple[int, ...] = ()

    def __init__(
        self, config: DraftConfig, weights: WeightSource, final_norm: FinalNorm, machine: Machine[Any]
    ) -> None:
        """Nothing of the target is read."""
        self._shifts = _shifts(weights)

    def features(self, tapped: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [R] -> [R, DIGITS], the least digit first, in the dtype of `tapped` [R, 0]."""
        return ((tokens[:, None] >> self._shifts) & LAST_DIGIT).to(tapped.dtype)


class WholeModelDraft(Generic[ProjectionT]):
    """The `DraftModel`: certain rows have the ids in their features for tokens, drafts their own."""

    token_map: torch.Tensor | None = None
    block: DraftBlock | None = None
    whole = True

    def __init__(
        self, config: DraftConfig, weights: WeightSource, ends: ModelEnds, machine: Machine[ProjectionT]
    ) -> None:
        """`ends`: the target's, of which it takes none."""
        self._shifts, self._outputs = _shifts(weights), config.draft_vocab_size
        self._last_id = config.decoder.vocab_size - 1
        self._model = Decoder(config.decoder, weights, machine)

    @torch.inference_mode()
    def forward(self, features: torch.Tensor, tokens: torch.Tensor, rows: Any, pool: KvPool) -> Drafted:
        """features [R, DIGITS] of certain rows, tokens [R] of others -> residual rows [R, hidden].

        Ids beyond its own, which no tokenizer gives, are taken for its last.
        """
        ids = (tokens if rows.depth else tokens_of(features, self._shifts)).clamp(max=self._last_id)
        x, _ = self._model.forward(dataclasses.replace(rows, tokens=ids), pool)
        return Drafted(x, x)

    def keep(self, features: torch.Tensor, tokens: torch.Tensor, rows: Any, pool: KvPool) -> None:
        """The same."""
        self.forward(features, tokens, rows, pool)

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [r, hidden] as `forward` gave them -> float32 [r, draft vocab]: of ids that the target has."""
        return self._model.logits(rows)[:, : self._outputs].contiguous()


def tokens_of(features: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """features [R, DIGITS] -> the ids [R], in the dtype of `shifts`."""
    return (features.to(shifts.dtype) << shifts).sum(-1, dtype=shifts.dtype)


def _shifts(weights: WeightSource) -> torch.Tensor:
    """How far each digit stands in an id, as integers of the device's ids."""
    device = weights.placement.device
    dtype = torch.int64 if device == "cpu" else torch.int32
    return torch.arange(0, DIGITS * DIGIT_BITS, DIGIT_BITS, dtype=dtype, device=device)


load_tap, load_draft = TokenTap, WholeModelDraft
