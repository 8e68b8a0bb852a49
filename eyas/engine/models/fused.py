"""Any decoder on a GPU: what `eyas.engine.models.decoder` computes is its test.

A layer is `eyas.engine.models.layer`'s; here are the embedding, the way through all layers, and the
output head. It knows specifications, never families; where a step's rows come from is `eyas.engine.device`'s
business, how they attend is the attention's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from eyas.engine.batch.rows import ForwardRows
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products import skinny
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.norm import load_gain
from eyas.engine.models.blocks import Blocks
from eyas.engine.models.fused_step import Forward, LayerContext, product_float32
from eyas.engine.models.layer import load_layers, run_layers
from eyas.engine.models.ops.device import DeviceOps
from eyas.engine.models.ops.device_machine import DeviceMachine
from eyas.engine.models.ops.exact_rows import ExactRows
from eyas.engine.models.ops.few_rows import FewRows, most_rows
from eyas.engine.models.ops.many_rows import ManyRows
from eyas.engine.models.unread import check_layers, check_tied
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.shards import config_of_rank


@dataclass(frozen=True)
class FusedEnds:
    """A model's embedding [vocab, hidden] and a rank's rows of its output head; draft heads share them."""

    embedding: torch.Tensor
    lm_head: torch.Tensor

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource) -> FusedEnds:
        """Takes both ends, whole, from `weights`; a tied head is the embedding itself."""
        check_tied(config, weights)
        shape = (config.vocab_size, config.hidden_size)
        embedding = weights.take("model.embed_tokens.weight", shape)
        return cls(embedding, embedding if config.tied_head else weights.take("lm_head.weight", shape))

    def limited_to(self, ids: tuple[int, ...], group: ProcessGroup) -> FusedEnds:
        """With a rank's share of those rows of the output head alone, in this order; (): of all."""
        if not ids:
            return self
        return FusedEnds(self.embedding, group.share_of_rows(self.lm_head, ids))


class FusedDecoder:
    """A `DeviceModel`: a decoder on one GPU, or one rank's share of it.

    `lm_head`: its rows of the vocabulary. `few_rows`: of how many rows, at most, a forward goes through its
    layers by `FewRows`. Raises ValueError for what the exact arithmetic cannot compute yet, if the
    context asks for it.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, context: LayerContext) -> None:
        self.config = config
        self.kv_format: KvFormat = config_of_rank(config, context.group.ranks).kv_format
        self._context = context
        check_tied(config, weights)
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = weights.take("model.embed_tokens.weight", shape)
        self.lm_head = context.group.rows_of(self.embedding)
        if not config.tied_head:
            self.lm_head = weights.take_rows("lm_head.weight", shape)
        self.layers = load_layers(Blocks(config, weights, DeviceMachine()))
        self.few_rows = most_rows(self.layers, exact=context.launch.exact)
        self._gain = load_gain(config, weights, "model.norm.weight", config.hidden_size)
        check_layers(config, weights)

    def forward(
        self, rows: ForwardRows, pool: KvPool, taps: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs m rows and writes their KV.

        Returns the residual rows leaving the last layer [m, hidden], and [m, len(taps) * hidden]: the rows
        entering each tapped layer (past the last: leaving it).
        """
        step = Forward.of(rows, self._context)
        tapped = skinny.empty_padded(rows.count, len(taps), self.config.hidden_size, like=self.embedding)
        way = FewRows if rows.count <= self.few_rows else ExactRows if step.context.launch.exact else ManyRows
        ops: DeviceOps[Any, Any] = way(step, pool, self.config.norm_eps)
        entering = partial(self._keep, tapped, taps)
        # No name for the embedded rows: their memory is free for the layers behind the first.
        x = run_layers(self.layers, ops, ops.embed(self.embedding, self.config.embedding_scale), entering)
        return x, tapped.view(rows.count, -1)

    @property
    def ends(self) -> FusedEnds:
        """What draft heads without their own draft with."""
        return FusedEnds(self.embedding, self.lm_head)

    def final_norm(self, residual: torch.Tensor) -> torch.Tensor:
        """Residual rows [m, hidden] that left the last layer -> what the output head reads."""
        exact = self._context.launch.exact
        return row_kernels.norm(residual, self.config.norm_eps, self._gain, pdl=self._pdl, exact=exact)

    def logits(
        self,
        residual: torch.Tensor,
        picked: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows as `forward` gave them, all or those `picked` (int32 [n]) -> float32 [n, vocab], in `out`."""
        if picked is not None:
            residual = row_kernels.gather_rows(residual, picked, pdl=self._pdl)
        logits = head_product(self.final_norm(residual), self.lm_head, self._context, out)
        if cap := self.config.logit_soft_cap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    @property
    def _pdl(self) -> bool:
        return self._context.launch.pdl

    def _keep(self, tapped: torch.Tensor, taps: tuple[int, ...], layer: int, x: torch.Tensor) -> None:
        for place, wanted in enumerate(taps):
            if wanted == layer:
                row_kernels.put_rows(x, tapped, place, self._pdl)


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
    product_float32(x, weight, own, context.launch)
    return context.group.all_gather_columns(own, out)
