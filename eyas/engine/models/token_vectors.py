"""Vectors that each token has for each layer, and the third half of a layer that reads them: Gemma 4's small
sizes (per-layer embeddings). How their tensors are loaded, and their equations over the verbs of `ops`.
"""

from __future__ import annotations

import math
from typing import Any, Generic

import torch

from eyas.engine.checkpoint.config import LayerSpec
from eyas.engine.formats.projection import AnyProjection, ProjectionT
from eyas.engine.layers.activations import ACTIVATIONS
from eyas.engine.layers.norm import load_gain, rms_norm
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.machine import Blocks
from eyas.engine.models.ops.parts import OutPart

TABLE = "model.embed_tokens_per_layer.weight"


class TokenVectors(Generic[ProjectionT]):
    """A row's vectors are the sum of its token's own, of a table, and the norm of its embedding's product."""

    def __init__(self, blocks: Blocks[ProjectionT]) -> None:
        config, weights = blocks.config, blocks.weights
        self._width, self._eps = config.layers[0].token_width, config.norm_eps
        wide = config.num_layers * self._width
        self._table = weights.take(TABLE, (config.token_rows, wide))
        name = "model.per_layer_model_projection.weight"
        self._projection = blocks.loader([name]).whole(name, (wide, config.hidden_size))
        self._scale = config.hidden_size**-0.5
        self._gain = load_gain(config, weights, "model.per_layer_projection_norm.weight", self._width)

    def of(self, embedded: Any, ops: Ops[Any, Any, Any]) -> tuple[torch.Tensor, Any]:
        """The vectors of embedded rows, [m, layers, width]; and those rows."""
        read, embedded = ops.norm(embedded, None)
        made = ops.product(read, self._projection).mul_(self._scale).unflatten(1, (-1, self._width))
        own = ops.whole(ops.embed(self._table, self._width**0.5)).view_as(made)
        return rms_norm(made, self._gain, self._eps).add_(own).mul_(math.sqrt(0.5)), embedded


class TokenHalf(Generic[ProjectionT]):
    """norm(back(activation(gate(x)) * v)) of the residual x itself and a row's vector v for this layer."""

    def __init__(self, blocks: Blocks[ProjectionT], layer: LayerSpec, prefix: str) -> None:
        config, width = blocks.config, layer.token_width
        names = [f"{prefix}.{name}.weight" for name in ("per_layer_input_gate", "per_layer_projection")]
        self._gate = blocks.loader(names[:1]).whole(names[0], (width, config.hidden_size))
        back = blocks.loader(names[1:]).whole(names[1], (config.hidden_size, width))
        post = load_gain(
            config, blocks.weights, f"{prefix}.post_per_layer_input_norm.weight", config.hidden_size
        )
        self._activation, self._back = ACTIVATIONS[layer.feed_forward.activation], OutPart(back, post=post)

    @property
    def projections(self) -> tuple[AnyProjection, ...]:
        """Its weights."""
        return self._gate, self._back.projection

    def add(self, residual: Any, vectors: torch.Tensor, ops: Ops[Any, Any, Any]) -> Any:
        """The residual with it added; `vectors` [m, width]."""
        read, residual = ops.norm(residual, None)
        return ops.add(residual, self._activation(ops.product(read, self._gate), vectors), self._back)
