"""MTP heads: more of the target's layers, each after what joins a state with a later token.

They are published beside the target's own layers, or alone; a `Dialect` says how the tensors are called there
and in which order they join (DeepSeek-V3, arXiv 2412.19437, section 2.2; MiMo, arXiv 2505.07608).
Embedding and output head are the target's, of which some folders hold a copy.

Of several layers, layer k joins the state of position i in the layer before (the target's, for layer 0) with
the token of position i + k + 1, and predicts the one after. Its row of that stands at i + k, k further than
in the paper: so row j of every layer is made of nothing beyond the token of position j + 1, and what is a
draft in one layer is in all of them. Layer k has then no rows below k (`unseen`), and attention, which knows
differences of positions alone, gives the same. Drafts that are deeper than there are layers are made by the
last one, of its own states, as all drafts are by the one layer that most models have.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
import torch.nn.functional as F

from eyas.engine.attention.base import AttentionBackend
from eyas.engine.attention.forward import ForwardBatch
from eyas.engine.checkpoint.config import DraftConfig, ExpertsSpec, LatentSpec, LayerSpec, ModelConfig
from eyas.engine.checkpoint.folder import tensor_shapes
from eyas.engine.checkpoint.values import Raw
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.linear import Linear, pad_rows
from eyas.engine.layers.norm import RmsNorm
from eyas.engine.layers.step import Step
from eyas.engine.models.base import Drafted, FinalNorm
from eyas.engine.models.blocks import Blocks
from eyas.engine.models.decoder import EmbeddingAndHead, rotaries
from eyas.engine.models.head_parts import LastHiddenTap
from eyas.engine.models.keys import Fit, width_of
from eyas.engine.models.layer import load_layer
from eyas.engine.models.mtp_names import dialect_of, prefixes_among, prefixes_told, told_layers
from eyas.engine.models.newest import Newest
from eyas.engine.models.ops.torch_ops import TorchMachine, TorchOps

NAME = "an MTP head"


def describe_head(raw: Raw, folder: Path, target: ModelConfig, load_format: str) -> DraftConfig | None:
    """The head of these tensors; None if there is none among them. ConfigError if it does not fit `target`.

    A "dummy" one has no tensors yet: its config.json says that the model has such layers.
    """
    told, dummy = told_layers(raw), load_format == "dummy"
    shapes = {} if dummy else tensor_shapes(folder)
    prefixes = prefixes_told(raw, target.num_layers) if dummy else prefixes_among(shapes)
    if not prefixes:
        return None
    prefix, count, layer = prefixes[0], len(prefixes), target.layers[-1]
    rules = [
        (
            told in (0, count),
            f"num_nextn_predict_layers is {told}, and its tensors are of {count} MTP layers",
        ),
        (width_of(raw, "hidden_size") == target.hidden_size, "its hidden_size is not the target's"),
        (width_of(raw, "vocab_size") == target.vocab_size, "its vocab_size is not the target's"),
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
        decoder=dataclasses.replace(
            target, folder=folder, layers=_stages(layer, count), load_format=load_format
        ),
        draft_vocab_size=target.vocab_size,
        capture_layers=(target.num_layers,),
        prefixes=tuple(f"{name}." for name in prefixes),
        stages=count,
    )


def spelling(name: str) -> str:
    """As it is stored: the target's layers may stand beside the head's."""
    return name


class MtpLayer:
    """f: features, e: embeddings. z = join [norm(e) ; norm(f)], g = norm(layer(z)): g is row and feature."""

    def __init__(self, config: ModelConfig, stage: int, weights: WeightSource, prefix: str) -> None:
        """`prefix`: before the names of its tensors."""
        hidden = config.hidden_size

        def norm(name: str) -> RmsNorm:
            return RmsNorm.load(config, weights, f"{prefix}{name}.weight", hidden)

        self._stage = stage
        self._dialect = dialect = dialect_of(prefix)
        self._token_norm, self._feature_norm = norm(dialect.token_norm), norm(dialect.feature_norm)
        self._join = Linear(weights.take(f"{prefix}{dialect.join}.weight", (hidden, 2 * hidden)))
        self._layer = load_layer(Blocks(config, weights, TorchMachine()), stage, prefix.removesuffix("."))
        self._norm = norm(dialect.final_norm)

    def __call__(
        self, features: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, step: Step
    ) -> torch.Tensor:
        """features [R, hidden], embedded [R', hidden] of R rows padded to R' -> [R, hidden]."""
        if self._dialect.first_is_blank:
            embedded = embedded.masked_fill((pad_rows(positions) <= self._stage)[:, None], 0.0)
        halves = [self._token_norm(embedded), self._feature_norm(pad_rows(features))]
        if self._dialect.feature_first:
            halves.reverse()
        ops = TorchOps(step, self._norm.eps)
        read, residual = ops.norm(self._join(torch.cat(halves, dim=-1)), self._layer.norm)
        x = self._norm(ops.leave(self._layer(read, residual, self._stage, ops)))
        return x[: features.shape[0]]


class MtpDraft:
    """The `DraftModel`. A row's features are those that its layers gave, [R, layers * hidden]."""

    token_map: torch.Tensor | None = None

    def __init__(
        self, config: DraftConfig, weights: WeightSource, ends: EmbeddingAndHead, backend: AttentionBackend
    ) -> None:
        """`ends`: the target's."""
        decoder = config.decoder
        self._ends = ends
        self._layers = [MtpLayer(decoder, i, weights, prefix) for i, prefix in enumerate(config.prefixes)]
        self._rotaries = rotaries(decoder, weights.placement.device)
        self._backend = backend

    @torch.inference_mode()
    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, rows: ForwardBatch, pool: KvPool
    ) -> Drafted:
        """features [R, hidden] joined with tokens int64 [R]: through all layers.

        Below certain rows, features [R, layers * hidden]: through the layers that draft so deep or deeper.
        Rows are [R, hidden], after the last norm of the first layer that they went through.
        """
        embedded = F.embedding(pad_rows(tokens), self._ends.embedding)
        step = Step.of(rows, pool, self._rotaries, self._backend)
        last = len(self._layers) - 1
        first = min(rows.depth, last)
        if rows.depth:
            gave = list(features.split(embedded.shape[1], -1))
            fed = gave[-1:] if rows.depth > last else gave[first - 1 :]
            for stage, entering in zip(range(first, last + 1), fed, strict=False):
                gave[stage] = self._layers[stage](entering, embedded, rows.positions, step)
        else:
            newest = Newest(rows.spans, pool, last, features.shape[1])
            gave = [self._layers[0](features, embedded, rows.positions, step)]
            for stage in range(1, last + 1):
                entering = newest.before(gave[-1], stage - 1)
                gave.append(self._layers[stage](entering, embedded, rows.positions, step))
            newest.keep(gave[:last])
        return Drafted(gave[first], gave[0] if not last else torch.cat(gave, -1))

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [r, hidden] as `forward` gave them -> float32 [r, vocab]."""
        return self._ends.lm_head(rows).float()


def load_tap(config: DraftConfig, _: WeightSource, final_norm: FinalNorm) -> LastHiddenTap:
    """The half beside the target, whose `final_norm` the feature has passed."""
    return LastHiddenTap(config, final_norm)


def load_draft(
    config: DraftConfig, weights: WeightSource, ends: EmbeddingAndHead, backend: AttentionBackend
) -> MtpDraft:
    """The half that drafts. `ends`: the target's."""
    return MtpDraft(config, weights, ends, backend)


def _stages(layer: LayerSpec, count: int) -> tuple[LayerSpec, ...]:
    """Of `count` MTP layers, each like `layer`."""
    each = (dataclasses.replace(layer.attention, unseen=stage) for stage in range(count))
    return tuple(dataclasses.replace(layer, attention=attention) for attention in each)
