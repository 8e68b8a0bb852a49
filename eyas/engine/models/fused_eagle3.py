"""EAGLE-3 heads on a GPU: the equations of `eyas.engine.models.eagle3`, whose results are its test."""

from __future__ import annotations

import torch

from eyas.engine.batch.rows import Rows
from eyas.engine.checkpoint.config import DraftConfig
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.kernels import rows as row_kernels
from eyas.engine.kernels import skinny
from eyas.engine.kernels.join import join
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool
from eyas.engine.models.base import Drafted, FinalNorm
from eyas.engine.models.eagle3 import token_map
from eyas.engine.models.fused import TargetEnds, head_product
from eyas.engine.models.fused_layer import Forward, FusedLayer, LayerContext, NarrowRows
from eyas.engine.parallel.shards import config_of_rank


class FusedEagle3Tap:
    """The `FeatureTap` beside the target."""

    def __init__(self, config: DraftConfig, weights: Weights, context: LayerContext) -> None:
        hidden, count = config.decoder.hidden_size, len(config.capture_layers)
        self.layers = config.capture_layers
        self._eps, self._launch = config.decoder.norm_eps, context.launch
        self._fc = weights.take("fc.weight", (hidden, count * hidden))
        self._gains = None
        if "fc_norm.0.weight" in weights:
            self._gains = [weights.take(f"fc_norm.{i}.weight", (hidden,)) for i in range(count)]

    def features(self, tapped: torch.Tensor) -> torch.Tensor:
        """tapped [m, layers * hidden], low to high -> features [m, hidden]."""
        if self._gains is not None:
            pairs = zip(tapped.chunk(len(self._gains), dim=-1), self._gains, strict=True)
            normed = [row_kernels.norm(chunk.contiguous(), self._eps, gain) for chunk, gain in pairs]
            tapped = torch.cat(normed, dim=-1, out=skinny.empty_padded(*tapped.shape, like=tapped))
        if tapped.shape[0] > skinny.MAX_ROWS:
            return torch.mm(tapped, self._fc.t())
        out = skinny.empty_padded(tapped.shape[0], self._fc.shape[0], like=tapped)
        skinny.linear(skinny.Source(tapped), self._fc, out, self._launch)
        return out


class FusedEagle3Draft:
    """The `DraftModel`, wherever drafts are made."""

    def __init__(
        self, config: DraftConfig, weights: Weights, target: TargetEnds, context: LayerContext
    ) -> None:
        """A head without an embedding or an lm_head of its own uses the target's."""
        decoder = config.decoder
        hidden = decoder.hidden_size
        self.kv_format: KvFormat = config_of_rank(decoder, context.group.ranks).kv_format
        self.token_map = token_map(config, weights)
        self._eps = decoder.norm_eps
        self._context = context
        self._embedding, self._lm_head = target.embedding, target.lm_head
        if "embed_tokens.weight" in weights:
            self._embedding = weights.take("embed_tokens.weight", (decoder.vocab_size, hidden))
        if "lm_head.weight" in weights:
            self._lm_head = weights.take_rows("lm_head.weight", (config.draft_vocab_size, hidden))
        names = [f"midlayer.{name}.weight" for name in ("input_layernorm", "hidden_norm")]
        gain = torch.cat([weights.take(name, (hidden,)) for name in names])
        self._layer = FusedLayer(decoder, decoder.layers[0], weights, "midlayer", gain)
        self._gain = weights.take("norm.weight", (hidden,))

    def forward(self, features: torch.Tensor, tokens: torch.Tensor, rows: Rows, pool: KvPool) -> Drafted:
        """features [m, hidden] joined with tokens int32 [m]; rows are [m, hidden], before the head's norm."""
        step, pdl = Forward(rows, self._context), self._context.launch.pdl
        joined = join(tokens, self._embedding, features, self._eps, pdl)
        if rows.count <= self._layer.narrow_rows:
            x = self._layer.narrow(skinny.Source(joined), NarrowRows(features), pool.layer(0), step).x
        else:
            x = self._layer.wide(joined, features.clone(), pool.layer(0), step).settled(self._eps, pdl)
        return Drafted(x, x)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """`Drafted.rows`, all or some [n, hidden] -> float32 [n, draft vocab]."""
        normed = row_kernels.norm(rows, self._eps, self._gain, pdl=self._context.launch.pdl)
        return head_product(normed, self._lm_head, self._context)


def load_tap(config: DraftConfig, weights: Weights, _: FinalNorm, context: LayerContext) -> FusedEagle3Tap:
    """Takes the tap's tensors from `weights`; it taps before any norm."""
    return FusedEagle3Tap(config, weights, context)


def load_draft(
    config: DraftConfig, weights: Weights, target: TargetEnds, context: LayerContext
) -> FusedEagle3Draft:
    """Takes the head's tensors from `weights`; what it lacks of embedding and lm_head is the target's."""
    return FusedEagle3Draft(config, weights, target, context)
