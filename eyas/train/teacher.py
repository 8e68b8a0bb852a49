"""The target beside a head in training: what it feels and says about a batch, computed as it is served.

Nothing is kept from one batch to the next. On a CPU it is the plain decoder, whose spans are a batch's texts;
on a GPU that of `device_teacher`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.engine.attention.forward import build_batch
from eyas.engine.attention.soft_cap import soft_cap
from eyas.engine.attention.torch_heads import torch_attention
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import FolderWeights, WeightPlacement, WeightSource
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.ops.torch_ops import TorchMachine
from eyas.train.heads.base import TargetTensors
from eyas.train.packing import PackedBatch
from kv_transfer.layout import pages_for

PAGE = 16


@dataclass(frozen=True)
class TargetOutputs:
    """A target's outputs for B rows with L tokens: zeros where they are padding.

    `tapped` [B, L, taps * hidden]: the residual rows that enter each tapped layer; `hidden` [B, L, hidden]:
    those that leave the last one, after the final norm.
    """

    tapped: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class BatchLimit:
    """The largest batch: `tokens` in all, in at most `texts` texts, none longer than `length`."""

    tokens: int
    texts: int
    length: int

    @property
    def pages(self) -> int:
        """The pages of a pool that holds it: every text may end on a page of its own."""
        return pages_for(self.tokens, PAGE) + self.texts


class TeacherModel(ABC):
    """A loaded target: its `config`, the `ends` that heads share, and its `placement`."""

    def __init__(self, config: ModelConfig, ends: TargetTensors, placement: WeightPlacement) -> None:
        self.config = config
        self.ends = ends
        self.placement = placement

    @torch.no_grad()
    def observe(self, batch: PackedBatch, taps: tuple[int, ...]) -> TargetOutputs:
        """Runs all texts of a batch, which is on the teacher's device."""
        tapped, hidden = self._run(batch, taps)
        return TargetOutputs(_placed(tapped, batch), _placed(hidden, batch))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """The target's scores of rows after its final norm [..., hidden]: float32 [..., vocab]."""
        scores = F.linear(hidden, self.ends.lm_head).float()
        return soft_cap(scores, self.config.logit_soft_cap) if self.config.logit_soft_cap else scores

    @abstractmethod
    def close(self) -> None:
        """Gives its pages back."""

    @abstractmethod
    def _run(self, batch: PackedBatch, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Tapped rows [R, taps * hidden], and rows after the final norm [R, hidden], text after text."""


def first_pages(lengths: Sequence[int]) -> list[int]:
    """The first page of each text: each has pages of its own."""
    return [0, *itertools.accumulate(pages_for(length, PAGE) for length in lengths)][:-1]


def _placed(rows: Tensor, batch: PackedBatch) -> Tensor:
    """Rows of texts [R, width] where their tokens stand: [B, L, width]."""
    scattered = rows.new_zeros(batch.ids.numel(), rows.shape[1])
    return scattered.index_copy_(0, batch.places, rows).view(*batch.ids.shape, -1)


def final_gain(config: ModelConfig, weights: WeightSource) -> Tensor:
    """The factor of the norm before the output head, [hidden]."""
    return weights.take("model.norm.weight", (config.hidden_size,)) + config.norm_offset


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
            ends = TargetTensors(self._model.ends.embedding, lm_head, final_gain(config, weights))
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
