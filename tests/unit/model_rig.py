"""A model, a pool and page tables on scattered pages: what tests of the model layer share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from eyas.engine.adapters.reader import AdapterReader
from eyas.engine.attention.forward import build_batch, rows_of_adapters
from eyas.engine.attention.torch_heads import torch_attention
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import FolderWeights
from eyas.engine.formats.adapted import Adapted
from eyas.engine.kv.groups import page_layers
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.layers.adapted import PlainAdapters
from eyas.engine.models.base import Drafted
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.heads import head_family, head_spelling, read_head
from eyas.engine.models.ops.torch_ops import TorchMachine
from eyas.engine.models.table import read_model


class Rig:
    """A target over a pool of `pages` pages of `page_size` rows, filled with NaN: rows never written show.

    `config`: instead of what the folder says. `grouped`: each group of layers has pages of its own.
    `adapted`: slots of adapters.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig | None = None,
        pages: int = 256,
        page_size: int = 16,
        *,
        grouped: bool = False,
        adapted: int = 0,
    ) -> None:
        torch.set_num_threads(1)  # many test processes share the cores
        self.config = config or read_model(folder)
        shape = pool_shape(self.config, pages, page_size)
        if grouped:
            groups = self.config.kv_groups
            shape = replace(shape, format=replace(shape.format, layers=page_layers(groups)), groups=groups)
        self.pool = KvPool(shape)
        self.pool.tensor.fill_(float("nan"))
        self.backend = torch_attention(self.config, shape)
        known = self.config
        with FolderWeights(folder, known.spelling, quantized=known.quantized, fused=known.fused) as weights:
            machine = TorchMachine(self.config, self.backend, adapted=Adapted.of(adapted, experts=True))
            self.model = Decoder(self.config, weights, machine)
        reader = AdapterReader(self.config, 64)
        self.adapters = PlainAdapters(reader, self.model.projections, adapted) if adapted else None
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(7))
        self._free = order.tolist()

    def table(self, rows: int) -> list[int]:
        """A page table for `rows` logical rows, on pages of no other sequence."""
        count = -(-rows // self.pool.page_size)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def fill(self, slot: int, adapter: Path) -> None:
        """Fills a slot with the adapter in a folder."""
        assert self.adapters is not None
        self.adapters.fill(slot, self.adapters.read(adapter))

    def forward(
        self, spans: Sequence[QuerySpan], tokens: Sequence[int], capture: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch = build_batch(spans, tokens, self.pool.page_size, self.backend)
        return self.model.forward(batch, self.pool, capture)

    def logits(self, spans: Sequence[QuerySpan], tokens: Sequence[int]) -> torch.Tensor:
        adapters = rows_of_adapters(spans, "cpu")
        return self.model.logits(self.forward(spans, tokens)[0], adapters=adapters)


class HeadRig:
    """A draft head, of any kind, for a rig's target, with a pool of its own."""

    def __init__(self, folder: Path, target: Rig, capture_layers: tuple[int, ...] = ()) -> None:
        self.config = read_head(folder, target.config, capture_layers=capture_layers)
        shape = PoolShape(self.config.pool_format(16), 256, 16)
        self.pool = KvPool(shape)
        self.backend = torch_attention(self.config.decoder, shape)
        kind = head_family(self.config.algorithm)
        decoder = self.config.decoder
        with FolderWeights(
            folder, head_spelling(self.config), quantized=decoder.quantized, fused=decoder.fused
        ) as weights:
            machine = TorchMachine(self.config.decoder, self.backend)
            self.capture = kind.load_tap(self.config, weights, target.model.final_norm, machine)
            self.head = kind.load_draft(self.config, weights, target.model.ends, machine)

    def drafted(
        self, features: torch.Tensor, spans: Sequence[QuerySpan], tokens: Sequence[int], depth: int = 0
    ) -> Drafted:
        batch = build_batch(spans, tokens, self.pool.page_size, self.backend, depth)
        return self.head.forward(features, batch.tokens, batch, self.pool)

    def forward(
        self, features: torch.Tensor, spans: Sequence[QuerySpan], tokens: Sequence[int]
    ) -> torch.Tensor:
        return self.drafted(features, spans, tokens).rows


def pool_shape(config: ModelConfig, pages: int, page_size: int) -> PoolShape:
    return PoolShape(config.kv_format, pages, page_size)
