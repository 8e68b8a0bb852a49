"""EAGLE-3 heads: recognised by their tensors, tapped beside the target, one decoder layer that drafts.

The feature is made of three of the target's residual streams; the draft model joins it with the embedding of
the next token (EAGLE-3, section 3.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F

from eyas.common.errors import ConfigError
from eyas.engine.attention.base import AttentionBackend
from eyas.engine.attention.forward import ForwardBatch
from eyas.engine.checkpoint.config import DraftConfig, ModelConfig
from eyas.engine.checkpoint.folder import tensor_shapes
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.attention import Attention
from eyas.engine.layers.linear import Linear, pad_rows
from eyas.engine.layers.mlp import GatedMlp
from eyas.engine.layers.norm import RmsNorm
from eyas.engine.models import llama
from eyas.engine.models.base import Drafted, FinalNorm
from eyas.engine.models.decoder import EmbeddingAndHead, rotaries, step_of
from eyas.engine.models.keys import Raw

NAME = "an EAGLE-3 head"
OWN_HEAD = frozenset({"lm_head.weight", "d2t"})
"""The tensors of a head with a vocabulary of its own."""


def describe_head(raw: Raw, folder: Path, target: ModelConfig, load_format: str) -> DraftConfig | None:
    """The head of these tensors; None if they are another kind's. ConfigError if it does not fit `target`.

    A "dummy" one has no tensors yet: it is an EAGLE-3 head of the sizes in its config.json.
    """
    captured = _capture_layers(raw, target.num_layers)
    outputs = raw.get("draft_vocab_size")
    if load_format != "dummy":
        shapes = {spelling(name): shape for name, shape in tensor_shapes(folder).items()}
        outputs = shapes.get("lm_head.weight", (None,))[0]
        if not _is_eagle3(shapes, int(raw["hidden_size"]), len(captured)):
            return None
    decoder = llama.describe(raw, folder)
    # Some heads state their target's depth; and rows go as far as the target's, whatever the head saw.
    context = max(decoder.context_length, target.context_length)
    window = int(raw.get("sliding_window") or 0) if raw.get("use_sliding_window", True) else 0
    rules = [
        (not raw.get("norm_before_residual"), "norm_before_residual is not supported"),
        (decoder.hidden_size == target.hidden_size, "its hidden_size is not the target's"),
        (decoder.vocab_size == target.vocab_size, "its vocab_size is not the target's"),
        (not 0 < window < context, "its sliding_window is shorter than the context"),
        (all(0 <= i <= target.num_layers for i in captured), f"the target has no layers {captured}"),
    ]
    for holds, complaint in rules:
        if not holds:
            raise ConfigError(f"draft head {folder}: {complaint}")
    layers = decoder.layers[:1]
    decoder = dataclasses.replace(decoder, layers=layers, context_length=context, load_format=load_format)
    stored = outputs is not None and load_format != "dummy"
    outputs = int(outputs or target.vocab_size)
    return DraftConfig(
        folder=folder,
        algorithm="eagle3",
        decoder=decoder,
        draft_vocab_size=outputs,
        capture_layers=captured,
        dummy_tensors=frozenset() if outputs == target.vocab_size else OWN_HEAD,
        own_outputs=stored or outputs != target.vocab_size,
    )


def spelling(name: str) -> str:
    """A stored tensor's name in the official spelling: no `model.` prefix, `midlayer.` for layer 0."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


class Eagle3Tap:
    """Which layers' inputs are tapped, and how they become one feature."""

    def __init__(self, config: DraftConfig, weights: Weights) -> None:
        hidden, count = config.decoder.hidden_size, len(config.capture_layers)
        self.layers = config.capture_layers
        self._fc = Linear(weights.take("fc.weight", (hidden, count * hidden)))
        self._norms = []
        if "fc_norm.0.weight" in weights:
            names = [f"fc_norm.{i}.weight" for i in range(count)]
            self._norms = [RmsNorm.load(config.decoder, weights, name, hidden) for name in names]

    @torch.inference_mode()
    def features(self, tapped: torch.Tensor) -> torch.Tensor:
        """tapped [R, layers * hidden], low to high -> features [R, hidden]."""
        if self._norms:
            chunks = tapped.chunk(len(self._norms), dim=-1)
            tapped = torch.cat([norm(c) for norm, c in zip(self._norms, chunks, strict=True)], dim=-1)
        return self._fc(tapped)


class Eagle3Draft:
    """One decoder layer over [token embedding ; feature]."""

    def __init__(
        self, config: DraftConfig, weights: Weights, ends: EmbeddingAndHead, backend: AttentionBackend
    ) -> None:
        """`ends` are the target's; a head with an embedding or an lm_head of its own uses that instead."""
        decoder, spec = config.decoder, config.decoder.layers[0]
        hidden = decoder.hidden_size

        def norm(name: str) -> RmsNorm:
            return RmsNorm.load(decoder, weights, name, hidden)

        self.kv_format: KvFormat = config.kv_format
        self.token_map = token_map(config, weights)
        self._embedding = ends.embedding
        if "embed_tokens.weight" in weights:
            self._embedding = weights.take("embed_tokens.weight", (decoder.vocab_size, hidden))
        self._lm_head = ends.lm_head
        if "lm_head.weight" in weights:
            self._lm_head = Linear(weights.take("lm_head.weight", (config.draft_vocab_size, hidden)))
        self._token_norm = norm("midlayer.input_layernorm.weight")
        self._feature_norm = norm("midlayer.hidden_norm.weight")
        self._attention = Attention(decoder, spec.attention, weights, "midlayer.self_attn", 2 * hidden)
        self._mlp_norm = norm("midlayer.post_attention_layernorm.weight")
        self._mlp = GatedMlp(spec.feed_forward, weights, "midlayer.mlp", hidden)
        self._norm = norm("norm.weight")
        self._rotaries = rotaries(decoder, weights.placement.device)
        self._backend = backend

    @torch.inference_mode()
    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, rows: ForwardBatch, pool: KvPool
    ) -> Drafted:
        """features [R, hidden] joined with tokens int64 [R] -> hidden [R, hidden], before the head's norm.

        That is both what `logits` takes and the feature of the next, recurrent row.
        """
        count = tokens.shape[0]
        x = pad_rows(features)
        embedded = F.embedding(pad_rows(tokens), self._embedding)
        joined = torch.cat((self._token_norm(embedded), self._feature_norm(x)), dim=-1)
        step = step_of(rows, pool, self._rotaries, self._backend)
        x = x + self._attention(joined, 0, step)
        x += self._mlp(self._mlp_norm(x))
        return Drafted(x[:count], x[:count])

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [r, hidden] as `forward` gave them -> float32 [r, draft vocab]."""
        return self._lm_head(self._norm(rows)).float()


def load_tap(config: DraftConfig, weights: Weights, _: FinalNorm) -> Eagle3Tap:
    """The half beside the target; it taps before any norm."""
    return Eagle3Tap(config, weights)


def load_draft(
    config: DraftConfig, weights: Weights, ends: EmbeddingAndHead, backend: AttentionBackend
) -> Eagle3Draft:
    """The half that drafts. `ends`: the target's."""
    return Eagle3Draft(config, weights, ends, backend)


def token_map(config: DraftConfig, weights: Weights) -> torch.Tensor | None:
    """Target id of each draft id, int64 [draft vocab], from the stored offsets; None: they are the same."""
    size, vocab = config.draft_vocab_size, config.decoder.vocab_size
    if "d2t" not in weights:
        if size != vocab:
            raise ConfigError(f"draft head {config.folder} has {size} outputs but no d2t map to {vocab} ids")
        return None
    token_map = torch.arange(size) + weights.take("d2t", (size,), torch.int64).cpu()
    if not bool(((token_map >= 0) & (token_map < vocab)).all()):
        raise ConfigError(f"d2t of draft head {config.folder} maps outside the target's {vocab} ids")
    return token_map.to(weights.placement.device)


def _is_eagle3(shapes: Mapping[str, tuple[int, ...]], hidden: int, captured: int) -> bool:
    queries = shapes.get("midlayer.self_attn.q_proj.weight", (0, 0))
    return shapes.get("fc.weight") == (hidden, captured * hidden) and queries[1] == 2 * hidden


def _capture_layers(raw: Raw, layers: int) -> tuple[int, ...]:
    """Without a field the paper's three; the field names layers whose *output* is captured, hence + 1."""
    ids = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(int(i) + 1 for i in ids) if ids else (2, layers // 2, layers - 3)
