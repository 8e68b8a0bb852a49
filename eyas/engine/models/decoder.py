"""Any decoder: embedding, layers, the norm and the product behind them, over a machine's verbs.

In plain torch it is the specification of what a GPU computes. It knows specifications, never families: what
is special about one is a number or a name in it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self

import torch

from eyas.common.errors import ConfigError
from eyas.engine.adapters.sites import AdapterSite, SitePart
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import AnyProjection, ProjectionT
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.norm import Gain, LayerNorm, load_norm
from eyas.engine.layers.rotary import BEYOND
from eyas.engine.models.layer import DecoderLayer, load_layers, run_layers
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.machine import Blocks, Machine
from eyas.engine.models.ops.recording import ExpertRecorder, RecordingOps
from eyas.engine.models.token_vectors import TokenVectors
from eyas.engine.parallel.shards import config_of_rank
from eyas.engine.states.delta import DeltaRule

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
POSITIONS = "model.embed_positions.weight"
_ASIDE = (
    "scale",
    "scale_inv",
    "inv_freq",
    "cos_cached",
    "sin_cached",
    "self_attn.bias",
    "self_attn.masked_bias",
)
"""Ends of names that no equation here needs: scales of what is no weight, tables of RoPE, masks."""


@dataclass(frozen=True)
class ModelEnds:
    """A model's embedding [vocab, hidden], and a rank's rows of its output head; draft heads share them."""

    embedding: torch.Tensor
    lm_head: Any

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource, machine: Machine[Any]) -> ModelEnds:
        """Takes both ends from `weights`; a tied head is the embedding itself."""
        shape = (config.vocab_size, config.hidden_size)
        _check_tied(config, weights)
        embedding = weights.take(EMBEDDING, shape)
        head = machine.own_rows(embedding) if config.tied_head else weights.take_rows(HEAD, shape)
        return cls(embedding, machine.matrix(head))

    def limited_to(self, ids: tuple[int, ...], machine: Machine[Any]) -> ModelEnds:
        """The ends with a rank's share of those rows of the output head alone, in this order; (): of all."""
        return ModelEnds(self.embedding, machine.some_rows(self.lm_head, ids)) if ids else self


class Decoder(Generic[ProjectionT]):
    """A `DecoderModel` over a paged pool. It takes its tensors from `weights`; no state between calls.

    `few_rows`: as `Machine.most_rows` of its layers. Raises ValueError for what the exact arithmetic cannot
    compute yet, if the machine is to be exact.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, machine: Machine[ProjectionT]) -> None:
        self.config = config
        self.kv_format: KvFormat = config_of_rank(config, weights.placement.ranks).kv_format
        self.machine = machine
        self.recorder: ExpertRecorder | None = None  # hears which experts rows take, while it is here
        self._parts = parts = dict(decoder_parts(config, weights, machine))
        self.ends: ModelEnds = parts["ends"]
        layers: list[DecoderLayer[ProjectionT]] = [parts[f"layer {i}"] for i in range(config.num_layers)]
        self.layers = layers
        self.few_rows = machine.most_rows(layers)
        self._norm: Gain = parts["norm"]
        self._vectors: TokenVectors[ProjectionT] | None = parts.get("vectors")
        whole = SitePart(HEAD, (config.vocab_size, config.hidden_size))
        self._updated_head = machine.updated(self.ends.lm_head, AdapterSite((whole,), weights.placement))
        self._head_bias: torch.Tensor | None = parts.get("head bias")
        self._positions: torch.Tensor | None = parts.get("positions")

    def renewed(self, weights: WeightSource) -> Iterator[tuple[str, Any, Any]]:
        """The name of each part of this model that has weights, the part, and one made in the same way of
        other `weights`, one after the other. Raises ConfigError as the constructor does.
        """
        for name, new in decoder_parts(self.config, weights, self.machine):
            yield name, self._parts[name], new

    @property
    def projections(self) -> list[AnyProjection]:
        """The weights of all layers, in their order, and the output head where adapters may update it."""
        head = [] if self._updated_head is None else [self._updated_head]
        return [each for layer in self.layers for each in layer.projections] + head

    @property
    def rules(self) -> dict[int, DeltaRule]:
        """The rules of the layers that have states, by number."""
        return {i: layer.rule for i, layer in enumerate(self.layers) if layer.rule is not None}

    def brief(self) -> Self:
        """The same with the first layer, the first of each kind among the others, those that read rows which
        the layer before rounded for them, and the last, which no other reads: these launch all that the rest
        does. Whatever layer is tapped, the first one is.
        """
        each = [(spec, layer.formats) for spec, layer in zip(self.config.layers, self.layers, strict=True)]
        kinds = dict(reversed([*zip(each, range(self.config.num_layers), strict=True)][1:]))
        chosen = {0, *kinds.values(), self.config.num_layers - 1}
        chosen |= {i + 1 for i in chosen if self.layers[i].rounds_ahead}
        made = copy.copy(self)
        made.layers = [self.layers[i] for i in sorted(chosen)]
        made.recorder = None
        return made

    def may_drop(self, count: int, taps: tuple[int, ...]) -> bool:
        """True if no tap is behind the last layer, and its kernels take any number of rows."""
        return count > self.few_rows and self.config.num_layers not in taps

    @torch.inference_mode()
    def forward(
        self, rows: Any, pool: KvPool, taps: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs R rows and writes their KV.

        Returns the residual rows that leave the last layer [R or fewer, hidden], before any norm, and
        [R, len(taps) * hidden]: those that enter each tapped layer (past the last: leave it).
        """
        ops: Any = self.machine.ops(rows, pool, self.config.norm_eps, self.few_rows)
        if self.recorder is not None:
            self.recorder.begin()
            ops = RecordingOps(ops, self.recorder)
        tapped = ops.room((len(taps), self.config.hidden_size), like=self.ends.embedding)
        if len(self.layers) < self.config.num_layers:
            taps = (0,) * len(taps)
        entering = partial(_tap, ops, tapped, taps)
        if self._vectors is None:
            # No name for the embedded rows: their memory is free for the layers behind the first.
            x = run_layers(self.layers, ops, self._embedded(ops), entering)
        else:
            vectors, embedded = self._vectors.of(self._embedded(ops), ops)
            x = run_layers(self.layers, ops, embedded, entering, vectors=vectors)
        return x, tapped.view(tapped.shape[0], -1)

    def _embedded(self, ops: Ops[Any, Any, Any]) -> Any:
        residual = ops.embed(self.ends.embedding, self.config.embedding_scale)
        if self._positions is None:
            return residual
        return ops.plus(residual, ops.placed(self._positions), None)

    @torch.inference_mode()
    def final_norm(self, residual: torch.Tensor) -> torch.Tensor:
        """Residual rows [r, hidden] that left the last layer -> what the output head reads."""
        if isinstance(self._norm, LayerNorm):
            return self._norm(residual)
        return self.machine.norm(residual, self._norm, self.config.norm_eps)

    @torch.inference_mode()
    def logits(
        self,
        residual: torch.Tensor,
        picked: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        adapters: Any = None,
    ) -> torch.Tensor:
        """Rows as `forward` gave them, all or those `picked` (integers [r]) -> float32 [r, vocab].

        `out`: where that is put, if it is given. `adapters`: of the rows of that forward, as these have them.
        """
        if picked is not None:
            residual = self.machine.picked(residual, picked)
        read = self.final_norm(residual)
        logits = self.machine.logits(read, self.ends.lm_head, out)
        if adapters is not None and self._updated_head is not None:
            own = self.machine.picked_adapters(adapters, picked)
            self.machine.update_logits(logits, read, self._updated_head, own)
        if self._head_bias is not None:
            logits.add_(self._head_bias)
        if (scale := self.config.logit_scale) != 1.0:
            logits.mul_(scale)
        return self.machine.capped(logits, cap) if (cap := self.config.logit_soft_cap) else logits


def decoder_parts(
    config: ModelConfig, weights: WeightSource, machine: Machine[Any]
) -> Iterator[tuple[str, Any]]:
    """The parts of a `Decoder` that have weights, by name, each loaded when it is taken."""
    yield "ends", ModelEnds.load(config, weights, machine)
    blocks = Blocks(config, weights, machine)
    for layer in load_layers(blocks):
        yield f"layer {layer.number}", layer
    if config.token_rows:
        yield "vectors", TokenVectors(blocks)
    yield "norm", load_norm(config, weights, "model.norm", config.hidden_size)
    if config.head_bias:
        yield "head bias", weights.take("lm_head.bias", (config.vocab_size,), torch.float32)
    if config.positions:
        yield "positions", _positions(config, weights)
    _check_layers(config, weights)


def _tap(
    ops: Ops[Any, Any, Any], tapped: torch.Tensor, taps: tuple[int, ...], layer: int, x: torch.Tensor
) -> None:
    for place, tap in enumerate(taps):
        if tap == layer:
            ops.put(x, tapped, place)


def _positions(config: ModelConfig, weights: WeightSource) -> torch.Tensor:
    """The vectors that are added to the embedding at each position, zeros beyond the last; one rank alone
    adds them.
    """
    stored = weights.take(POSITIONS, (config.positions, config.hidden_size))[config.position_offset :]
    table = torch.nn.functional.pad(stored, (0, 0, 0, BEYOND))
    return torch.zeros_like(table) if weights.placement.rank else table


def _check_tied(config: ModelConfig, weights: WeightSource) -> None:
    """Raises ConfigError if the output head is the embedding by its config.json, and differs from it."""
    if config.tied_head and HEAD in weights and not weights.alike(HEAD, EMBEDDING):
        raise ConfigError(
            f"config.json of {config.folder}: tie_word_embeddings says that {HEAD} is {EMBEDDING}, "
            "and a different one is stored: set it to false to serve that one"
        )


def _check_layers(config: ModelConfig, weights: WeightSource) -> None:
    """Raises ConfigError, which names it, for a tensor of the layers or the ends that was not taken.

    A bias, a norm or a correction of scores that nothing reads leaves fluent answers that are wrong: it says
    that this is another model. Experts may be another rank's. What stands behind the last layer is a draft
    head's.
    """
    parts = ("lm_head.", "model.norm.", *(f"model.layers.{i}." for i in range(config.num_layers)))
    left = [n for n in weights.left(parts) if ".experts." not in n and not n.endswith(_ASIDE)]
    unread = [n for n in left if not any(part in n for part in (*config.unread, *_shared(config)))]
    if unread:
        others = f" and {len(unread) - 1} others" if unread[1:] else ""
        raise ConfigError(
            f"{config.folder} holds a tensor {unread[0]}{others}, which a {config.architecture} "
            "with its config.json does not read: it is another model"
        )


def _shared(config: ModelConfig) -> list[str]:
    """Parts of the names of keys and values that layers have another layer's instead of."""
    attentions = enumerate(layer.attention for layer in config.layers)
    numbers = [i for i, each in attentions if each.shared_from is not None]
    return [f"model.layers.{i}.self_attn.{part}" for i in numbers for part in ("k_", "v_")]
