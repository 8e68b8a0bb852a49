"""MTP heads on a GPU: the equations of `eyas.engine.models.mtp`, whose results are its test."""

from __future__ import annotations

import torch

from eyas.engine.batch.rows import Rows
from eyas.engine.checkpoint.config import DraftConfig
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.kernels import rows as row_kernels
from eyas.engine.kernels import skinny
from eyas.engine.kernels.join import join
from eyas.engine.kv.pool import KvPool
from eyas.engine.models.base import Drafted, FinalNorm
from eyas.engine.models.fused import FusedEnds, head_product
from eyas.engine.models.fused_layer import FusedLayer
from eyas.engine.models.fused_residual import NarrowRows, source_of
from eyas.engine.models.fused_step import Forward, LayerContext, load_gain
from eyas.engine.models.head_parts import LastHiddenTap
from eyas.engine.models.mtp import dialect_of


class FusedMtpDraft:
    """The `DraftModel`, wherever drafts are made."""

    token_map: torch.Tensor | None = None

    def __init__(self, config: DraftConfig, weights: Weights, ends: FusedEnds, context: LayerContext) -> None:
        """`ends`: the target's. Every rank joins whole rows."""
        decoder, prefix = config.decoder, config.prefixes[0].removesuffix(".")
        dialect = dialect_of(prefix)
        hidden = decoder.hidden_size

        def gain(name: str) -> torch.Tensor:
            return load_gain(decoder, weights, f"{prefix}.{name}.weight", hidden)

        self._eps = decoder.norm_eps
        self._context = context
        self._embedding, self._lm_head = ends.embedding, ends.lm_head
        self._first_is_blank = dialect.first_is_blank
        halves = weights.take(f"{prefix}.{dialect.join}.weight", (hidden, 2 * hidden)).split(hidden, dim=1)
        if dialect.feature_first:  # the kernel puts tokens first
            halves = halves[::-1]
        gains = torch.cat([gain(dialect.token_norm), gain(dialect.feature_norm)])
        self._join = torch.cat(halves, dim=1).mul_(gains)
        spec = decoder.layers[0]
        self._layer = FusedLayer(decoder, spec, weights, prefix, gain(spec.norms.before_attention))
        self._gain = gain(dialect.final_norm)

    def forward(self, features: torch.Tensor, tokens: torch.Tensor, rows: Rows, pool: KvPool) -> Drafted:
        """features [m, hidden] joined with tokens int32 [m]; rows are [m, hidden], after the head's norm."""
        step, pdl = Forward(rows, self._context), self._context.launch.pdl
        blank = rows.positions if self._first_is_blank else None
        joined = join(tokens, self._embedding, features, self._eps, pdl, blank)
        run = self._narrow if rows.count <= self._layer.narrow_rows else self._wide
        x = row_kernels.norm(run(joined, pool, step), self._eps, self._gain, pdl=pdl)
        return Drafted(x, x)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """`Drafted.rows`, all or some [n, hidden] -> float32 [n, vocab]."""
        return head_product(rows, self._lm_head, self._context)

    def _narrow(self, joined: torch.Tensor, pool: KvPool, step: Forward) -> torch.Tensor:
        source, launch = skinny.Source(joined), self._context.launch
        parts = skinny.linear_parts(source, self._join, launch)
        sums = torch.empty(parts, skinny.MAX_ROWS, dtype=torch.float32, device=joined.device)
        x = skinny.empty_padded(joined.shape[0], self._join.shape[0], like=joined)
        skinny.linear(source, self._join, x, launch, sums=sums)
        residual = NarrowRows(x, sums)
        return self._layer.narrow(source_of(residual, self._eps), residual, pool.layer(0), step).x

    def _wide(self, joined: torch.Tensor, pool: KvPool, step: Forward) -> torch.Tensor:
        pdl = self._context.launch.pdl
        x = torch.mm(joined, self._join.t())
        normed = row_kernels.normed(x, self._layer.norm, pdl)
        return self._layer.wide(normed, x, pool.layer(0), step).settled(self._eps, pdl)


def load_tap(config: DraftConfig, _: Weights, final_norm: FinalNorm, __: LayerContext) -> LastHiddenTap:
    """The half beside the target, whose `final_norm` the feature has passed."""
    return LastHiddenTap(config, final_norm)


def load_draft(
    config: DraftConfig, weights: Weights, ends: FusedEnds, context: LayerContext
) -> FusedMtpDraft:
    """Takes the head's tensors from `weights`; embedding and lm_head are in `ends`."""
    return FusedMtpDraft(config, weights, ends, context)
