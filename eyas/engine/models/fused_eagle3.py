"""EAGLE-3 heads on a GPU: the equations of `eyas.engine.models.eagle3`, whose results are its test."""

from __future__ import annotations

import torch

from eyas.engine.batch.rows import Rows
from eyas.engine.checkpoint.config import DraftConfig
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.kernels import rows as row_kernels
from eyas.engine.kernels import skinny
from eyas.engine.kernels.join import join
from eyas.engine.kv.pool import KvPool
from eyas.engine.models.eagle3 import token_map
from eyas.engine.models.fused import Forward, FusedLayer, FusedLlama, LayerContext, head_product


class FusedEagle3:
    """Both halves of a head: `features` beside the target, the rest wherever drafts are made."""

    def __init__(
        self, config: DraftConfig, weights: Weights, target: FusedLlama, context: LayerContext
    ) -> None:
        decoder = config.decoder
        hidden, count = decoder.hidden_size, len(config.capture_layers)
        self.config = config
        self.capture_layers = config.capture_layers
        self.token_map = token_map(config, weights)
        self._context = context
        self._fc = weights.take("fc.weight", (hidden, count * hidden))
        self._fc_gains = None
        if "fc_norm.0.weight" in weights:
            self._fc_gains = [weights.take(f"fc_norm.{i}.weight", (hidden,)) for i in range(count)]
        self._embedding, self._lm_head = target.embedding, target.lm_head
        if "embed_tokens.weight" in weights:
            self._embedding = weights.take("embed_tokens.weight", (decoder.vocab_size, hidden))
        if "lm_head.weight" in weights:
            self._lm_head = weights.take_rows("lm_head.weight", (config.draft_vocab_size, hidden))
        self._layer = FusedLayer(decoder, weights, "midlayer", width=2 * hidden)
        gains = [
            weights.take(f"midlayer.{name}.weight", (hidden,)) for name in ("input_layernorm", "hidden_norm")
        ]
        self._layer.qkv.mul_(torch.cat(gains))
        self._gain = weights.take("norm.weight", (hidden,))

    def features(self, captured: torch.Tensor) -> torch.Tensor:
        """captured [m, layers * hidden], low to high -> features [m, hidden]."""
        if self._fc_gains is not None:
            eps, chunks = self.config.decoder.norm_eps, captured.chunk(len(self._fc_gains), dim=-1)
            normed = [
                row_kernels.norm(c.contiguous(), eps, g) for c, g in zip(chunks, self._fc_gains, strict=True)
            ]
            captured = torch.cat(normed, dim=-1, out=skinny.empty_padded(*captured.shape, like=captured))
        return self._product(captured, self._fc)

    def forward(self, features: torch.Tensor, tokens: torch.Tensor, rows: Rows, pool: KvPool) -> torch.Tensor:
        """features [m, hidden] joined with tokens int32 [m] -> hidden [m, hidden], before the head's norm."""
        eps, step = self.config.decoder.norm_eps, Forward(rows, self._context)
        joined = join(tokens, self._embedding, features, eps, self._context.launch.pdl)
        if rows.count <= skinny.MAX_ROWS and self._layer.plain:
            return self._layer.narrow(skinny.Source(joined), features, pool.layer(0), step).x
        x = features.clone()
        added = self._layer.wide(joined, x, pool.layer(0), step)
        return x.add_(added)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden] as `forward` gave it -> float32 [n, draft vocab]."""
        eps, pdl = self.config.decoder.norm_eps, self._context.launch.pdl
        normed = row_kernels.norm(hidden, eps, self._gain, pdl=pdl)
        return head_product(normed, self._lm_head, self._context)

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > skinny.MAX_ROWS:
            return torch.mm(x, weight.t())
        out = skinny.empty_padded(x.shape[0], weight.shape[0], like=x)
        skinny.linear(skinny.Source(x), weight, out, self._context.launch)
        return out
