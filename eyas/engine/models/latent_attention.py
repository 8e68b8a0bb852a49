"""Latent attention of a layer, absorbed: every head reads the same cached rows (arXiv 2405.04434, 2.1).

A head's score is its query times (K latent), which is (its query times K) times the latent; its result is V
times the mixed latents. So keys and values of heads are never made, and a prompt's rows have the arithmetic
of generated ones: chunks, cached prefixes and drafts change no bit.

One product gives the queries' inner row and the row that is stored, both are normed, and the key is rotated;
one product makes queries of the inner row (without one, the first product has made them). From there on heads
are alone: into the latents, over the context, out of them. Ranks divide the heads; what is before them, and
what is stored, every rank has.
"""

from __future__ import annotations

from typing import Any, Generic

import torch

from eyas.engine.checkpoint.config import LatentSpec
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import ProjectionLoader, ProjectionT
from eyas.engine.kernels.latent.latent_rows import InnerNorms
from eyas.engine.kernels.products.blocks import Rows
from eyas.engine.layers.norm import Gain
from eyas.engine.layers.rotary import temperatures
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.machine import Blocks
from eyas.engine.models.ops.parts import LatentPart

EPS = 1e-6
"""Of both inner norms, whatever the model's own is."""


class LatentMixer(Generic[ProjectionT]):
    """A `Mixer`: a layer's attention, up to what every head has mixed of the latents.

    `gain`: of the norm of its input (None: there is none, and the input is as wide as the residual).
    """

    def __init__(self, blocks: Blocks[ProjectionT], spec: LatentSpec, prefix: str, gain: Gain | None) -> None:
        self._spec, config, weights = spec, blocks.config, blocks.weights
        width = config.hidden_size if gain is None else gain.shape[0]
        self._first, query_gain = self._first_weight(blocks, prefix, width)
        self.norm = None if gain is None else blocks.norm_before(gain, self._first)
        self._bias = self._first_bias(weights, prefix) if spec.qkv_bias else None
        self._second = None
        if spec.query_rank:
            second = f"{prefix}.q_b_proj.weight"
            self._second = self._queries(blocks.loader([second]), second, spec.query_rank)
        latent_gain = weights.take(f"{prefix}.kv_a_layernorm.weight", (spec.kv_rank,))
        reads = None if self._second is None else self._second.rounding
        norms = InnerNorms(latent_gain, query_gain, EPS, reads)
        factors = _factors(spec, weights, f"{prefix}.kv_b_proj.weight")
        self._part = LatentPart(norms, spec, *factors)
        self._temperatures = None
        if spec.temper is not None:
            table = temperatures(spec.temper, config.context_length)
            self._temperatures = table.to(weights.placement.device)

    @property
    def projections(self) -> tuple[ProjectionT, ...]:
        """Its weights, those of one number of heads at a time left out."""
        second = () if self._second is None else (self._second,)
        return self._first, *second

    def _first_weight(
        self, blocks: Blocks[ProjectionT], prefix: str, width: int
    ) -> tuple[ProjectionT, torch.Tensor | None]:
        """The weight that the input is multiplied by first, and the gain of the queries' inner norm."""
        spec, gain, row = self._spec, None, f"{prefix}.kv_a_proj_with_mqa.weight"
        if spec.query_rank:
            query = f"{prefix}.q_a_proj.weight"
            loader = blocks.loader([query, row])
            queries = loader.whole(query, (spec.query_rank, width))
            gain = blocks.weights.take(f"{prefix}.q_a_layernorm.weight", (spec.query_rank,))
        else:
            query = f"{prefix}.q_proj.weight"
            loader = blocks.loader([query, row])
            queries = self._queries(loader, query, width)
        stored = loader.whole(row, (spec.head_dim, width))
        return queries.below(stored.in_order(self._halves_last(1, stored.shape[0]))), gain

    def _first_bias(self, weights: WeightSource, prefix: str) -> torch.Tensor:
        """The first product's bias: of the queries' inner row, and of the row that is stored."""
        spec, rows = self._spec, self._first.shape[0] - self._spec.head_dim
        stored = weights.take(f"{prefix}.kv_a_proj_with_mqa.bias", (spec.head_dim,))
        stored = stored[self._halves_last(1, spec.head_dim).to(stored.device)]
        queries = stored.new_zeros(rows)
        if spec.query_rank:
            queries = weights.take(f"{prefix}.q_a_proj.bias", (rows,))
        return torch.cat((queries, stored))

    def _queries(self, loader: ProjectionLoader[ProjectionT], name: str, columns: int) -> ProjectionT:
        """This rank's heads [heads * (plain + rotated), columns], whose rotated rows are halves."""
        spec, each = self._spec, self._spec.plain_dim + self._spec.rotated_dim
        stored = loader.rows([name], [spec.num_heads * each], columns)
        return stored.in_order(self._halves_last(stored.shape[0] // each, stored.shape[0]))

    def _halves_last(self, heads: int, count: int) -> torch.Tensor:
        """The stored row of each of `count` rows of a matrix that has `heads` heads, int64 [rows]."""
        rows = torch.arange(count)
        return halves_last(rows.view(heads, -1, 1), self._spec).reshape(-1)

    def attend(self, read: Any, layer: int, ops: Ops[Any, Any, Any]) -> torch.Tensor:
        """Keeps the rows -> every head's values, [m, heads * value]."""
        if self._second is None:
            queries = self.keep(read, layer, ops)
        else:
            made = ops.product(read, self._first, self._bias)
            queries = ops.latent_queries(made, self._part, self._second, layer)
        assert isinstance(queries, torch.Tensor)
        if self._temperatures is not None:
            queries = queries * ops.placed(self._temperatures)[:, None].to(queries.dtype)
        return ops.attend_latents(queries, self._part, layer)

    def keep(self, read: Any, layer: int, ops: Ops[Any, Any, Any]) -> Rows:
        """Keeps the rows -> the queries, or what they are made of."""
        return ops.store_latents(ops.product(read, self._first, self._bias), self._part, layer)


def _factors(spec: LatentSpec, weights: WeightSource, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of this rank's heads: keys' [heads, plain, latent] and values' [heads, value, latent],
    never in FP8."""
    parts = (spec.plain_dim, spec.value_dim)
    stored = weights.take_rows(name, (spec.num_heads * sum(parts), spec.kv_rank))
    keys, values = stored.view(-1, sum(parts), spec.kv_rank).split(parts, 1)
    return keys.contiguous(), values.contiguous()


def halves_last(stored: torch.Tensor, spec: LatentSpec) -> torch.Tensor:
    """Rows [.., n, columns] whose last `rotated_dim` are paired as `Rotary` pairs them.

    Queries and cached rows are reordered alike, so that scores stay what they are.
    """
    if not spec.adjacent:
        return stored
    first = stored.shape[-2] - spec.rotated_dim
    plain, rotated = stored[..., :first, :], stored[..., first:, :]
    return torch.cat((plain, rotated[..., 0::2, :], rotated[..., 1::2, :]), -2)
