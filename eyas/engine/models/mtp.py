"""MTP heads: more of the target's layers, each after what joins a state with a later token.

They are published beside the target's own layers, or alone; a `Dialect` says how the tensors are called there
and in which order they join (DeepSeek-V3, arXiv 2412.19437, section 2.2; MiMo, arXiv 2505.07608). Of a target
with layers of several kinds they are as the last that attends.
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
from typing import Any, Generic

import torch

from eyas.engine.checkpoint.config import (
    DraftBlock,
    DraftConfig,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    ModelConfig,
)
from eyas.engine.checkpoint.folder import tensor_shapes
from eyas.engine.checkpoint.methods import read_quantized
from eyas.engine.checkpoint.values import Raw
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import AnyProjection, ProjectionT
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.norm import load_gain
from eyas.engine.models.base import Drafted
from eyas.engine.models.decoder import ModelEnds
from eyas.engine.models.heads import last_hidden_tap
from eyas.engine.models.keys import Fit, text_of, width_of
from eyas.engine.models.layer import load_layer
from eyas.engine.models.mtp_names import dialect_of, expected_prefixes, layer_count, prefixes_among
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.machine import Blocks, Machine
from eyas.engine.models.ops.parts import JoinPart

NAME = "an MTP head"


def describe_head(raw: Raw, folder: Path, target: ModelConfig, load_format: str) -> DraftConfig | None:
    """The head of these tensors; None if there is none among them. ConfigError if it does not fit `target`.

    A "dummy" one has no tensors yet: its config.json says that the model has such layers.
    """
    stated, dummy, raw = layer_count(raw), load_format == "dummy", text_of(raw)
    shapes = {} if dummy else tensor_shapes(folder, read_quantized(raw))
    prefixes = expected_prefixes(raw, target.num_layers) if dummy else prefixes_among(shapes)
    if not prefixes:
        return None
    prefix, count = prefixes[0], len(prefixes)
    layer = next(each for each in reversed(target.layers) if each.delta is None)
    below = ".".join(filter(None, (prefix, dialect_of(prefix).layer)))
    rules = [
        (count == 1 or not dialect_of(prefix).layer, f"{count} MTP layers are not supported in its form"),
        (
            stated in (0, count),
            f"num_nextn_predict_layers is {stated}, and its tensors are of {count} MTP layers",
        ),
        (width_of(raw, "hidden_size") == target.hidden_size, "its hidden_size is not the target's"),
        (width_of(raw, "vocab_size") == target.vocab_size, "its vocab_size is not the target's"),
        (not layer.attention.window, "a sliding window in its layer is not supported"),
        (
            isinstance(layer.attention, LatentSpec)
            or f"{below}.self_attn.kv_a_proj_with_mqa.weight" not in shapes,
            f"it has latent attention ({below}.self_attn.kv_a_proj_with_mqa), its target's last has not",
        ),
        (
            isinstance(layer.feed_forward, ExpertsSpec) or f"{below}.mlp.gate.weight" not in shapes,
            f"it has experts ({below}.mlp.gate), its target's last has not",
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
    """The stored name: the target's layers may stand beside the head's."""
    return name


class MtpLayer(Generic[ProjectionT]):
    """f: features, e: embeddings. z = join [norm(e) ; norm(f)], g = norm(layer(z)): g is row and feature.

    It is over the pool's layer of its number, `stage`. Every rank joins whole rows.
    """

    def __init__(
        self, config: DraftConfig, stage: int, blocks: Blocks[ProjectionT], embedding: torch.Tensor
    ) -> None:
        decoder, weights, prefix = blocks.config, blocks.weights, config.prefixes[stage].removesuffix(".")
        hidden, dialect = decoder.hidden_size, dialect_of(prefix)

        def gain(name: str) -> torch.Tensor:
            return load_gain(decoder, weights, f"{prefix}.{name}.weight", hidden)

        self._machine, self._eps, self._stage = blocks.machine, decoder.norm_eps, stage
        self._part = JoinPart(
            embedding,
            decoder.norm_eps,
            gains=(gain(dialect.token_norm), gain(dialect.feature_norm)),
            blank=stage if dialect.first_is_blank else None,
            feature_first=dialect.feature_first,
        )
        stored = weights.take(f"{prefix}.{dialect.join}.weight", (hidden, 2 * hidden))
        self._join = self._machine.joining(stored, self._part)
        below = f"{prefix}.{dialect.layer}" if dialect.layer else prefix
        self._layer = load_layer(blocks, stage, below)
        self._few_rows = self._machine.most_rows([self._layer])
        self._gain = gain(dialect.final_norm)

    @property
    def projections(self) -> tuple[AnyProjection, ...]:
        """Its layer's weights."""
        return self._layer.projections

    def __call__(self, features: torch.Tensor, tokens: torch.Tensor, rows: Any, pool: KvPool) -> torch.Tensor:
        """features [R, hidden] joined with tokens [R] -> [R, hidden], after the layer's norm."""
        joined = self._machine.join(features, tokens, rows.positions, self._part)
        ops = self._ops(rows, pool)
        read, residual = ops.norm(ops.joined(joined, self._join), self._layer.norm)
        x = ops.leave(self._layer(read, residual, self._stage, ops))
        return self._machine.norm(x, self._gain, self._eps)

    def keep(self, features: torch.Tensor, tokens: torch.Tensor, rows: Any, pool: KvPool) -> None:
        """The same, as far as it writes the rows' KV."""
        joined = self._machine.join(features, tokens, rows.positions, self._part)
        ops = self._ops(rows, pool, whole=False)
        self._layer.keep(ops.norm(ops.joined(joined, self._join), self._layer.norm)[0], self._stage, ops)

    def _ops(self, rows: Any, pool: KvPool, *, whole: bool = True) -> Ops[Any, Any, Any]:
        rows = self._machine.bounded(rows, self._layer.spec.attention.unseen)
        return self._machine.ops(rows, pool, self._eps, self._few_rows, whole=whole)


class MtpDraft(Generic[ProjectionT]):
    """The `DraftModel`. A row's features are those that its layers gave, [R, layers * hidden]."""

    token_map: torch.Tensor | None = None
    block: DraftBlock | None = None
    whole = False

    def __init__(
        self, config: DraftConfig, weights: WeightSource, ends: ModelEnds, machine: Machine[ProjectionT]
    ) -> None:
        """`ends`: the target's."""
        blocks = Blocks(config.decoder, weights, machine)
        self._layers = [MtpLayer(config, stage, blocks, ends.embedding) for stage in range(config.stages)]
        self._machine, self._lm_head = machine, ends.lm_head

    @property
    def projections(self) -> list[AnyProjection]:
        """The weights of its layers."""
        return [each for layer in self._layers for each in layer.projections]

    @torch.inference_mode()
    def forward(self, features: torch.Tensor, tokens: torch.Tensor, rows: Any, pool: KvPool) -> Drafted:
        """features [R, hidden] joined with tokens [R]: through all layers.

        Below certain rows, features [R, layers * hidden]: through the layers that draft so deep or deeper.
        Rows are [R, hidden], after the last norm of the first layer that they went through.
        """
        last = len(self._layers) - 1
        if not last:
            x = self._layers[0](features, tokens, rows, pool)
            return Drafted(x, x)
        made = self._below if rows.depth else self._certain
        gave = made(features, tokens, rows, pool)
        return Drafted(gave[:, min(rows.depth, last)].contiguous(), gave.flatten(1))

    @torch.inference_mode()
    def keep(self, features: torch.Tensor, tokens: torch.Tensor, rows: Any, pool: KvPool) -> None:
        """The rows' KV alone. Of several layers each reads what the one before it gave: all are run."""
        if len(self._layers) == 1:
            self._layers[0].keep(features, tokens, rows, pool)
        else:
            self.forward(features, tokens, rows, pool)

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [r, hidden] as `forward` gave them -> float32 [r, vocab]."""
        return self._machine.logits(rows, self._lm_head)

    def _certain(self, features: torch.Tensor, tokens: torch.Tensor, rows: Any, pool: KvPool) -> torch.Tensor:
        """The output of each layer, [R, layers, hidden]. The newest row of each page is stored there, but for
        the last layer's."""
        stages = len(self._layers) - 1
        states = self._machine.mtp_states(rows, pool, stages, features.shape[1])
        x = self._layers[0](features, tokens, rows, pool)
        gave = [x]
        for stage, layer in enumerate(self._layers[1:]):
            x = layer(states.before(x, stage), tokens, rows, pool)
            gave.append(x)
        every = torch.stack(gave, 1)
        states.keep(every[:, :stages])
        return every

    def _below(self, features: torch.Tensor, tokens: torch.Tensor, rows: Any, pool: KvPool) -> torch.Tensor:
        """The same, anything for the layers that were left out."""
        gave = list(features.unflatten(1, (len(self._layers), -1)).unbind(1))
        last = len(self._layers) - 1
        first = min(rows.depth, last)
        fed = gave[-1:] if rows.depth > last else gave[first - 1 :]
        for stage, entering in zip(range(first, last + 1), fed, strict=False):
            gave[stage] = self._layers[stage](entering.contiguous(), tokens, rows, pool)
        return torch.stack(gave, 1)


load_tap, load_draft = last_hidden_tap, MtpDraft


def _stages(layer: LayerSpec, count: int) -> tuple[LayerSpec, ...]:
    """The specifications of `count` MTP layers, each like `layer`."""
    each = (dataclasses.replace(layer.attention, unseen=stage) for stage in range(count))
    return tuple(dataclasses.replace(layer, attention=attention) for attention in each)
