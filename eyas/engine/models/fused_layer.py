"""One layer of any decoder on a GPU, put together by its `LayerSpec` from few kernels.

Two ways through it. Narrow, up to 128 rows: four products with everything small fused into them
(`eyas.engine.kernels.skinny`), bound by reading the weights. Wide: cuBLAS products with row kernels between
them. The gain of a norm before a product is folded into the product's weight. Where a norm follows a product
the residual cannot be added by it: a row kernel normalises, adds, and leaves the sums that the next product
wants. Of several ranks each computes with its share of the weights (`eyas.engine.parallel.shards`); residual
rows are the same on all. It knows one layer; `eyas.engine.models.fused` knows how many there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from eyas.engine.batch.rows import Rows
from eyas.engine.checkpoint.config import AttentionSpec, FeedForwardSpec, LayerSpec, ModelConfig, Rope
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.kernels import exact_wide, skinny
from eyas.engine.kernels import rows as row_kernels
from eyas.engine.kernels.scores import Scores
from eyas.engine.layers.rotary import Angles
from eyas.engine.layers.rotary import tables as rotary_tables
from eyas.engine.parallel.group import ProcessGroup


class RowAttention(Protocol):
    """Attention of a forward's rows over one layer of the pool."""

    def __call__(self, q: torch.Tensor, layer: torch.Tensor, rows: Rows, scores: Scores) -> torch.Tensor:
        """q [m, heads, dim] over [pages, 2, page_size, kv_heads, dim] -> [m, heads * dim]."""


@dataclass(frozen=True)
class LayerContext:
    """What a rank's layers share: the other ranks, launches' scratch memory, attention, and the rotary tables
    (cos and sin) of every RoPE that a layer has.
    """

    group: ProcessGroup
    launch: skinny.Launch
    attention: RowAttention
    angles: Mapping[Rope, Angles]

    @classmethod
    def on(
        cls,
        device: str,
        config: ModelConfig,
        group: ProcessGroup,
        launch: skinny.Launch,
        attention: RowAttention,
    ) -> LayerContext:
        """Computes the rotary tables of every RoPE in `config`, on `device`."""
        angles = {}
        for rope in dict.fromkeys(layer.attention.rope for layer in config.layers):
            cos, sin = rotary_tables(rope, config.head_dim, config.context_length)
            angles[rope] = cos.to(device), sin.to(device)
        return cls(group, launch, attention, angles)


@dataclass(frozen=True)
class Forward:
    """What every layer of one forward shares."""

    rows: Rows
    context: LayerContext

    def rotation(self, rope: Rope) -> skinny.Rotation:
        """How the forward's rows are rotated by `rope`."""
        return skinny.Rotation(*self.context.angles[rope], self.rows.positions)


@dataclass(frozen=True)
class NarrowRows:
    """The residual rows [m, hidden], and parts of their squares' sums, float32 [parts, 128]."""

    x: torch.Tensor
    sums: torch.Tensor | None = None


@dataclass(frozen=True)
class WideRows:
    """The residual rows [m, hidden], and what is still to be added to them: `added`, [m, hidden], or, with
    `post` [hidden], its norm with that gain.
    """

    x: torch.Tensor
    added: torch.Tensor
    post: torch.Tensor | None = None

    def settle(self, eps: float, pdl: bool) -> torch.Tensor:
        """The norm, without a gain, of the rows to which it has been added, in place."""
        return row_kernels.add_norm(self.added, self.x, eps, post=self.post, pdl=pdl)

    def settled(self, eps: float, pdl: bool) -> torch.Tensor:
        """The rows to which it has been added, in place."""
        if self.post is None:
            return self.x.add_(self.added)
        self.settle(eps, pdl)
        return self.x


class FusedLayer:
    """One decoder layer, or a rank's share of it, as `spec` says of the whole.

    `gain`: of the norm that what its attention reads has passed without one; its width is that of the input
    (a draft head joins two rows). None: there is no norm. `narrow_rows`: of how many rows, at most, `narrow`
    is the way.
    """

    def __init__(
        self, config: ModelConfig, spec: LayerSpec, weights: Weights, prefix: str, gain: torch.Tensor | None
    ) -> None:
        norms = spec.norms

        def gain_of(name: str) -> torch.Tensor:
            return load_gain(config, weights, f"{prefix}.{name}.weight", config.hidden_size)

        self._eps = config.norm_eps
        self._normed = gain is not None
        self._attention = _Attention(config, spec.attention, weights, f"{prefix}.self_attn", gain)
        before = gain_of(norms.before_feed_forward)
        self._mlp = _FeedForward(config, spec.feed_forward, weights, f"{prefix}.mlp", before)
        self._post_attention = gain_of(norms.after_attention) if norms.around else None
        self._post_mlp = gain_of(norms.after_feed_forward) if norms.around else None
        self.narrow_rows = 0 if spec.attention.output_bias else skinny.MAX_ROWS

    def source(self, residual: NarrowRows) -> skinny.Source:
        """What attention reads of the residual, for `narrow`."""
        return source_of(residual, self._eps) if self._normed else skinny.Source(residual.x)

    def settle(self, residual: WideRows, pdl: bool) -> torch.Tensor:
        """What attention reads of the residual, for `wide`, once what was to be added is added in place."""
        return (residual.settle if self._normed else residual.settled)(self._eps, pdl)

    def narrow(
        self, source: skinny.Source, residual: NarrowRows, layer: torch.Tensor, step: Forward
    ) -> NarrowRows:
        """Attention reads `source`. With norms after its products the residual is changed in place."""
        attended = self._attention.narrow(source, layer, step)
        residual = _added(attended, self._attention.out, residual, self._post_attention, self._eps, step)
        inner = self._mlp.narrow(source_of(residual, self._eps), step)
        return _added(inner, self._mlp.down, residual, self._post_mlp, self._eps, step)

    def wide(self, normed: torch.Tensor, x: torch.Tensor, layer: torch.Tensor, step: Forward) -> WideRows:
        """Attention reads `normed`, which may be x; its result is added to the residual x [m, hidden] in
        place, the feed-forward's not yet.
        """
        group, pdl = step.context.group, step.context.launch.pdl
        added = self._attention.wide(normed, layer, step)
        group.all_reduce(added)
        normed = WideRows(x, added, self._post_attention).settle(self._eps, pdl)
        added = self._mlp.wide(normed, pdl)
        group.all_reduce(added)
        return WideRows(x, added, self._post_mlp)

    def exact_wide(
        self, x: torch.Tensor, scales: torch.Tensor, layer: torch.Tensor, step: Forward
    ) -> torch.Tensor:
        """`wide` with the bits of `narrow`: changes the residual x [m, hidden] in place.

        scales float32 [m]: 1 / rms of its rows. Returns those of the rows that leave.
        """
        own = scales if self._normed else torch.ones_like(scales)
        added = exact_wide.product(self._attention.exact_wide(x, own, layer, step), self._attention.out)
        scales = exact_wide.settle(x, self._eps, added, self._post_attention)
        added = exact_wide.product(self._mlp.exact_wide(x, scales), self._mlp.down)
        return exact_wide.settle(x, self._eps, added, self._post_mlp)


class _Attention:
    """Queries, keys and values, rotated; and the way back. What a query sees is the attention's business."""

    def __init__(
        self,
        config: ModelConfig,
        spec: AttentionSpec,
        weights: Weights,
        prefix: str,
        gain: torch.Tensor | None,
    ) -> None:
        hidden, dim, ranks = config.hidden_size, spec.head_dim, weights.placement.ranks
        counts = [spec.num_heads * dim, spec.num_kv_heads * dim, spec.num_kv_heads * dim]
        names = [f"{prefix}.{p}_proj" for p in "qkv"]
        width = hidden if gain is None else gain.shape[0]
        weight = weights.stack_rows([f"{n}.weight" for n in names], counts, width)
        bias = norms = self._out_bias = None
        if spec.qkv_bias:
            pairs = zip(names, counts, strict=True)
            bias = torch.cat([weights.take_rows(f"{n}.bias", (c,)) for n, c in pairs])
        if spec.head_norms:
            gains = [load_gain(config, weights, f"{prefix}.{p}_norm.weight", dim) for p in "qk"]
            norms = skinny.HeadNorms(torch.stack(gains), config.norm_eps)
        self._qkv = skinny.QkvWeights(weight if gain is None else weight.mul_(gain), bias, norms)
        self._heads = row_kernels.Heads(spec.num_heads // ranks, spec.num_kv_heads // ranks, dim, norms)
        self._rope = spec.rope
        self._scores = Scores.of(spec)
        self.out = weights.take_columns(f"{prefix}.o_proj.weight", (hidden, counts[0]))
        if spec.output_bias and weights.placement.rank == 0:  # once in the sum over the ranks
            self._out_bias = weights.take(f"{prefix}.o_proj.bias", (hidden,))

    def narrow(self, source: skinny.Source, layer: torch.Tensor, step: Forward) -> torch.Tensor:
        """-> what every query has attended to, [m, heads * dim]."""
        rows, heads = step.rows, self._heads
        q = skinny.empty_padded(rows.count, heads.q, heads.dim, like=source.x)
        kv = skinny.KvRows(layer, rows.kv_rows)
        skinny.qkv_rope(source, self._qkv, q, step.rotation(self._rope), kv, step.context.launch)
        return step.context.attention(q, layer, rows, self._scores)

    def wide(self, normed: torch.Tensor, layer: torch.Tensor, step: Forward) -> torch.Tensor:
        """-> what is added to the residual, [m, hidden], but for the sum over the ranks."""
        rows, heads = step.rows, self._heads
        qkv = _product(normed, self._qkv.weight, self._qkv.bias)
        q = normed.new_empty(rows.count, heads.q, heads.dim)
        kv = skinny.KvRows(layer, rows.kv_rows)
        row_kernels.rope_write(qkv, heads, q, step.rotation(self._rope), kv, step.context.launch.pdl)
        return _product(step.context.attention(q, layer, rows, self._scores), self.out, self._out_bias)

    def exact_wide(
        self, x: torch.Tensor, scales: torch.Tensor, layer: torch.Tensor, step: Forward
    ) -> torch.Tensor:
        """-> what every query has attended to, [m, heads * dim]."""
        heads, kind = self._heads, "heads" if self._heads.norms else "qkv"
        raw = exact_wide.product(x, self._qkv.weight, kind, heads.dim)
        q, kv = x.new_empty(x.shape[0], heads.q, heads.dim), skinny.KvRows(layer, step.rows.kv_rows)
        exact_wide.rope_write(raw, scales, self._qkv, q, step.rotation(self._rope), kv)
        return step.context.attention(q, layer, step.rows, self._scores)


class _FeedForward:
    """down(activation(gate) * up)."""

    def __init__(
        self, config: ModelConfig, spec: FeedForwardSpec, weights: Weights, prefix: str, gain: torch.Tensor
    ) -> None:
        hidden, width = config.hidden_size, spec.width
        names = [f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"]
        self._gate_up = weights.stack_rows(names, [width, width], hidden).mul_(gain)
        self._gelu = spec.activation == "gelu_tanh"
        self.down = weights.take_columns(f"{prefix}.down_proj.weight", (hidden, width))

    def narrow(self, source: skinny.Source, step: Forward) -> torch.Tensor:
        """-> what `down` reads, [m, width]."""
        inner = skinny.empty_padded(source.x.shape[0], self.down.shape[1], like=source.x)
        skinny.gated(source, self._gate_up, inner, step.context.launch, self._gelu)
        return inner

    def wide(self, normed: torch.Tensor, pdl: bool) -> torch.Tensor:
        """-> what is added to the residual, [m, hidden], but for the sum over the ranks."""
        return _product(row_kernels.act_mul(_product(normed, self._gate_up), self._gelu, pdl), self.down)

    def exact_wide(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """-> what `down` reads, [m, width]."""
        return exact_wide.act_mul(exact_wide.product(x, self._gate_up, "gated"), scales, self._gelu)


def load_gain(config: ModelConfig, weights: Weights, name: str, size: int) -> torch.Tensor:
    """The gain [size] of a norm, stored less the model's offset.

    With an offset it is float32: near 1 a shorter type would lose the digits that are stored.
    """
    if config.norm_offset == 0.0:
        return weights.take(name, (size,))
    return weights.take(name, (size,), torch.float32).add_(config.norm_offset)


def load_input_gain(
    config: ModelConfig, weights: Weights, spec: LayerSpec, prefix: str
) -> torch.Tensor | None:
    """Of the norm before a layer's attention, if it has one."""
    if not (name := spec.norms.before_attention):
        return None
    return load_gain(config, weights, f"{prefix}.{name}.weight", config.hidden_size)


def source_of(residual: NarrowRows, eps: float) -> skinny.Source:
    """The residual's rows, which the product that reads them normalises."""
    return skinny.Source(residual.x, residual.sums, eps)


def _added(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: NarrowRows,
    post: torch.Tensor | None,
    eps: float,
    step: Forward,
) -> NarrowRows:
    """The residual plus x . weight^T over all ranks, or plus the norm of that with gain `post`.

    The residual is added by the product, by the sum over several ranks, or by the kernel that norms.
    """
    source, launch, group = skinny.Source(x), step.context.launch, step.context.group
    rows, alone = residual.x, group.ranks == 1
    out = skinny.empty_padded(*rows.shape, like=rows)
    if post is not None:
        skinny.linear(source, weight, out, launch)
        group.all_reduce(out)
        sums = row_kernels.add_normed(out, rows, post, eps, launch.pdl, launch.exact)
        return NarrowRows(rows, sums)
    parts = skinny.linear_parts(source, weight, launch) if alone else ProcessGroup.sum_parts(out.shape[1])
    sums = torch.empty(parts, skinny.MAX_ROWS, dtype=torch.float32, device=x.device)
    if alone:
        skinny.linear(source, weight, out, launch, rows, sums)
    else:
        skinny.linear(source, weight, out, launch)
        group.all_reduce_add(out, rows, sums)
    return NarrowRows(out, sums)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
