"""What several kinds of draft heads have in common: layers told by their tensors, ends, the plainest tap.

It knows Llama's layers and their tensors' names; it refuses to know a kind. Of what it reads here a kind's
file makes a `DraftConfig`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic

import torch

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import DraftConfig, LayerSpec, ModelConfig
from eyas.engine.checkpoint.folder import tensor_shapes
from eyas.engine.checkpoint.values import Raw
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import ProjectionT
from eyas.engine.kv.pool import KvPool
from eyas.engine.models import llama
from eyas.engine.models.base import FinalNorm
from eyas.engine.models.blocks import Blocks
from eyas.engine.models.keys import Fit
from eyas.engine.models.layer import head_layers, keep_layers, run_layers

Shapes = Mapping[str, tuple[int, ...]]
"""Of stored tensors, by the names by which a kind's classes ask for them."""

NO_SHAPE = (0, 0)
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_READ = re.compile(
    r"self_attn\.[qkvo]_proj\.(weight|bias)|self_attn\.[qk]_norm\.weight|self_attn\.rotary_emb\.inv_freq"
    r"|mlp\.(gate|up|down)_proj\.weight|(input|post_attention)_layernorm\.weight"
)
"""The tensors that a layer of heads and a gated feed-forward reads, or may leave out."""


def stored_shapes(folder: Path, spelling: Callable[[str], str]) -> Shapes:
    """The shape of every stored tensor. Raises ConfigError if the folder holds none."""
    return {spelling(name): shape for name, shape in tensor_shapes(folder).items()}


def own_decoder(raw: Raw, folder: Path, target: ModelConfig, fit: Fit) -> ModelConfig:
    """The sizes of a head of Llama's layers and its own RoPE, for sequences as long as the target's.

    A head of another vocabulary does not fit, nor one that attends to a window.
    """
    decoder = llama.describe(raw, folder)
    # Rows go as far as the target's, whatever the head saw in training.
    context = max(decoder.context_length, target.context_length)
    window = values.whole(raw, "sliding_window", 0) if values.switch(raw, "use_sliding_window", True) else 0
    fit.wants(decoder.vocab_size == target.vocab_size, "its vocab_size is not the target's")
    fit.wants(not 0 < window < context, "its sliding_window is shorter than the context")
    return dataclasses.replace(decoder, context_length=context)


def stored_layers(
    usual: LayerSpec, shapes: Shapes, fit: Fit, besides: frozenset[str] = frozenset()
) -> tuple[LayerSpec, ...]:
    """One specification for each stored layer: `usual`, with the biases and the norms of heads that it has.

    They are counted here because some config.json state the target's depth. `besides`: tensors that a kind's
    own file reads. A head with a tensor that no equation here reads does not fit.
    """
    last = 0
    for name in shapes:
        if (found := _LAYER.fullmatch(name)) is None:
            continue
        last = max(last, int(found[1]))
        read = name in besides or _READ.fullmatch(found[2]) is not None
        fit.wants(read, f"its tensor {name} belongs to equations unknown here")
    return tuple(_as_stored(usual, shapes, f"layers.{i}.self_attn") for i in range(last + 1))


def _as_stored(usual: LayerSpec, shapes: Shapes, prefix: str) -> LayerSpec:
    attention = dataclasses.replace(
        usual.attention,
        qkv_bias=f"{prefix}.q_proj.bias" in shapes,
        output_bias=f"{prefix}.o_proj.bias" in shapes,
        head_norms=f"{prefix}.q_norm.weight" in shapes,
    )
    return dataclasses.replace(usual, attention=attention)


def token_embedding(config: DraftConfig, weights: WeightSource, target: torch.Tensor) -> torch.Tensor:
    """What a head embeds tokens with, [vocab, hidden]: its own, or the target's where it has none.

    The official code of EAGLE replaces the target's by a stored one, with which the head was then trained.
    """
    if "embed_tokens.weight" not in weights:
        return target
    return weights.take("embed_tokens.weight", (config.decoder.vocab_size, config.decoder.hidden_size))


class HeadLayers(Generic[ProjectionT]):
    """A head's layers, `layers.0` and on. The first reads rows that are given, the others the residual.

    `gain`: of the norm that the given rows have passed without one; None: there was none.
    """

    def __init__(self, blocks: Blocks[ProjectionT], gain: torch.Tensor | None) -> None:
        self._machine, self._eps = blocks.machine, blocks.config.norm_eps
        self._layers = head_layers(blocks, gain)
        self._few_rows = self._machine.most_rows(self._layers)

    def __call__(self, given: torch.Tensor, x: torch.Tensor, rows: Any, pool: KvPool) -> torch.Tensor:
        """given [R, width], the residual x [R, hidden], which stays -> the residual after all layers."""
        ops = self._machine.ops(rows, pool, self._eps, self._few_rows)
        return run_layers(self._layers, ops, ops.residual(x), given=ops.given(given))

    def keep(self, given: torch.Tensor, x: torch.Tensor, rows: Any, pool: KvPool) -> None:
        """The same, as far as it writes the rows' KV."""
        ops = self._machine.ops(rows, pool, self._eps, self._few_rows, whole=False)
        keep_layers(self._layers, ops, ops.residual(x), ops.given(given))


class LastHiddenTap:
    """The `FeatureTap` of heads whose feature is what the target's output head reads."""

    def __init__(self, config: DraftConfig, final_norm: FinalNorm) -> None:
        """`config` captures what leaves the target's last layer; `final_norm` is the target's."""
        self.layers = config.capture_layers
        self._final_norm = final_norm

    def features(self, tapped: torch.Tensor) -> torch.Tensor:
        """tapped [R, hidden], before any norm -> features [R, hidden]."""
        return self._final_norm(tapped)
