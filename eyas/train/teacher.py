"""The target beside a head in training: what it feels and says about a batch, computed as it is served.

On a CPU its plain decoder computes, on a GPU the fast one. Nothing is kept from one batch to the next. It
knows models and pages; it knows no head and no loss.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.common.errors import ConfigError
from eyas.engine.attention.forward import build_batch
from eyas.engine.attention.soft_cap import soft_cap
from eyas.engine.attention.torch_backend import TorchAttention
from eyas.engine.batch.spans import Span
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import FolderWeights, Placement, Weights
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.refusal import refusal
from eyas.engine.models.table import read_model
from eyas.train.heads.base import Ends
from eyas.train.packing import Batch
from kv_transfer.layout import pages_for

PAGE = 16


@dataclass(frozen=True)
class Observed:
    """What a target makes of B rows with L tokens: zeros where they are padding.

    `tapped` [B, L, taps * hidden]: the residual rows that enter each tapped layer; `hidden` [B, L, hidden]:
    those that leave the last one, after the final norm.
    """

    tapped: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class Room:
    """The largest batch: `tokens` in all, in at most `texts` texts, none longer than `length`."""

    tokens: int
    texts: int
    length: int

    @property
    def pages(self) -> int:
        """Of a pool that holds it: every text may end on a page of its own."""
        return pages_for(self.tokens, PAGE) + self.texts


class Teacher(ABC):
    """A loaded target. `config`, `ends` and `placement` say what it is, what heads share, and where it is."""

    def __init__(self, config: ModelConfig, ends: Ends, placement: Placement) -> None:
        self.config = config
        self.ends = ends
        self.placement = placement

    @torch.no_grad()
    def observe(self, batch: Batch, taps: tuple[int, ...]) -> Observed:
        """Runs all texts of a batch, which is on the teacher's device."""
        tapped, hidden = self._run(batch, taps)
        return Observed(_placed(tapped, batch), _placed(hidden, batch))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """The target's scores of rows after its final norm [..., hidden]: float32 [..., vocab]."""
        scores = F.linear(hidden, self.ends.lm_head).float()
        return soft_cap(scores, self.config.logit_soft_cap) if self.config.logit_soft_cap else scores

    @abstractmethod
    def _run(self, batch: Batch, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Tapped rows [R, taps * hidden], and rows after the final norm [R, hidden], text after text."""


class PlainTeacher(Teacher):
    """The plain decoder."""

    def __init__(self, config: ModelConfig, placement: Placement, room: Room) -> None:
        shape = PoolShape(config.kv_format, room.pages, PAGE, placement.dtype, placement.device)
        self._pool, self._backend = KvPool(shape), TorchAttention.of(config, shape)
        with FolderWeights(config.folder, config.spelling, placement) as weights:
            self._model = Decoder(config, weights, self._backend)
            # The decoder packs its output head; a head needs it as it is.
            name = "model.embed_tokens.weight" if config.tied_head else "lm_head.weight"
            lm_head = weights.take(name, (config.vocab_size, config.hidden_size))
            ends = Ends(self._model.ends.embedding, lm_head, final_gain(config, weights))
        super().__init__(config, ends, placement)

    def _run(self, batch: Batch, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        pages = first_pages(batch.lengths)
        spans = [
            Span(range(first, first + pages_for(count, PAGE)), 0, count)
            for first, count in zip(pages, batch.lengths, strict=True)
        ]
        tokens = batch.ids.flatten()[batch.places].tolist()
        rows = build_batch(spans, tokens, PAGE, self._backend)
        residual, tapped = self._model.forward(rows, self._pool, taps)
        return tapped, self._model.final_norm(residual)


def first_pages(lengths: Sequence[int]) -> list[int]:
    """The first page of each text: each has pages of its own."""
    return [0, *itertools.accumulate(pages_for(length, PAGE) for length in lengths)][:-1]


def _placed(rows: Tensor, batch: Batch) -> Tensor:
    """Rows of texts [R, width] where their tokens stand: [B, L, width]."""
    found = rows.new_zeros(batch.ids.numel(), rows.shape[1])
    return found.index_copy_(0, batch.places, rows).view(*batch.ids.shape, -1)


def load_teacher(folder: Path, device: str, room: Room) -> Teacher:
    """The target of a folder. Raises ConfigError if it cannot be served there."""
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"--device: {device} is not available: PyTorch sees no GPU here", param="device")
    config = read_model(folder)
    if room.length > config.context_length:
        raise ConfigError(
            f"--max-length: {room.length} is more than the {config.context_length} tokens of {folder}",
            param="max-length",
        )
    placement = Placement(device, torch.float32 if device == "cpu" else torch.bfloat16)
    if device == "cpu":
        return PlainTeacher(config, placement, room)
    if why := refusal(config, config.vocab_size):
        raise ConfigError(f"--target: {folder} has no implementation for a GPU: {why}", param="target")
    from eyas.train.device_teacher import DeviceTeacher

    return DeviceTeacher(config, placement, room)


def final_gain(config: ModelConfig, weights: Weights) -> Tensor:
    """What the norm before the output head multiplies by, [hidden]."""
    return weights.take("model.norm.weight", (config.hidden_size,)) + config.norm_offset
