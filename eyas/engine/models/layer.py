"""One layer of any decoder on a GPU: its equation, said once over the verbs of `eyas.engine.models.ops`.

Which kernels compute it, whatever the number of rows, the arithmetic and the weights' formats, is the verbs'
business. The gain of a norm before a product is folded into the product's weight where its format can take
it. Of several ranks each computes with its share of the weights (`eyas.engine.parallel.shards`); residual
rows are the same on all. `eyas.engine.models.fused` knows how many layers there are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch

from eyas.engine.checkpoint.config import AttentionSpec, ExpertsSpec, LatentSpec, LayerSpec, ModelConfig
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.formats.projection import Projection
from eyas.engine.formats.table import loader_of
from eyas.engine.kernels.attention.scores import Scores
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products import skinny
from eyas.engine.layers.attention import query_key_gains, rows_order
from eyas.engine.layers.norm import load_gain
from eyas.engine.models.feed_forward import GatedFeedForward
from eyas.engine.models.fused_step import norm_before
from eyas.engine.models.latent_attention import LatentMixer
from eyas.engine.models.mixture import MixtureFeedForward
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.parts import OutPart, QkvPart


class Mixer(Protocol):
    """A layer's attention. `norm`: of what it reads, without a gain where its weights have that in them;
    None: it reads rows as they are.
    """

    norm: row_kernels.Norm | None

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Its weights."""

    def attend(self, read: Any, layer: torch.Tensor, ops: Ops[Any, Any]) -> torch.Tensor:
        """Keeps the rows, and mixes -> [m, columns of `out`]."""

    def keep(self, read: Any, layer: torch.Tensor, ops: Ops[Any, Any]) -> Any:
        """Keeps the rows alone."""


class DeviceLayer:
    """One decoder layer, or a rank's share of it, as `spec` says of the whole.

    `gain`: of the norm that what its attention reads has passed without one; its width is that of the input
    (a draft head joins two rows). None: there is no norm. `few_rows`: of how many rows, at most, `FewRows`
    are its verbs; `exact_rows`: the same in exact arithmetic, whose products have no bias to themselves.
    """

    def __init__(
        self, config: ModelConfig, spec: LayerSpec, weights: Weights, prefix: str, gain: torch.Tensor | None
    ) -> None:
        def gain_of(name: str) -> torch.Tensor | None:
            whole = f"{prefix}.{name}.weight"
            return load_gain(config, weights, whole, config.hidden_size) if name else None

        self._attention, self._out = _attention(config, spec, weights, f"{prefix}.self_attn", gain)
        gains = gain_of(spec.norms.before_feed_forward), gain_of(spec.norms.after_feed_forward)
        if spec.norms.after_attention:
            self._out = replace(self._out, post=gain_of(spec.norms.after_attention))
        self._feed_forward: MixtureFeedForward | GatedFeedForward
        if isinstance(spec.feed_forward, ExpertsSpec):
            self._feed_forward = MixtureFeedForward(
                config, spec.feed_forward, weights, f"{prefix}.mlp", gains
            )
        else:
            self._feed_forward = GatedFeedForward(config, spec.feed_forward, weights, f"{prefix}.mlp", gains)
        fused = all(each.matrix is not None for each in (*self._attention.projections, self._out.projection))
        few = skinny.MAX_ROWS if fused else 0
        self.exact_rows = 0 if spec.attention.latent else few
        self.few_rows = 0 if spec.attention.output_bias else few

    @property
    def formats(self) -> tuple[type[Projection], ...]:
        """Of its weights: layers of one specification may differ in that."""
        attention = (*self._attention.projections, self._out.projection)
        return tuple(map(type, (*attention, *self._feed_forward.projections)))

    @property
    def norm(self) -> row_kernels.Norm | None:
        """Of what attention reads; None: there is none."""
        return self._attention.norm

    def __call__(self, read: Any, residual: Any, layer: torch.Tensor, ops: Ops[Any, Any]) -> Any:
        """The residual after this layer, whose attention reads `read` and is over the pool's `layer`."""
        attended = self._attention.attend(read, layer, ops)
        return self._feed_forward(ops.add(residual, attended, self._out), ops)

    def keep(self, read: Any, layer: torch.Tensor, ops: Ops[Any, Any]) -> None:
        """The same as far as it writes the rows' KV."""
        self._attention.keep(read, layer, ops)


class HeadsAttention:
    """Grouped-query attention: queries, keys and values of heads, rotated."""

    def __init__(
        self,
        config: ModelConfig,
        spec: AttentionSpec,
        weights: Weights,
        prefix: str,
        gain: torch.Tensor | None,
    ) -> None:
        dim, ranks = spec.head_dim, weights.placement.ranks
        counts = [spec.num_heads * dim, spec.num_kv_heads * dim, spec.num_kv_heads * dim]
        names = [f"{prefix}.{p}_proj" for p in "qkv"]
        width = config.hidden_size if gain is None else gain.shape[0]
        matrices = [f"{n}.weight" for n in names]
        heads, kv_heads = spec.num_heads // ranks, spec.num_kv_heads // ranks
        order = rows_order(spec, heads, kv_heads)
        qkv = loader_of(weights, matrices).rows(matrices, counts, width)
        if order is not None:
            qkv = qkv.in_order(order)
        bias = norms = row_gains = None
        if spec.qkv_bias:
            pairs = zip(names, counts, strict=True)
            bias = torch.cat([weights.take_rows(f"{n}.bias", (c,)) for n, c in pairs])
            bias = bias if order is None else bias[order.to(bias.device)]
        if spec.head_norms:
            gains = query_key_gains(config, spec, weights, prefix)
            norms = skinny.HeadNorms(torch.stack(gains), config.norm_eps)
        if spec.row_norms:
            row_gains = query_key_gains(config, spec, weights, prefix)
        self.norm = None if gain is None else norm_before(config, gain, qkv)
        shape = row_kernels.Heads(heads, kv_heads, dim, norms)
        self._qkv = QkvPart(qkv, shape, spec.rope, bias, row_gains)
        self._scores = Scores.of(spec)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Its weights."""
        return (self._qkv.projection,)

    def attend(self, read: Any, layer: torch.Tensor, ops: Ops[Any, Any]) -> torch.Tensor:
        """-> what every query has attended to, [m, heads * dim]."""
        return ops.attend(ops.qkv(read, self._qkv, layer), layer, self._scores)

    def keep(self, read: Any, layer: torch.Tensor, ops: Ops[Any, Any]) -> None:
        """Writes keys and values."""
        ops.qkv(read, self._qkv, layer)


def _attention(
    config: ModelConfig, spec: LayerSpec, weights: Weights, prefix: str, gain: torch.Tensor | None
) -> tuple[Mixer, OutPart]:
    """The block of this specification, and the way back; their tensors are those below `prefix`."""
    attention, hidden, name = spec.attention, config.hidden_size, f"{prefix}.o_proj"
    back, bias = [f"{name}.weight"], None
    if attention.output_bias and weights.placement.rank == 0:  # once in the sum over the ranks
        bias = weights.take(f"{name}.bias", (hidden,))
    if isinstance(attention, LatentSpec):
        latent = LatentMixer(config, attention, weights, prefix, gain)
        columns = attention.num_heads * attention.value_dim
        out = loader_of(weights, back).columns(back[0], (hidden, columns))
        return latent, OutPart(out, bias, one_way=True)
    heads = HeadsAttention(config, attention, weights, prefix, gain)
    columns = attention.num_heads * attention.head_dim
    return heads, OutPart(loader_of(weights, back).columns(back[0], (hidden, columns)), bias)


def load_input_gain(
    config: ModelConfig, weights: Weights, spec: LayerSpec, prefix: str
) -> torch.Tensor | None:
    """Of the norm before a layer's attention, if it has one."""
    if not (name := spec.norms.before_attention):
        return None
    return load_gain(config, weights, f"{prefix}.{name}.weight", config.hidden_size)
