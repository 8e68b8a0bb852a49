"""One layer of any decoder on a GPU, put together by its `LayerSpec` from few kernels.

Two ways through it. Narrow, up to 128 rows: four products with everything small fused into them
(`eyas.engine.kernels.skinny`), bound by reading the weights. Wide: cuBLAS products with row kernels between
them. The gain of a norm before a product is folded into the product's weight. Where a norm follows a product
the residual cannot be added by it: a row kernel normalises, adds, and leaves the sums that the next product
wants. Weights in FP8 keep their bits: attention of such goes the wide way whatever the number of rows,
and gains stay with the norms. Of several ranks each computes with its share of the weights
(`eyas.engine.parallel.shards`); residual rows are the same on all. It knows one layer;
`eyas.engine.models.fused` knows how many there are.
"""

from __future__ import annotations

import torch

from eyas.engine.checkpoint.config import AttentionSpec, ExpertsSpec, LatentSpec, LayerSpec, ModelConfig
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.formats.projection import Projection
from eyas.engine.formats.table import loader_of
from eyas.engine.kernels import exact_wide, skinny
from eyas.engine.kernels import rows as row_kernels
from eyas.engine.kernels.blocks import Normed
from eyas.engine.kernels.scores import Scores
from eyas.engine.layers.attention import query_key_gains, rows_order
from eyas.engine.layers.norm import load_gain
from eyas.engine.models.fused_experts import FusedExperts
from eyas.engine.models.fused_feed_forward import FeedForward, dense
from eyas.engine.models.fused_latent import FusedLatent
from eyas.engine.models.fused_residual import (
    NarrowRows,
    ScaledRows,
    WideRows,
    add_made,
    add_product,
    narrow_product,
    normed_rows,
    source_of,
)
from eyas.engine.models.fused_step import Forward, norm_before


class FusedLayer:
    """One decoder layer, or a rank's share of it, as `spec` says of the whole.

    `gain`: of the norm that what its attention reads has passed without one; its width is that of the input
    (a draft head joins two rows). None: there is no norm. `narrow_rows`: of how many rows, at most, `narrow`
    is the way; `exact_rows`: in the exact arithmetic, whose products have no bias to themselves.
    """

    def __init__(
        self, config: ModelConfig, spec: LayerSpec, weights: Weights, prefix: str, gain: torch.Tensor | None
    ) -> None:
        norms = spec.norms

        def gain_of(name: str) -> torch.Tensor:
            return load_gain(config, weights, f"{prefix}.{name}.weight", config.hidden_size)

        self._eps = config.norm_eps
        self._normed = gain is not None
        self._attention = _attention(config, spec.attention, weights, f"{prefix}.self_attn", gain)
        before = gain_of(norms.before_feed_forward)
        self._post_attention = gain_of(norms.after_attention) if norms.around else None
        self._post_mlp = gain_of(norms.after_feed_forward) if norms.around else None
        self._mlp: FeedForward
        if isinstance(spec.feed_forward, ExpertsSpec):
            self._mlp = FusedExperts(config, spec.feed_forward, weights, f"{prefix}.mlp", before)
        else:
            parts = (weights, f"{prefix}.mlp", before, self._post_mlp)
            self._mlp = dense(config, spec.feed_forward, *parts)
        fused = all(each.matrix is not None for each in self._attention.projections)
        narrow = skinny.MAX_ROWS if fused else 0
        self.exact_rows = 0 if spec.attention.latent else narrow
        self.narrow_rows = 0 if spec.attention.output_bias else narrow

    @property
    def formats(self) -> tuple[type[Projection], ...]:
        """Of its weights: layers of one specification may differ in that."""
        return tuple(map(type, (*self._attention.projections, *self._mlp.projections)))

    @property
    def norm(self) -> row_kernels.Norm:
        """Of what attention reads."""
        return self._attention.norm

    def source(self, residual: NarrowRows) -> skinny.Source:
        """What attention reads of the residual, for `narrow`."""
        return source_of(residual, self._eps) if self._normed else skinny.Source(residual.x)

    def settle(self, residual: WideRows, pdl: bool) -> Normed:
        """What attention reads of the residual, for `wide`, once what was to be added is added in place."""
        if not self._normed:
            return Normed(residual.settled(self._eps, pdl))
        return residual.settle(self.norm, pdl)

    def narrow(
        self, source: skinny.Source, residual: NarrowRows, layer: torch.Tensor, step: Forward
    ) -> NarrowRows:
        """Attention reads `source`. With norms after its products the residual is changed in place."""
        attended, out = self._attention.narrow(source, layer, step), self._attention.out
        if (bias := self._attention.out_bias) is not None:
            added = narrow_product(attended, out, step.context.launch).add_(bias)
            residual = add_made(added, residual, self._post_attention, self._eps, step)
        else:
            residual = add_product(attended, out, residual, self._post_attention, self._eps, step)
        return self._mlp.narrow(residual, step)

    def keep_narrow(self, source: skinny.Source, layer: torch.Tensor, step: Forward) -> None:
        """`narrow`, as far as it writes the rows' KV."""
        self._attention.keep_narrow(source, layer, step)

    def keep_wide(self, normed: Normed, layer: torch.Tensor, step: Forward) -> None:
        """`wide`, as far as it writes the rows' KV."""
        self._attention.keep_wide(normed, layer, step)

    def wide(self, normed: Normed, x: torch.Tensor, layer: torch.Tensor, step: Forward) -> WideRows:
        """Attention reads `normed`, which may be x; its result is added to the residual x [m, hidden] in
        place, the feed-forward's not yet.
        """
        group, pdl = step.context.group, step.context.launch.pdl
        added = self._attention.wide(normed, layer, step)
        group.all_reduce(added)
        normed = WideRows(x, added, self._post_attention).settle(self._mlp.norm, pdl)
        added = self._mlp.wide(normed, step)
        group.all_reduce(added)
        return WideRows(x, added, self._post_mlp)

    def exact_wide(self, residual: ScaledRows, layer: torch.Tensor, step: Forward) -> ScaledRows:
        """`wide` with the bits of `narrow`; the residual is changed in place."""
        x, scales = residual.x, residual.scales
        if not self._normed or self._attention.reads_normed:
            scales = torch.ones_like(scales)
        if self._normed and self._attention.reads_normed:
            x = normed_rows(x, self._attention.norm, step).plain
        attended = self._attention.exact_wide(x, scales, layer, step)
        added = self._attention.exact_back(attended, step)
        if (bias := self._attention.out_bias) is not None:
            added = exact_wide.total(added, x.dtype).add_(bias)
        residual = residual.plus(added, self._post_attention, self._eps, step)
        return self._mlp.exact_wide(residual, step)


class _Attention:
    """Queries, keys and values, rotated; and the way back. What a query sees is the attention's business.

    `norm`: of its input; without a gain where the weights have it in them.
    """

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
        matrices, back = [f"{n}.weight" for n in names], f"{prefix}.o_proj.weight"
        heads, kv_heads = spec.num_heads // ranks, spec.num_kv_heads // ranks
        order = rows_order(spec, heads, kv_heads)
        self._qkv = loader_of(weights, matrices).rows(matrices, counts, width)
        if order is not None:
            self._qkv = self._qkv.in_order(order)
        self._bias = norms = self.out_bias = None
        if spec.qkv_bias:
            pairs = zip(names, counts, strict=True)
            bias = torch.cat([weights.take_rows(f"{n}.bias", (c,)) for n, c in pairs])
            self._bias = bias if order is None else bias[order.to(bias.device)]
        if spec.head_norms:
            gains = query_key_gains(config, spec, weights, prefix)
            norms = skinny.HeadNorms(torch.stack(gains), config.norm_eps)
        self.norm, self._norms = norm_before(config, gain, self._qkv), norms
        self._heads = row_kernels.Heads(heads, kv_heads, dim, norms)
        self._rope = spec.rope
        self._scores = Scores.of(spec)
        self.out = loader_of(weights, [back]).columns(back, (hidden, counts[0]))
        if spec.output_bias and weights.placement.rank == 0:  # once in the sum over the ranks
            self.out_bias = weights.take(f"{prefix}.o_proj.bias", (hidden,))

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Its weights."""
        return self._qkv, self.out

    @property
    def reads_normed(self) -> bool:
        """Whether `exact_wide` is given rows that have passed their norm: its product cannot do it behind."""
        return self._qkv.matrix is None

    def keep_narrow(self, source: skinny.Source, layer: torch.Tensor, step: Forward) -> torch.Tensor:
        """Writes keys and values -> queries [m, heads, dim]."""
        rows, heads = step.rows, self._heads
        q = skinny.empty_padded(rows.count, heads.q, heads.dim, like=source.x)
        kv = skinny.KvRows(layer, rows.kv_rows)
        assert (matrix := self._qkv.matrix) is not None
        qkv = skinny.QkvWeights(matrix, self._bias, self._norms)
        skinny.qkv_rope(source, qkv, q, step.rotation(self._rope), kv, step.context.launch)
        return q

    def keep_wide(self, normed: Normed, layer: torch.Tensor, step: Forward) -> torch.Tensor:
        """As `keep_narrow`."""
        rows, heads = step.rows, self._heads
        qkv = step.product(normed, self._qkv, self._bias)
        q = qkv.new_empty(rows.count, heads.q, heads.dim)
        kv = skinny.KvRows(layer, rows.kv_rows)
        row_kernels.rope_write(qkv, heads, q, step.rotation(self._rope), kv, step.context.launch.pdl)
        return q

    def narrow(self, source: skinny.Source, layer: torch.Tensor, step: Forward) -> torch.Tensor:
        """-> what every query has attended to, [m, heads * dim]."""
        q = self.keep_narrow(source, layer, step)
        return step.context.attention(q, layer, step.rows, self._scores)

    def wide(self, normed: Normed, layer: torch.Tensor, step: Forward) -> torch.Tensor:
        """-> what is added to the residual, [m, hidden], but for the sum over the ranks."""
        q = self.keep_wide(normed, layer, step)
        attended = step.context.attention(q, layer, step.rows, self._scores)
        return step.product(attended, self.out, self.out_bias)

    def exact_wide(
        self, x: torch.Tensor, scales: torch.Tensor, layer: torch.Tensor, step: Forward
    ) -> torch.Tensor:
        """-> what every query has attended to, [m, heads * dim]. `scales`: what x [m, hidden] is still to be
        multiplied by, float32 [m].
        """
        heads, kind = self._heads, "heads" if self._heads.norms else "qkv"
        raw = step.exact_product(x, self._qkv, kind, heads.dim)
        q, kv = x.new_empty(x.shape[0], heads.q, heads.dim), skinny.KvRows(layer, step.rows.kv_rows)
        after = exact_wide.AfterQkv(self._bias, self._norms, step.context.launch.pdl)
        exact_wide.rope_write(raw, scales, after, q, step.rotation(self._rope), kv)
        return step.context.attention(q, layer, step.rows, self._scores)

    def exact_back(self, attended: torch.Tensor, step: Forward) -> torch.Tensor:
        """-> what is added to the residual, but for a bias and the sum over the ranks: [m, hidden], or what
        `exact_wide.shares` gives.
        """
        return step.exact_shares(attended, self.out)


def _attention(
    config: ModelConfig, spec: AttentionSpec, weights: Weights, prefix: str, gain: torch.Tensor | None
) -> _Attention | FusedLatent:
    """The block of this specification; its tensors are those below `prefix`."""
    if isinstance(spec, LatentSpec):
        return FusedLatent(config, spec, weights, prefix, gain)
    return _Attention(config, spec, weights, prefix, gain)


def load_input_gain(
    config: ModelConfig, weights: Weights, spec: LayerSpec, prefix: str
) -> torch.Tensor | None:
    """Of the norm before a layer's attention, if it has one."""
    if not (name := spec.norms.before_attention):
        return None
    return load_gain(config, weights, f"{prefix}.{name}.weight", config.hidden_size)
