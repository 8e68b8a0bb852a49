"""EAGLE-3 heads in two halves: `Eagle3Capture` beside the target, `Eagle3Head` wherever drafts are made.

One feature row a committed token passes between them. Draft row i joins (feature of position i, token
i + 1) and stands at RoPE position i; who shifts the tokens is the drafter's business.
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
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.attention import Attention, Step
from eyas.engine.layers.linear import Linear, pad_rows
from eyas.engine.layers.mlp import SwiGlu
from eyas.engine.layers.norm import RmsNorm
from eyas.engine.layers.rotary import Rotary
from eyas.engine.models import llama
from eyas.engine.models.decoder import EmbeddingAndHead
from eyas.engine.models.keys import Raw
from eyas.engine.models.table import describe


class Eagle3Capture:
    """The target's side: which layers' inputs are captured, and how they become one feature."""

    def __init__(self, config: DraftConfig, weights: Weights) -> None:
        hidden, count = config.decoder.hidden_size, len(config.capture_layers)
        self.layers = config.capture_layers
        self._fc = Linear(weights.take("fc.weight", (hidden, count * hidden)))
        self._norms = []
        if "fc_norm.0.weight" in weights:
            gains = [weights.take(f"fc_norm.{i}.weight", (hidden,)) for i in range(count)]
            self._norms = [RmsNorm(gain, config.decoder.norm_eps) for gain in gains]

    @torch.inference_mode()
    def features(self, captured: torch.Tensor) -> torch.Tensor:
        """captured [R, layers * hidden], low to high -> features [R, hidden]."""
        if self._norms:
            chunks = captured.chunk(len(self._norms), dim=-1)
            captured = torch.cat([norm(c) for norm, c in zip(self._norms, chunks, strict=True)], dim=-1)
        return self._fc(captured)


class Eagle3Head:
    """The drafter's side: one decoder layer over [token embedding ; feature]."""

    def __init__(
        self, config: DraftConfig, weights: Weights, ends: EmbeddingAndHead, backend: AttentionBackend
    ) -> None:
        """`ends` are the target's; a head with an embedding or an lm_head of its own uses that instead."""
        decoder = config.decoder
        hidden, eps = decoder.hidden_size, decoder.norm_eps

        def norm(name: str) -> RmsNorm:
            return RmsNorm(weights.take(name, (hidden,)), eps)

        self.config = config
        self.token_map = token_map(config, weights)
        self._embedding = ends.embedding
        if "embed_tokens.weight" in weights:
            self._embedding = weights.take("embed_tokens.weight", (decoder.vocab_size, hidden))
        self._lm_head = ends.lm_head
        if "lm_head.weight" in weights:
            self._lm_head = Linear(weights.take("lm_head.weight", (config.draft_vocab_size, hidden)))
        self._token_norm = norm("midlayer.input_layernorm.weight")
        self._feature_norm = norm("midlayer.hidden_norm.weight")
        self._attention = Attention(decoder, weights, "midlayer.self_attn", 2 * hidden)
        self._mlp_norm = norm("midlayer.post_attention_layernorm.weight")
        self._mlp = SwiGlu(weights, "midlayer.mlp", hidden, decoder.intermediate_size)
        self._norm = norm("norm.weight")
        device = weights.placement.device
        self._rotary = Rotary(decoder.rope, decoder.head_dim, decoder.context_length, device)
        self._backend = backend

    @torch.inference_mode()
    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, batch: ForwardBatch, pool: KvPool
    ) -> torch.Tensor:
        """features [R, hidden] joined with tokens int64 [R] -> hidden [R, hidden], before the head's norm.

        The result is both what `logits` takes and the feature of the next, recurrent row.
        """
        rows = tokens.shape[0]
        x = pad_rows(features)
        embedded = F.embedding(pad_rows(tokens), self._embedding)
        joined = torch.cat((self._token_norm(embedded), self._feature_norm(x)), dim=-1)
        angles = self._rotary.angles(pad_rows(batch.positions))
        step = Step(pool, pool.slots(batch.kv_rows), batch.plan, angles)
        x = x + self._attention(joined, 0, step, self._rotary, self._backend)
        x += self._mlp(self._mlp_norm(x))
        return x[:rows]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [r, hidden] as `forward` gave it -> float32 [r, draft vocab]."""
        return self._lm_head(self._norm(hidden)).float()


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


def describe_head(raw: Raw, folder: Path, target: ModelConfig, load_format: str) -> DraftConfig:
    """Recognises a head by its tensors. Raises ConfigError if it does not fit `target`.

    A "dummy" one has no tensors yet: it is an EAGLE-3 head of the sizes in its config.json.
    """
    dummy = load_format == "dummy"
    stored = {} if dummy else tensor_shapes(folder)
    shapes = {strip_prefix(name): shape for name, shape in stored.items()}
    decoder = describe(llama, raw, folder)
    # Some heads state their target's depth; and rows go as far as the target's, whatever the head saw.
    context = max(decoder.context_length, target.context_length)
    layers = decoder.layers[:1]
    decoder = dataclasses.replace(decoder, layers=layers, context_length=context, load_format=load_format)
    window = int(raw.get("sliding_window") or 0) if raw.get("use_sliding_window", True) else 0
    captured = _capture_layers(raw, target.num_layers)
    rules = [
        (dummy or _is_eagle3(shapes, decoder.hidden_size, len(captured)), "it is not an EAGLE-3 head"),
        (not raw.get("norm_before_residual"), "norm_before_residual is not supported"),
        (decoder.hidden_size == target.hidden_size, "its hidden_size is not the target's"),
        (decoder.vocab_size == target.vocab_size, "its vocab_size is not the target's"),
        (not 0 < window < context, "its sliding_window is shorter than the context"),
        (all(0 <= i <= target.num_layers for i in captured), f"the target has no layers {captured}"),
    ]
    for holds, complaint in rules:
        if not holds:
            raise ConfigError(f"draft head {folder}: {complaint}")
    outputs = raw.get("draft_vocab_size") if dummy else shapes.get("lm_head.weight", (None,))[0]
    outputs = int(outputs or target.vocab_size)
    return DraftConfig(
        folder=folder,
        algorithm="eagle3",
        decoder=decoder,
        draft_vocab_size=outputs,
        capture_layers=captured,
        dummy_tensors=frozenset(() if outputs == target.vocab_size else ("lm_head.weight", "d2t")),
    )


def strip_prefix(name: str) -> str:
    """A head's tensor name in the official spelling: no `model.` prefix, `midlayer.` for layer 0."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _is_eagle3(shapes: Mapping[str, tuple[int, ...]], hidden: int, captured: int) -> bool:
    queries = shapes.get("midlayer.self_attn.q_proj.weight", (0, 0))
    return shapes.get("fc.weight") == (hidden, captured * hidden) and queries[1] == 2 * hidden


def _capture_layers(raw: Raw, layers: int) -> tuple[int, ...]:
    """Without a field the paper's three; the field names layers whose *output* is captured, hence + 1."""
    ids = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(int(i) + 1 for i in ids) if ids else (2, layers // 2, layers - 3)
