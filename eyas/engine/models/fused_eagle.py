"""EAGLE-1/2 heads on a GPU: the equations of `eyas.engine.models.eagle`, whose results are its test."""

from __future__ import annotations

import torch

from eyas.engine.batch.rows import ForwardRows
from eyas.engine.checkpoint.config import DraftConfig
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.kernels.drafts.join import join
from eyas.engine.kv.pool import KvPool
from eyas.engine.models.base import Drafted, FinalNorm
from eyas.engine.models.eagle import fc_tensors
from eyas.engine.models.fused import FusedEnds, head_product
from eyas.engine.models.fused_head import HeadLayers, product
from eyas.engine.models.fused_step import Forward, LayerContext
from eyas.engine.models.head_parts import LastHiddenTap, token_embedding


class FusedEagleDraft:
    """The `DraftModel`, wherever drafts are made."""

    def __init__(
        self, config: DraftConfig, weights: WeightSource, ends: FusedEnds, context: LayerContext
    ) -> None:
        """`ends` are the target's, whose embedding is used if the head has none."""
        self.token_map = None
        self._context = context
        self._embedding = token_embedding(config, weights, ends.embedding)
        self._lm_head = ends.lm_head
        self._fc, self._bias = fc_tensors(config, weights)
        self._layers = HeadLayers(config.decoder, weights, gain=None)

    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, rows: ForwardRows, pool: KvPool
    ) -> Drafted:
        """features [m, hidden] joined with tokens int32 [m]; rows are the next features, [m, hidden]."""
        x = self._entering(features, tokens)
        x = self._layers(x, x, pool, Forward.of(rows, self._context))
        return Drafted(x, x)

    def keep(self, features: torch.Tensor, tokens: torch.Tensor, rows: ForwardRows, pool: KvPool) -> None:
        """As of `DeviceDraft`."""
        x = self._entering(features, tokens)
        self._layers.keep(x, x, pool, Forward(rows, self._context))

    def _entering(self, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        launch = self._context.launch
        joined = join(tokens, self._embedding, features, None, launch.pdl)
        return product(joined, self._fc, launch, self._bias)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """`Drafted.rows`, all or some [n, hidden] -> float32 [n, vocab]."""
        return head_product(rows, self._lm_head, self._context)


def load_tap(config: DraftConfig, _: WeightSource, final_norm: FinalNorm, __: LayerContext) -> LastHiddenTap:
    """The half beside the target, which has no tensors of its own."""
    return LastHiddenTap(config, final_norm)


def load_draft(
    config: DraftConfig, weights: WeightSource, ends: FusedEnds, context: LayerContext
) -> FusedEagleDraft:
    """Takes the head's tensors from `weights`; its lm_head is the target's."""
    return FusedEagleDraft(config, weights, ends, context)
