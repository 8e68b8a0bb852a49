"""The target on a GPU beside a head in training: the fast decoder, whose prompt rows are a batch's texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eyas.engine.attention.device import chunk_tile_rows, row_attention
from eyas.engine.attention.rows import RowLimits
from eyas.engine.batch.rows import ForwardRows
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import FolderWeights, WeightPlacement
from eyas.engine.kernels.products import skinny
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.ops.device_machine import DeviceMachine
from eyas.engine.models.ops.device_step import LayerContext
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import RankInfo
from eyas.train.heads.base import TargetTensors
from eyas.train.packing import PackedBatch, upload
from eyas.train.teacher import PAGE, BatchLimit, TeacherModel, final_gain, first_pages
from kv_transfer.layout import pages_for


class DeviceTeacher(TeacherModel):
    """A teacher on a device: one slot per text, all rows in one forward."""

    def __init__(self, config: ModelConfig, placement: WeightPlacement, room: BatchLimit) -> None:
        device = placement.device
        self._last = room.pages - 1
        self._pages = torch.zeros(room.texts, pages_for(room.length, PAGE), dtype=torch.int32, device=device)
        self._tile = chunk_tile_rows(config)
        shape = PoolShape(config.kv_format, room.pages, PAGE, placement.dtype, device)
        self._pool = KvPool(shape)
        attention = row_attention(self._pages, config.num_heads, shape, RowLimits(1, 1), pdl=False)
        launch = skinny.ProductLaunch.on(device, pdl=False)  # other kernels than the engine's stand between
        context = LayerContext.on(device, config, ProcessGroup(RankInfo(), device), launch, attention)
        folder, names = config.folder, config.spelling
        with FolderWeights(
            folder, names, placement, quantized=config.quantized, fused=config.fused
        ) as weights:
            self._model = Decoder(config, weights, DeviceMachine(context))
            gain = final_gain(config, weights)
        ends = self._model.ends
        super().__init__(config, TargetTensors(ends.embedding, ends.lm_head, gain), placement)

    def close(self) -> None:
        self._pool.close()

    @torch.inference_mode()
    def _run(self, batch: PackedBatch, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        residual, tapped = self._model.forward(self._rows(batch), self._pool, taps)
        return tapped, self._model.final_norm(residual)

    def _rows(self, batch: PackedBatch) -> ForwardRows:
        """Every text a chunk of prompt rows, cut into the attention's tiles; the host waits for nothing."""
        lengths, pages = np.array(batch.lengths), np.array(first_pages(batch.lengths))
        tables = pages[:, None] + np.arange(self._pages.shape[1])  # beyond a text's end: of the next ones
        self._pages[: len(lengths)].copy_(self._int32(np.minimum(tables, self._last)))
        positions = batch.positions.flatten()[batch.places].int()
        return ForwardRows(
            tokens=batch.ids.flatten()[batch.places].int(),
            positions=positions,
            kv_rows=self._int32(np.repeat(pages * PAGE, lengths)) + positions,
            tiles=self._int32(self._tiles(batch.lengths)),
        )

    def _tiles(self, lengths: Sequence[int]) -> np.ndarray:
        """(slot, first row of all, first row of the text, rows) of each: the longest one bounds the rest."""
        tiles, first = [], 0
        for slot, length in enumerate(lengths):
            for i in range(0, length, self._tile):
                tiles.append((slot, first + i, i, min(self._tile, length - i)))
            first += length
        tiles.sort(key=lambda tile: -(tile[2] + tile[3]))
        return np.array(tiles)

    def _int32(self, values: np.ndarray) -> Tensor:
        return upload(torch.from_numpy(values.astype(np.int32)), self._pages.device)
