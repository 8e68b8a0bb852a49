"""The Llama family on a GPU: the equations of `eyas.engine.models.llama` in few kernels.

The results of that one are its test. Two ways through a layer. Narrow, up to 128 rows: four products with
everything small fused into them (`eyas.engine.kernels.skinny`), bound by reading the weights. Wide: cuBLAS
products with row kernels between them. Norm gains are folded into the weights that follow them. Of several
ranks each computes with its share of the weights (`eyas.engine.parallel.shards`); residual rows and logits
are the same on all. It knows rows and weights; where a step's rows come from is `eyas.engine.device`'s
business, how they attend is the attention's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from eyas.engine.batch.rows import Rows
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.kernels import rows as row_kernels
from eyas.engine.kernels import skinny
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.rotary import tables as rotary_tables
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.shards import config_of_rank


class RowAttention(Protocol):
    """Attention of a forward's rows over one layer of the pool."""

    def __call__(self, q: torch.Tensor, layer: torch.Tensor, rows: Rows) -> torch.Tensor:
        """q [m, heads, dim] over [pages, 2, page_size, kv_heads, dim] -> [m, heads * dim]."""


@dataclass(frozen=True)
class LayerContext:
    """What a rank's layers share: the other ranks, launches' scratch memory, attention, the rotary tables."""

    group: ProcessGroup
    launch: skinny.Launch
    attention: RowAttention
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def on(
        cls,
        device: str,
        config: ModelConfig,
        group: ProcessGroup,
        launch: skinny.Launch,
        attention: RowAttention,
    ) -> LayerContext:
        cos, sin = rotary_tables(config.rope, config.head_dim, config.context_length)
        return cls(group, launch, attention, cos.to(device), sin.to(device))


@dataclass(frozen=True)
class ResidualRows:
    """The residual rows [m, hidden], and (narrow) parts of their squares' sums, float32 [parts, 128]."""

    x: torch.Tensor
    sums: torch.Tensor | None


class FusedLayer:
    """One decoder layer, or a rank's share of it, whose sizes are `config`'s.

    `width`: columns of what its attention reads (a draft head joins two rows).
    """

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, width: int | None = None) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.config = config_of_rank(config, weights.placement.ranks)
        attention = f"{prefix}.self_attn"
        dim = config.head_dim
        counts = [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
        names = [f"{attention}.{p}_proj" for p in "qkv"]
        qkv = weights.stack_rows([f"{n}.weight" for n in names], counts, width or hidden)
        if width is None:
            qkv = _folded(qkv, weights.take(f"{prefix}.input_layernorm.weight", (hidden,)))
        self.qkv = qkv
        self.qkv_bias = self.out_bias = norms = None
        if config.qkv_bias:
            pairs = zip(names, counts, strict=True)
            self.qkv_bias = torch.cat([weights.take_rows(f"{n}.bias", (c,)) for n, c in pairs])
        if config.output_bias and weights.placement.rank == 0:  # once in the sum over the ranks
            self.out_bias = weights.take(f"{attention}.o_proj.bias", (hidden,))
        if config.qk_norm:
            gains = [weights.take(f"{attention}.{p}_norm.weight", (dim,)) for p in "qk"]
            norms = skinny.HeadNorms(torch.stack(gains), config.norm_eps)
        self._heads = row_kernels.Heads(self.config.num_heads, self.config.num_kv_heads, dim, norms)
        self.out = weights.take_columns(f"{attention}.o_proj.weight", (hidden, counts[0]))
        mlp = [f"{prefix}.mlp.gate_proj.weight", f"{prefix}.mlp.up_proj.weight"]
        gain = weights.take(f"{prefix}.post_attention_layernorm.weight", (hidden,))
        self.gate_up = _folded(weights.stack_rows(mlp, [inner, inner], hidden), gain)
        self.down = weights.take_columns(f"{prefix}.mlp.down_proj.weight", (hidden, inner))

    @property
    def plain(self) -> bool:
        """Do its projections have neither biases nor head norms? Only those are fused."""
        config = self.config
        return not (config.qkv_bias or config.output_bias or config.qk_norm)

    # --- narrow ----------------------------------------------------------------------------------------

    def narrow(
        self, source: skinny.Source, x: torch.Tensor, layer: torch.Tensor, step: Forward
    ) -> ResidualRows:
        """Attention reads `source`; x [m, hidden] is the residual."""
        config, launch = self.config, step.context.launch
        q = skinny.empty_padded(x.shape[0], config.num_heads, config.head_dim, like=x)
        qkv, kv = skinny.QkvWeights(self.qkv), skinny.KvRows(layer, step.rows.kv_rows)
        skinny.qkv_rope(source, qkv, q, step.rotation, kv, launch)
        attended = step.context.attention(q, layer, step.rows)
        residual = _narrow_linear(attended, self.out, x, step.context)
        inner = skinny.empty_padded(x.shape[0], config.intermediate_size, like=x)
        skinny.gated(_source(residual, config.norm_eps), self.gate_up, inner, launch)
        return _narrow_linear(inner, self.down, residual.x, step.context)

    # --- wide ------------------------------------------------------------------------------------------

    def wide(self, normed: torch.Tensor, x: torch.Tensor, layer: torch.Tensor, step: Forward) -> torch.Tensor:
        """The attention half and the feed-forward half: the latter's output, not yet added to x [m, hidden].

        x is updated in place by the attention's.
        """
        config, group, pdl = self.config, step.context.group, step.context.launch.pdl
        qkv = _product(normed, self.qkv, self.qkv_bias)
        q = x.new_empty(x.shape[0], config.num_heads, config.head_dim)
        kv = skinny.KvRows(layer, step.rows.kv_rows)
        row_kernels.rope_write(qkv, self._heads, q, step.rotation, kv, pdl)
        attended = step.context.attention(q, layer, step.rows)
        added = _product(attended, self.out, self.out_bias)
        group.all_reduce(added)
        normed = row_kernels.add_norm(added, x, config.norm_eps, pdl=pdl)
        added = _product(row_kernels.act_mul(_product(normed, self.gate_up), pdl=pdl), self.down)
        group.all_reduce(added)
        return added


@dataclass(frozen=True)
class Forward:
    """What every layer of one forward shares."""

    rows: Rows
    context: LayerContext

    @property
    def rotation(self) -> skinny.Rotation:
        return skinny.Rotation(self.context.cos, self.context.sin, self.rows.positions)


def refusal(config: ModelConfig) -> str:
    """What of this model has no device implementation, in words; "" if it can be served."""
    for number, layer in enumerate(config.layers):
        attention = layer.attention
        missing = {
            "a sliding window": attention.window > 0,
            "a soft cap of scores": attention.soft_cap > 0.0,
            "a scale of scores that is not head_dim ** -0.5": attention.scale != attention.head_dim**-0.5,
            "norms after its halves": layer.norms.around,
            f"the activation {layer.feed_forward.activation}": layer.feed_forward.activation != "silu",
            "equations that differ from the first layer's": layer != config.layers[0],
        }
        if found := [what for what, there in missing.items() if there]:
            return f"layer {number} has {found[0]}"
    rest = {
        "gains with an offset": config.norm_offset != 0.0,
        "scaled embeddings": config.embedding_scale != 1.0,
        "a soft cap of logits": config.logit_soft_cap > 0.0,
    }
    return next((f"it has {what}" for what, there in rest.items() if there), "")


class FusedLlama:
    """A decoder on one GPU, or one rank's share of it; `lm_head`: its rows of the vocabulary."""

    def __init__(self, config: ModelConfig, weights: Weights, context: LayerContext) -> None:
        self.config = config
        self._context = context
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = weights.take("model.embed_tokens.weight", shape)
        self.lm_head = context.group.rows_of(self.embedding)
        if not config.tied_head:
            self.lm_head = weights.take_rows("lm_head.weight", shape)
        self.layers = [FusedLayer(config, weights, f"model.layers.{i}") for i in range(config.num_layers)]
        self._gain = weights.take("model.norm.weight", (config.hidden_size,))

    def forward(
        self, rows: Rows, pool: KvPool, capture: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual rows leaving the last layer [m, hidden], and [m, len(capture) * hidden].

        The latter: the rows entering each captured layer (past the last: leaving it).
        """
        step = Forward(rows, self._context)
        captured = skinny.empty_padded(rows.count, len(capture), self.config.hidden_size, like=self.embedding)
        run = self._narrow if rows.count <= skinny.MAX_ROWS and self.layers[0].plain else self._wide
        x = run(step, pool, capture, captured)
        _keep(captured, capture, len(self.layers), x)
        return x, captured.view(rows.count, -1)

    def logits(
        self, x: torch.Tensor, picked: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows as `forward` gave them, all or those `picked` (int32 [n]) -> float32 [n, vocab], in `out`."""
        if picked is not None:
            x = row_kernels.gather_rows(x, picked, pdl=self._pdl)
        normed = row_kernels.norm(x, self.config.norm_eps, self._gain, pdl=self._pdl)
        return head_product(normed, self.lm_head, self._context, out)

    @property
    def _pdl(self) -> bool:
        return self._context.launch.pdl

    def _narrow(
        self, step: Forward, pool: KvPool, capture: tuple[int, ...], captured: torch.Tensor
    ) -> torch.Tensor:
        residual = ResidualRows(
            *row_kernels.embed(step.rows.tokens, self.embedding, sums=True, pdl=self._pdl)
        )
        for i, layer in enumerate(self.layers):
            _keep(captured, capture, i, residual.x)
            residual = layer.narrow(_source(residual, self.config.norm_eps), residual.x, pool.layer(i), step)
        return residual.x

    def _wide(
        self, step: Forward, pool: KvPool, capture: tuple[int, ...], captured: torch.Tensor
    ) -> torch.Tensor:
        eps = self.config.norm_eps
        x, _ = row_kernels.embed(step.rows.tokens, self.embedding)
        added = torch.zeros_like(x)
        for i, layer in enumerate(self.layers):
            normed = row_kernels.add_norm(added, x, eps, pdl=self._pdl)
            _keep(captured, capture, i, x)
            added = layer.wide(normed, x, pool.layer(i), step)
        return x.add_(added)


def head_product(
    x: torch.Tensor, weight: torch.Tensor, context: LayerContext, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [n, hidden], this rank's rows of an output head -> float32 [n, vocab], the same on every rank.

    `out`: where that is put, if it is given.
    """
    rows, columns, ranks = x.shape[0], weight.shape[0], context.group.ranks
    if out is None:
        out = torch.empty(rows, ranks * columns, dtype=torch.float32, device=x.device)
    own = out if ranks == 1 else torch.empty(rows, columns, dtype=torch.float32, device=x.device)
    _head_columns(x, weight, own, context.launch)
    return context.group.all_gather_columns(own, out)


def _head_columns(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, launch: skinny.Launch) -> None:
    if x.shape[0] <= skinny.MAX_ROWS:
        skinny.linear(skinny.Source(x), weight, out, launch)
    elif x.is_cuda:
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    else:
        out.copy_(torch.mm(x, weight.t()))


def _source(residual: ResidualRows, eps: float) -> skinny.Source:
    return skinny.Source(residual.x, residual.sums, eps)


def _narrow_linear(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, context: LayerContext
) -> ResidualRows:
    """residual + x . weight^T, over all ranks. Of one rank the product adds; of several the sum over them."""
    source, alone = skinny.Source(x), context.group.ranks == 1
    out = skinny.empty_padded(*residual.shape, like=residual)
    parts = (
        skinny.linear_parts(source, weight, context.launch) if alone else ProcessGroup.sum_parts(out.shape[1])
    )
    sums = torch.empty(parts, skinny.MAX_ROWS, dtype=torch.float32, device=x.device)
    if alone:
        skinny.linear(source, weight, out, context.launch, residual, sums)
    else:
        skinny.linear(source, weight, out, context.launch)
        context.group.all_reduce_add(out, residual, sums)
    return ResidualRows(out, sums)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _folded(weight: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """The weight whose product with plainly normalised rows is that with rows times the gain."""
    return weight.mul_(gain)


def _keep(captured: torch.Tensor, capture: tuple[int, ...], layer: int, x: torch.Tensor) -> None:
    for place, wanted in enumerate(capture):
        if wanted == layer:
            captured[:, place].copy_(x)
