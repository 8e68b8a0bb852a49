"""Latent attention of a layer on a GPU, absorbed: the equations of `eyas.engine.layers.latent`, its test.

One product gives the queries' inner row and the row that is kept; a kernel norms both, rotates the key and
keeps the row; one product makes queries of the inner row (without one, the first product has made them). From
there on heads are alone: into the latents, over the context, out of them. Ranks divide the heads; what is
before them, and what is kept, every rank has.
"""

from __future__ import annotations

from typing import Any

import torch

from eyas.engine.attention.latent_heads import LatentHeads
from eyas.engine.checkpoint.config import LatentSpec, ModelConfig
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.formats.projection import Projection, ProjectionLoader
from eyas.engine.formats.table import loader_of
from eyas.engine.kernels.latent.latent_rows import InnerNorms, write_latents
from eyas.engine.kernels.products import skinny
from eyas.engine.kernels.products.blocks import Normed, Rows
from eyas.engine.layers.latent import EPS, halves_last
from eyas.engine.models.fused_step import Forward, norm_before
from eyas.engine.models.ops.base import Ops


class FusedLatent:
    """A layer's attention, up to what every head has mixed of the latents.

    `gain`: of the norm of its input (None: there is none, and the input is as wide as the residual).
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: LatentSpec,
        weights: Weights,
        prefix: str,
        gain: torch.Tensor | None,
    ) -> None:
        self._spec = spec
        width = config.hidden_size if gain is None else gain.shape[0]
        self._first, query_gain = self._first_weight(weights, prefix, width)
        self.norm = None if gain is None else norm_before(config, gain, self._first)
        self._second = None
        if spec.query_rank:
            second = f"{prefix}.q_b_proj.weight"
            self._second = self._queries(loader_of(weights, [second]), second, spec.query_rank)
        latent_gain = weights.take(f"{prefix}.kv_a_layernorm.weight", (spec.kv_rank,))
        reads = None if self._second is None else self._second.rounding
        self._norms = InnerNorms(latent_gain, query_gain, EPS, reads)
        self._keys, self._values = _factors(spec, weights, f"{prefix}.kv_b_proj.weight")

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Its weights, those of one number of heads at a time left out."""
        second = () if self._second is None else (self._second,)
        return self._first, *second

    def _first_weight(
        self, weights: Weights, prefix: str, width: int
    ) -> tuple[Projection, torch.Tensor | None]:
        """What the input is multiplied by first, and the gain of the queries' inner norm."""
        spec, gain, row = self._spec, None, f"{prefix}.kv_a_proj_with_mqa.weight"
        if spec.query_rank:
            query = f"{prefix}.q_a_proj.weight"
            loader = loader_of(weights, [query, row])
            queries = loader.whole(query, (spec.query_rank, width))
            gain = weights.take(f"{prefix}.q_a_layernorm.weight", (spec.query_rank,))
        else:
            query = f"{prefix}.q_proj.weight"
            loader = loader_of(weights, [query, row])
            queries = self._queries(loader, query, width)
        kept = loader.whole(row, (spec.head_dim, width))
        return queries.below(kept.in_order(self._halves_last(1, kept))), gain

    def _queries(self, loader: ProjectionLoader, name: str, columns: int) -> Projection:
        """This rank's heads [heads * (plain + rotated), columns], whose rotated rows are halves."""
        spec, each = self._spec, self._spec.plain_dim + self._spec.rotated_dim
        stored = loader.rows([name], [spec.num_heads * each], columns)
        return stored.in_order(self._halves_last(stored.shape[0] // each, stored))

    def _halves_last(self, heads: int, stored: Projection) -> torch.Tensor:
        """The stored row of each row of a matrix that has `heads` heads, int64 [rows]."""
        rows = torch.arange(stored.shape[0])
        return halves_last(rows.view(heads, -1, 1), self._spec).reshape(-1)

    def keep_narrow(self, source: skinny.Source, layer: torch.Tensor, step: Forward) -> torch.Tensor:
        """Keeps the rows -> as of `_settled`. Not of weights in FP8."""
        assert (matrix := self._first.matrix) is not None
        first = skinny.empty_padded(source.x.shape[0], matrix.shape[0], like=source.x)
        skinny.linear(source, matrix, first, step.context.launch)
        queries = self._settled(first, layer, step)
        assert isinstance(queries, torch.Tensor)
        return queries

    def keep_wide(self, normed: Normed, layer: torch.Tensor, step: Forward) -> Rows:
        """As `keep_narrow`, of any weights."""
        return self._settled(step.product(normed, self._first), layer, step)

    def narrow(self, source: skinny.Source, layer: torch.Tensor, step: Forward) -> torch.Tensor:
        """-> every head's values, [m, heads * value]. Not of weights in FP8."""
        queries = self.keep_narrow(source, layer, step)
        if self._second is not None:
            assert (matrix := self._second.matrix) is not None
            inner = skinny.Source(queries)
            queries = skinny.empty_padded(inner.x.shape[0], matrix.shape[0], like=inner.x)
            skinny.linear(inner, matrix, queries, step.context.launch)
        return self._attended(queries, layer, step)

    def wide(self, normed: Normed, layer: torch.Tensor, step: Forward) -> torch.Tensor:
        """As `narrow`, of any weights and any number of rows."""
        queries = self.keep_wide(normed, layer, step)
        if self._second is not None:
            queries = step.product(queries, self._second)
        assert isinstance(queries, torch.Tensor)
        return self._attended(queries, layer, step)

    def attend(self, read: Any, layer: torch.Tensor, ops: Ops[Any, Any]) -> torch.Tensor:
        """Keeps the rows -> every head's values, [m, heads * value]."""
        return ops.latents(read, self, layer)

    def keep(self, read: Any, layer: torch.Tensor, ops: Ops[Any, Any]) -> None:
        """Keeps the rows alone."""
        ops.keep_latents(read, self, layer)

    def _settled(self, first: torch.Tensor, layer: torch.Tensor, step: Forward) -> Rows:
        """Keeps the rows; returns what queries are made of, or they themselves."""
        kv, rotation = skinny.KvRows(layer, step.rows.kv_rows), step.rotation(self._spec.rope)
        return write_latents(first, self._norms, rotation, kv, step.context.launch.pdl)

    def _attended(self, queries: torch.Tensor, layer: torch.Tensor, step: Forward) -> torch.Tensor:
        rotation = step.rotation(self._spec.rope)
        heads = LatentHeads(self._spec.scale, keys=self._keys, values=self._values, rotation=rotation)
        return step.context.attention(queries, layer, step.rows, heads)


def _factors(spec: LatentSpec, weights: Weights, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of this rank's heads: keys' [heads, plain, latent] and values' [heads, value, latent], never in FP8."""
    parts = (spec.plain_dim, spec.value_dim)
    stored = weights.take_rows(name, (spec.num_heads * sum(parts), spec.kv_rank))
    keys, values = stored.view(-1, sum(parts), spec.kv_rank).split(parts, 1)
    return keys.contiguous(), values.contiguous()
