"""The target on a CPU beside a head in training: the plain decoder, whose spans are a batch's texts."""

from __future__ import annotations

from torch import Tensor

from eyas.engine.attention.forward import build_batch
from eyas.engine.attention.torch_heads import torch_attention
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import FolderWeights, WeightPlacement
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.ops.torch_ops import TorchMachine
from eyas.train.heads.base import SharedTensors
from eyas.train.packing import PackedBatch
from eyas.train.teacher import PAGE, BatchLimit, TeacherModel, final_gain, first_pages
from kv_transfer.layout import pages_for


class PlainTeacher(TeacherModel):
    """The plain decoder."""

    def __init__(self, config: ModelConfig, placement: WeightPlacement, room: BatchLimit) -> None:
        shape = PoolShape(config.kv_format, room.pages, PAGE, placement.dtype, placement.device)
        self._pool, self._backend = KvPool(shape), torch_attention(config, shape)
        folder, names = config.folder, config.spelling
        with FolderWeights(
            folder, names, placement, quantized=config.quantized, fused=config.fused
        ) as weights:
            self._model = Decoder(config, weights, TorchMachine(config, self._backend))
            # The decoder packs its output head; a head needs it as it is.
            name = "model.embed_tokens.weight" if config.tied_head else "lm_head.weight"
            lm_head = weights.take(name, (config.vocab_size, config.hidden_size))
            ends = SharedTensors(self._model.ends.embedding, lm_head, final_gain(config, weights))
        super().__init__(config, ends, placement)

    def close(self) -> None:
        self._pool.close()

    def _run(self, batch: PackedBatch, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        pages = first_pages(batch.lengths)
        spans = [
            QuerySpan(range(first, first + pages_for(count, PAGE)), 0, count)
            for first, count in zip(pages, batch.lengths, strict=True)
        ]
        tokens = batch.ids.flatten()[batch.places].tolist()
        rows = build_batch(spans, tokens, PAGE, self._backend)
        residual, tapped = self._model.forward(rows, self._pool, taps)
        return tapped, self._model.final_norm(residual)
