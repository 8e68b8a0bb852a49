"""EAGLE-3 heads on a GPU: the equations of `eyas.engine.models.eagle3`, whose results are its test."""

from __future__ import annotations

import torch

from eyas.engine.batch.rows import ForwardRows
from eyas.engine.checkpoint.config import DraftConfig
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.kernels.drafts.join import join
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products import skinny
from eyas.engine.kv.pool import KvPool
from eyas.engine.models.base import Drafted, FeatureTap, FinalNorm
from eyas.engine.models.eagle3 import fc_norms, feature_gains, token_map
from eyas.engine.models.fused import FusedEnds, head_product
from eyas.engine.models.fused_head import HeadLayers, product
from eyas.engine.models.fused_step import Forward, LayerContext
from eyas.engine.models.head_parts import LastHiddenTap, token_embedding


class FusedEagle3Tap:
    """The `FeatureTap` beside the target."""

    def __init__(self, config: DraftConfig, weights: WeightSource, context: LayerContext) -> None:
        names, width = fc_norms(config, weights), config.captured_width
        self.layers = config.capture_layers
        self._eps, self._launch = config.decoder.norm_eps, context.launch
        self._fc = weights.take("fc.weight", (config.decoder.hidden_size, width))
        self._gains = [weights.take(name, (width // len(names),)) for name in names]

    def features(self, tapped: torch.Tensor) -> torch.Tensor:
        """tapped [m, layers * target's hidden], low to high -> features [m, hidden]."""
        if self._gains:
            pairs = zip(tapped.chunk(len(self._gains), dim=-1), self._gains, strict=True)
            normed = [row_kernels.norm(chunk.contiguous(), self._eps, gain) for chunk, gain in pairs]
            tapped = torch.cat(normed, dim=-1, out=skinny.empty_padded(*tapped.shape, like=tapped))
        return product(tapped, self._fc, self._launch)


class FusedEagle3Draft:
    """The `DraftModel`, wherever drafts are made."""

    def __init__(
        self, config: DraftConfig, weights: WeightSource, ends: FusedEnds, context: LayerContext
    ) -> None:
        """`ends` are the target's; a head with an embedding or an lm_head of its own uses that instead."""
        decoder = config.decoder
        hidden = decoder.hidden_size
        self.token_map = token_map(config, weights)
        self._eps, self._variants = decoder.norm_eps, config.variants
        self._context = context
        self._embedding = token_embedding(config, weights, ends.embedding)
        self._lm_head = ends.lm_head
        if "lm_head.weight" in weights:
            self._lm_head = weights.take_rows("lm_head.weight", (config.draft_vocab_size, hidden))
        gains = feature_gains(config, weights)
        self._feature_gain = gains[1]
        self._layers = HeadLayers(decoder, weights, torch.cat(gains))
        self._gain = weights.take("norm.weight", (hidden,))

    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, rows: ForwardRows, pool: KvPool
    ) -> Drafted:
        """features [m, hidden] joined with tokens int32 [m]; rows are [m, hidden], before the head's norm, or
        with `norm_output` after it.
        """
        joined, residual = self._entering(features, tokens)
        x = self._layers(joined, residual, pool, Forward.of(rows, self._context))
        if "norm_output" in self._variants:
            x = self._normed(x)
        return Drafted(x, x)

    def keep(self, features: torch.Tensor, tokens: torch.Tensor, rows: ForwardRows, pool: KvPool) -> None:
        """As of `DeviceDraft`."""
        self._layers.keep(*self._entering(features, tokens), pool, Forward(rows, self._context))

    def _entering(self, features: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the first layer's attention reads [m, 2 * hidden], and the residual [m, hidden]."""
        pdl, residual = self._context.launch.pdl, features
        joined = join(tokens, self._embedding, features, self._eps, pdl)
        if "norm_before_residual" in self._variants:
            residual = row_kernels.norm(features, self._eps, self._feature_gain, pdl=pdl)
        return joined, residual

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """`Drafted.rows`, all or some [n, hidden] -> float32 [n, draft vocab]."""
        normed = rows if "norm_output" in self._variants else self._normed(rows)
        return head_product(normed, self._lm_head, self._context)

    def _normed(self, rows: torch.Tensor) -> torch.Tensor:
        return row_kernels.norm(rows, self._eps, self._gain, pdl=self._context.launch.pdl)


def load_tap(
    config: DraftConfig, weights: WeightSource, final_norm: FinalNorm, context: LayerContext
) -> FeatureTap:
    """Takes the tap's tensors from `weights`. Captured layers are tapped before any norm, the last hidden
    state after `final_norm`.
    """
    if "last_hidden" in config.variants:
        return LastHiddenTap(config, final_norm)
    return FusedEagle3Tap(config, weights, context)


def load_draft(
    config: DraftConfig, weights: WeightSource, ends: FusedEnds, context: LayerContext
) -> FusedEagle3Draft:
    """Takes the head's tensors from `weights`; what it lacks of embedding and lm_head is in `ends`."""
    return FusedEagle3Draft(config, weights, ends, context)
