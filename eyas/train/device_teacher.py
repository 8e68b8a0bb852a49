"""The target on a GPU beside a head in training: the fast decoder, whose prompt rows are a batch's texts."""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.engine.attention.rows import Most, PagedAttention
from eyas.engine.batch.rows import Rows
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import FolderWeights, Placement
from eyas.engine.kernels import skinny
from eyas.engine.kernels.prefill import tile_rows
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.models.fused import FusedDecoder
from eyas.engine.models.fused_layer import LayerContext
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import RankInfo
from eyas.train.heads.base import Ends
from eyas.train.teacher import PAGE, Room, Teacher, final_gain, spans_of
from kv_transfer.layout import pages_for


class DeviceTeacher(Teacher):
    """One slot per text, all rows in one forward."""

    def __init__(self, config: ModelConfig, placement: Placement, room: Room) -> None:
        device = placement.device
        shape = PoolShape(config.kv_format, room.pages, PAGE, placement.dtype, device)
        self._pool = KvPool(shape)
        self._pages = torch.zeros(room.texts, pages_for(room.length, PAGE), dtype=torch.int32, device=device)
        self._tile = tile_rows(config.num_heads, config.num_kv_heads)
        pdl = device != "cpu"
        attention = PagedAttention(self._pages, config.num_heads, shape, Most(1, 1), pdl=pdl)
        launch = skinny.Launch.on(device, pdl=pdl)
        context = LayerContext.on(device, config, ProcessGroup(RankInfo(), device), launch, attention)
        with FolderWeights(config.folder, config.spelling, placement) as weights:
            self._model = FusedDecoder(config, weights, context)
            gain = final_gain(config, weights)
        super().__init__(config, Ends(self._model.embedding, self._model.lm_head, gain), placement)

    @torch.inference_mode()
    def _run(self, pieces: list[list[int]], taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        residual, tapped = self._model.forward(self._rows(pieces), self._pool, taps)
        return tapped, self._model.final_norm(residual)

    def _rows(self, pieces: list[list[int]]) -> Rows:
        """Every text a chunk of prompt rows, cut into the attention's tiles."""
        positions: list[int] = []
        kv_rows: list[int] = []
        tiles: list[tuple[int, int, int, int]] = []
        tables = torch.zeros(len(pieces), self._pages.shape[1], dtype=torch.int32)
        first = 0
        for slot, span in enumerate(spans_of(pieces)):
            tables[slot, : len(span.pages)] = torch.tensor(span.pages, dtype=torch.int32)
            positions += range(span.count)
            start = span.pages[0] * PAGE
            kv_rows += range(start, start + span.count)
            for i in range(0, span.count, self._tile):
                tiles.append((slot, first + i, i, min(self._tile, span.count - i)))
            first += span.count
        tiles.sort(key=lambda tile: -(tile[2] + tile[3]))  # the longest first: they bound the kernel
        self._pages[: len(pieces)].copy_(tables)
        return Rows(
            tokens=self._int32([token for piece in pieces for token in piece]),
            positions=self._int32(positions),
            kv_rows=self._int32(kv_rows),
            tiles=self._int32(tiles),
        )

    def _int32(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._pages.device)
