"""Prompt attention by kernels whose build may still run: `plan` says whether they take a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from eyas.common.errors import ConfigError
from eyas.engine.attention.page_lists import on_device, page_lists
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kv.pool import PoolShape
from kv_transfer.layout import pages_for


class PromptBuffers(Protocol):
    """Memory from which a graph reads how a step's prompt rows are laid out."""

    def fill(self, spans: Sequence[QuerySpan]) -> bool:
        """Lays out the prompt rows of `spans`, in order, for the graph's next replay. False: the graph is not
        for them.
        """
        ...


class PromptPlan(Protocol):
    """An attention that decides, step by step, whether it attends the prompt rows."""

    def plan(self, spans: Sequence[QuerySpan]) -> bool:
        """Lays out a step with the prompt rows of `spans`, in order.

        False: another attention must run them.
        """
        ...

    def made_up(self, rows: int) -> list[QuerySpan]:
        """Chunks of `rows` rows in all, none of a sequence's own, by which a start warms it; none: it is not
        warmed.
        """
        ...

    def room(self, rows: int, sequences: int) -> PromptBuffers | None:
        """Room for chunks of up to `rows` rows in all, of up to `sequences` sequences, which launches read up
        to the next plan; None: graphs do without this attention.
        """
        ...


class PlannedAttention(Protocol):
    """Causal attention that is planned on the host: `flashinfer_backend`, `cudnn_backend`, `side_by_side`."""

    def ready(self) -> bool:
        """True if the kernels are built. Raises ConfigError if they cannot be."""
        ...

    def made_up(self, rows: int) -> list[QuerySpan]:
        """See `PromptPlan.made_up`."""
        ...

    def plan(self, spans: Sequence[QuerySpan]) -> bool:
        """Prepares the attention of these chunks, for all layers of one step. False: it is not for them."""
        ...

    def run(self, q: torch.Tensor, layer_pool: torch.Tensor, out: torch.Tensor) -> None:
        """Attends q [rows, heads, dim] to one layer of the pool; writes to `out`, shaped like q."""
        ...


class PromptAttention:
    """Offers `attention` to every step; declines until it is ready, and for good if it cannot be built.

    `scores`: of the layers that it is for. `name`: the backend's.
    """

    def __init__(self, attention: PlannedAttention, scores: ScoreScaling, name: str = "flashinfer") -> None:
        self.scores, self._name = scores, name
        self._attention = attention
        self._usable: bool | None = None  # not known yet

    def plan(self, spans: Sequence[QuerySpan]) -> bool:
        """Lays out a step with the prompt rows of `spans`, in order.

        False: another attention must run them.
        """
        if self._usable is None:
            self._usable = self._check_ready()
        if not spans or not self._usable:
            return False
        return self._attention.plan(spans)

    def made_up(self, rows: int) -> list[QuerySpan]:
        """See `PromptPlan.made_up`."""
        return self._attention.made_up(rows)

    def room(self, rows: int, sequences: int) -> None:
        """None: it follows the chunks' numbers of rows, which the host has to know."""

    def run(self, q: torch.Tensor, layer: torch.Tensor, out: torch.Tensor) -> None:
        """q [C, heads, dim] of the planned rows over [pages, 2, page_size, kv_heads, dim] -> out, as q."""
        self._attention.run(q, layer, out)

    def _check_ready(self) -> bool | None:
        """A server that already answers does not end because its prompts will stay slower."""
        log = logging.getLogger("eyas.engine")
        try:
            if not self._attention.ready():
                return None
        except ConfigError as error:
            log.error("prompts stay with the triton kernel: %s", error)
            return False
        log.info("prompts attend by %s from now on", self._name)
        return True


@dataclass(frozen=True)
class PromptChunk:
    """The query rows `rows` of a step, the first of which is the sequence's row `start`; the sequence's pages
    up to the chunk's end, int32, on the device.
    """

    rows: slice
    start: int
    pages: torch.Tensor

    @property
    def count(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def end(self) -> int:
        return self.start + self.count


def chunks_of(spans: Sequence[QuerySpan], shape: PoolShape) -> list[PromptChunk]:
    """A step's chunks, whose query rows follow each other in the order of `spans`; the device is not waited
    for.
    """
    lists = page_lists(spans, shape.page_size)
    pages = on_device(lists.pages, shape.device).split(np.diff(lists.first_page).tolist())
    rows = (slice(*pair) for pair in pairwise(lists.queries.tolist()))
    return [PromptChunk(own, span.start, its) for own, span, its in zip(rows, spans, pages, strict=True)]


def made_up_chunk(rows: int, shape: PoolShape, start: int = 0) -> QuerySpan:
    """A chunk of `rows` rows behind `start` others in the pool's first page alone: no sequence's."""
    return QuerySpan([0] * pages_for(start + rows, shape.page_size), start, rows)


def bytes_of(span: QuerySpan, shape: PoolShape) -> int:
    """Bytes of the keys and values of a chunk's sequence in one layer, up to the chunk's end."""
    return (span.start + span.count) * 2 * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
