"""MTP heads on a GPU: the equations of `eyas.engine.models.mtp`, whose results are its test.

There it says how several layers' rows lie.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from eyas.engine.batch.rows import ForwardRows
from eyas.engine.checkpoint.config import DraftConfig
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.kernels.drafts import newest
from eyas.engine.kernels.drafts.join import join
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.norm import load_gain
from eyas.engine.models.base import Drafted, FinalNorm
from eyas.engine.models.blocks import Blocks
from eyas.engine.models.fused import FusedEnds, head_product
from eyas.engine.models.fused_head import ops_of
from eyas.engine.models.fused_step import Forward, LayerContext
from eyas.engine.models.head_parts import LastHiddenTap
from eyas.engine.models.layer import load_layer
from eyas.engine.models.mtp_names import dialect_of
from eyas.engine.models.ops.device import DeviceOps
from eyas.engine.models.ops.device_machine import DeviceMachine
from eyas.engine.models.ops.few_rows import most_rows


class FusedMtpLayer:
    """One of the head's layers, over the pool's layer of the same number. Every rank joins whole rows."""

    def __init__(
        self, config: DraftConfig, stage: int, weights: WeightSource, ends: FusedEnds, context: LayerContext
    ) -> None:
        decoder, prefix = config.decoder, config.prefixes[stage].removesuffix(".")
        hidden, dialect = decoder.hidden_size, dialect_of(prefix)

        def gain(name: str) -> torch.Tensor:
            return load_gain(decoder, weights, f"{prefix}.{name}.weight", hidden)

        self._eps = decoder.norm_eps
        self._stage, self._context, self._embedding = stage, context, ends.embedding
        self._first_is_blank = dialect.first_is_blank
        halves = weights.take(f"{prefix}.{dialect.join}.weight", (hidden, 2 * hidden)).split(hidden, dim=1)
        if dialect.feature_first:  # the kernel puts tokens first
            halves = halves[::-1]
        gains = torch.cat([gain(dialect.token_norm), gain(dialect.feature_norm)])
        self._join = torch.cat(halves, dim=1).mul_(gains)
        self._layer = load_layer(Blocks(decoder, weights, DeviceMachine()), stage, prefix)
        self._few_rows = most_rows([self._layer])
        self._gain = gain(dialect.final_norm)
        self._unseen = self._layer.spec.attention.unseen

    def __call__(
        self, features: torch.Tensor, tokens: torch.Tensor, rows: ForwardRows, pool: KvPool
    ) -> torch.Tensor:
        """features [m, hidden] joined with tokens int32 [m] -> [m, hidden], after the layer's norm."""
        joined = self._entering(features, tokens, rows)
        ops = self._ops(Forward.of(self._bounded(rows), self._context), pool)
        read, residual = ops.norm(ops.joined(joined, self._join), self._layer.norm)
        x = ops.leave(self._layer(read, residual, self._stage, ops))
        return row_kernels.norm(x, self._eps, self._gain, pdl=self._context.launch.pdl)

    def keep(self, features: torch.Tensor, tokens: torch.Tensor, rows: ForwardRows, pool: KvPool) -> None:
        """As of `DeviceDraft`."""
        joined = self._entering(features, tokens, rows)
        ops = self._ops(Forward(self._bounded(rows), self._context), pool)
        self._layer.keep(ops.norm(ops.joined(joined, self._join), self._layer.norm)[0], self._stage, ops)

    def _ops(self, step: Forward, pool: KvPool) -> DeviceOps[Any, Any]:
        return ops_of(step, pool, self._few_rows, self._eps)

    def _entering(self, features: torch.Tensor, tokens: torch.Tensor, rows: ForwardRows) -> torch.Tensor:
        """Both rows joined and normed, [m, 2 * hidden]."""
        blank = None
        if self._first_is_blank:
            blank = rows.positions - self._stage if self._stage else rows.positions
        return join(tokens, self._embedding, features, self._eps, self._context.launch.pdl, blank)

    def _bounded(self, rows: ForwardRows) -> ForwardRows:
        """Rows that are none in this layer are not seen."""
        if not self._unseen:
            return rows
        firsts = rows.firsts
        if firsts is None:
            firsts = torch.zeros_like(self._context.attention.tables[:, 0])
        return replace(rows, firsts=firsts + self._unseen)


class FusedMtpDraft:
    """The `DraftModel`, wherever drafts are made. A row's features are those that its layers gave, side by
    side.
    """

    token_map: torch.Tensor | None = None

    def __init__(
        self, config: DraftConfig, weights: WeightSource, ends: FusedEnds, context: LayerContext
    ) -> None:
        """`ends`: the target's."""
        stages = range(config.stages)
        self._layers = [FusedMtpLayer(config, stage, weights, ends, context) for stage in stages]
        self._context, self._lm_head = context, ends.lm_head

    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, rows: ForwardRows, pool: KvPool
    ) -> Drafted:
        """features [m, hidden] joined with tokens int32 [m]: through all layers.

        Below certain rows, features [m, layers * hidden]: through the layers that draft so deep or deeper.
        Rows are [m, hidden], after the last norm of the first layer that they went through.
        """
        last = len(self._layers) - 1
        if not last:
            x = self._layers[0](features, tokens, rows, pool)
            return Drafted(x, x)
        first = min(rows.depth, last)
        made = self._below if rows.depth else self._certain
        gave = made(features, tokens, rows, pool)
        return Drafted(gave[:, first].contiguous(), gave.flatten(1))

    def keep(self, features: torch.Tensor, tokens: torch.Tensor, rows: ForwardRows, pool: KvPool) -> None:
        """As of `DeviceDraft`. Of several layers each reads what the one before it gave: all are run."""
        if len(self._layers) == 1:
            self._layers[0].keep(features, tokens, rows, pool)
        else:
            self.forward(features, tokens, rows, pool)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """`Drafted.rows`, all or some [n, hidden] -> float32 [n, vocab]."""
        return head_product(rows, self._lm_head, self._context)

    def _certain(
        self, features: torch.Tensor, tokens: torch.Tensor, rows: ForwardRows, pool: KvPool
    ) -> torch.Tensor:
        """What each layer gave, [m, layers, hidden]; for all but the last its pages' newest rows' is kept."""
        pdl, stages = self._context.launch.pdl, len(self._layers) - 1
        source = newest.sources(rows, self._context.attention.tables, pool.page_size)
        kept = pool.behind(stages + 1, stages, features.shape[1])
        x = self._layers[0](features, tokens, rows, pool)
        gave = [x]
        for stage, layer in enumerate(self._layers[1:]):
            x = layer(newest.before(x, source, kept, stage, pdl), tokens, rows, pool)
            gave.append(x)
        both = torch.stack(gave, 1)
        newest.keep(both[:, :stages].contiguous(), rows.kv_rows, kept, pool.page_size, pdl)
        return both

    def _below(
        self, features: torch.Tensor, tokens: torch.Tensor, rows: ForwardRows, pool: KvPool
    ) -> torch.Tensor:
        """The same, anything for the layers that were left out."""
        gave = list(features.unflatten(1, (len(self._layers), -1)).unbind(1))
        last = len(self._layers) - 1
        first = min(rows.depth, last)
        fed = gave[-1:] if rows.depth > last else gave[first - 1 :]
        for stage, entering in zip(range(first, last + 1), fed, strict=False):
            gave[stage] = self._layers[stage](entering.contiguous(), tokens, rows, pool)
        return torch.stack(gave, 1)


def load_tap(config: DraftConfig, _: WeightSource, final_norm: FinalNorm, __: LayerContext) -> LastHiddenTap:
    """The half beside the target, whose `final_norm` the feature has passed."""
    return LastHiddenTap(config, final_norm)


def load_draft(
    config: DraftConfig, weights: WeightSource, ends: FusedEnds, context: LayerContext
) -> FusedMtpDraft:
    """Takes the head's tensors from `weights`; embedding and lm_head are in `ends`."""
    return FusedMtpDraft(config, weights, ends, context)
