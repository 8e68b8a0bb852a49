"""MTP heads: one more of the target's layers, after what joins the target's last state with the next token.

They are published beside the target's own layers, or alone; a `Dialect` says how the tensors are called there
and in which order they join (DeepSeek-V3, arXiv 2412.19437, section 2.2; MiMo, arXiv 2505.07608).
Embedding and output head are the target's, of which some folders hold a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from eyas.engine.attention.base import AttentionBackend
from eyas.engine.attention.forward import ForwardBatch
from eyas.engine.checkpoint.config import DraftConfig, ExpertsSpec, LatentSpec, ModelConfig
from eyas.engine.checkpoint.folder import tensor_shapes
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.linear import Linear, pad_rows
from eyas.engine.layers.norm import RmsNorm
from eyas.engine.models.base import Drafted, FinalNorm
from eyas.engine.models.decoder import DecoderLayer, EmbeddingAndHead, rotaries, step_of
from eyas.engine.models.head_parts import LastHiddenTap
from eyas.engine.models.keys import Fit, Raw

NAME = "an MTP head"


@dataclass(frozen=True)
class Dialect:
    """A published form. Its tensors' names begin with `stem` and the number of the head's layer.

    `token_norm`, `feature_norm`, `join` and `final_norm` name what the layer itself does not have.
    `feature_first`: the first half of the columns of `join` is the feature's, not the token's.
    `first_is_blank`: at position 0 the token's embedding counts as zeros.
    """

    stem: str
    token_norm: str
    feature_norm: str
    join: str
    final_norm: str
    feature_first: bool = False
    first_is_blank: bool = False


MIMO = Dialect(
    stem="model.mtp_layers.",
    token_norm="token_layernorm",
    feature_norm="hidden_layernorm",
    join="input_proj",
    final_norm="final_layernorm",
    feature_first=True,
    first_is_blank=True,
)
NEXTN = Dialect(
    stem="model.layers.",  # numbered on from the target's, or from 0 in a folder of its own
    token_norm="enorm",
    feature_norm="hnorm",
    join="eh_proj",
    final_norm="shared_head.norm",
)
DIALECTS = (MIMO, NEXTN)


def dialect_of(prefix: str) -> Dialect:
    """Of a head whose tensors' names begin with `DraftConfig.prefix`."""
    return next(dialect for dialect in DIALECTS if prefix.startswith(dialect.stem))


def describe_head(raw: Raw, folder: Path, target: ModelConfig, load_format: str) -> DraftConfig | None:
    """The head of these tensors; None if there is none among them. ConfigError if it does not fit `target`.

    A "dummy" one has no tensors yet: its config.json says that the model has such layers.
    """
    told = int(raw.get("num_nextn_predict_layers") or 0)
    if load_format == "dummy":
        shapes = {}
        stem, first = (MIMO.stem, 0) if raw.get("model_type") == "mimo" else (NEXTN.stem, target.num_layers)
        prefixes = [f"{stem}{first + i}" for i in range(told)]
    else:
        shapes = tensor_shapes(folder)
        prefixes = _prefixes(shapes)
    if not prefixes:
        return None
    prefix, count, layer = prefixes[0], max(told, len(prefixes)), target.layers[-1]
    rules = [
        (count == 1, f"it has {count} MTP layers, and heads of one are supported"),
        (int(raw["hidden_size"]) == target.hidden_size, "its hidden_size is not the target's"),
        (int(raw["vocab_size"]) == target.vocab_size, "its vocab_size is not the target's"),
        (not layer.attention.window, "a sliding window in its layer is not supported"),
        (
            isinstance(layer.attention, LatentSpec)
            or f"{prefix}.self_attn.kv_a_proj_with_mqa.weight" not in shapes,
            f"it has latent attention ({prefix}.self_attn.kv_a_proj_with_mqa), its target's last has not",
        ),
        (
            isinstance(layer.feed_forward, ExpertsSpec) or f"{prefix}.mlp.gate.weight" not in shapes,
            f"it has experts ({prefix}.mlp.gate), its target's last has not",
        ),
    ]
    fit = Fit(folder)
    for holds, complaint in rules:
        fit.wants(holds, complaint)
    fit.settle()
    return DraftConfig(
        folder=folder,
        algorithm="mtp",
        decoder=dataclasses.replace(target, folder=folder, layers=(layer,), load_format=load_format),
        draft_vocab_size=target.vocab_size,
        capture_layers=(target.num_layers,),
        prefix=prefix,
    )


def spelling(name: str) -> str:
    """As it is stored: the target's layers may stand beside the head's."""
    return name


class MtpDraft:
    """f: features, e: embeddings. z = join [norm(e) ; norm(f)], g = norm(layer(z)): g is row and feature."""

    token_map: torch.Tensor | None = None

    def __init__(
        self, config: DraftConfig, weights: Weights, ends: EmbeddingAndHead, backend: AttentionBackend
    ) -> None:
        """`ends`: the target's."""
        decoder, prefix = config.decoder, config.prefix
        hidden = decoder.hidden_size

        def norm(name: str) -> RmsNorm:
            return RmsNorm.load(decoder, weights, f"{prefix}.{name}.weight", hidden)

        self.kv_format: KvFormat = decoder.kv_format
        self._dialect = dialect = dialect_of(prefix)
        self._ends = ends
        self._token_norm, self._feature_norm = norm(dialect.token_norm), norm(dialect.feature_norm)
        self._join = Linear(weights.take(f"{prefix}.{dialect.join}.weight", (hidden, 2 * hidden)))
        self._layer = DecoderLayer(decoder, decoder.layers[0], weights, prefix)
        self._norm = norm(dialect.final_norm)
        self._rotaries = rotaries(decoder, weights.placement.device)
        self._backend = backend

    @torch.inference_mode()
    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, rows: ForwardBatch, pool: KvPool
    ) -> Drafted:
        """features [R, hidden] joined with tokens int64 [R] -> hidden [R, hidden], after the head's norm.

        That is both what `logits` takes and the feature of the next, recurrent row.
        """
        count = tokens.shape[0]
        embedded = F.embedding(pad_rows(tokens), self._ends.embedding)
        if self._dialect.first_is_blank:
            embedded = embedded.masked_fill((pad_rows(rows.positions) == 0)[:, None], 0.0)
        halves = [self._token_norm(embedded), self._feature_norm(pad_rows(features))]
        if self._dialect.feature_first:
            halves.reverse()
        x = self._join(torch.cat(halves, dim=-1))
        x = self._norm(self._layer(x, 0, step_of(rows, pool, self._rotaries, self._backend)))
        return Drafted(x[:count], x[:count])

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [r, hidden] as `forward` gave them -> float32 [r, vocab]."""
        return self._ends.lm_head(rows).float()


def load_tap(config: DraftConfig, _: Weights, final_norm: FinalNorm) -> LastHiddenTap:
    """The half beside the target, whose `final_norm` the feature has passed."""
    return LastHiddenTap(config, final_norm)


def load_draft(
    config: DraftConfig, weights: Weights, ends: EmbeddingAndHead, backend: AttentionBackend
) -> MtpDraft:
    """The half that drafts. `ends`: the target's."""
    return MtpDraft(config, weights, ends, backend)


def _prefixes(names: Iterable[str]) -> list[str]:
    """Those under which a tensor that joins stands, one per MTP layer."""
    return sorted(
        name.removesuffix(f".{dialect.join}.weight")
        for name in names
        for dialect in DIALECTS
        if name.startswith(dialect.stem) and name.endswith(f".{dialect.join}.weight")
    )
