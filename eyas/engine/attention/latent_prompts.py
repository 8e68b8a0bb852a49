"""Prompt chunks over latents in the expanded form, where that is less work: keys and values are made.

`plan` lays a step's chunks out on the host and says whether it pays: a pair of query and key then costs a
third, but every row of the sequence, cached ones too, is multiplied by the heads' factors first. A graph
reads where its chunks are from an `ExpandedRoom`, whose size is that of its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eyas.engine.attention.latent_heads import LatentHeads
from eyas.engine.attention.page_lists import on_device, page_lists
from eyas.engine.attention.prompts import made_up_chunk
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import LatentSpec
from eyas.engine.kernels.latent.latent_prefill import TILE, ExpandedRows, attend_expanded
from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kv.pool import PoolShape, rows_at

MOST_BYTES = 1 << 29
"""Of keys and values that are made at a time: start-up leaves room for no more."""
REACH = 4096
"""Rows of sequences for which a graph of fewer rows makes keys and values: behind a cached prefix prompts are
short. For 768 rows this costs a tenth of a step.
"""


@dataclass(frozen=True)
class _Layout:
    """Chunks on the device: int32 `pages` of their sequences, one sequence after the other, and `tiles`
    [T, 4] as `attend_expanded` takes them. `planned`: their rows; None: tiles name those behind them, too.
    """

    pages: torch.Tensor
    tiles: torch.Tensor
    planned: int | None


class ExpandedRoom:
    """`PromptBuffers` for chunks of up to `rows` rows in all, of up to `sequences` sequences with up to
    `REACH` rows in all, cached ones included, or as many as the chunks.

    Pages that no sequence has are the pool's first; rows that no chunk has are those of tiles of zeros.
    """

    def __init__(self, prompts: ExpandedPrompts, shape: PoolShape, rows: int, sequences: int) -> None:
        self._prompts, self._device, self._rows = prompts, shape.device, rows
        self._pages = cdiv(max(rows, REACH), shape.page_size) + sequences
        self._tiles = cdiv(rows, TILE) + sequences
        nothing = np.zeros((0, 4), np.int32)
        self._words = on_device(self._filled(nothing[:, 0], nothing, 0), shape.device)

    @property
    def layout(self) -> _Layout:
        """The layout that launches read."""
        return _Layout(self._words[: self._pages], self._words[self._pages :].view(-1, 4), None)

    def fill(self, spans: Sequence[QuerySpan]) -> bool:
        """See `PromptBuffers.fill`."""
        if not spans or not self._prompts.pays(spans):
            return False
        pages, tiles = self._prompts.laid_out(spans)
        planned = sum(span.count for span in spans)
        if len(pages) > self._pages or len(tiles) + cdiv(self._rows - planned, TILE) > self._tiles:
            return False
        words = self._filled(pages, tiles, planned)
        self._words.copy_(on_device(words, self._device))
        return True

    def _filled(self, pages: np.ndarray, tiles: np.ndarray, planned: int) -> np.ndarray:
        """The words of these pages and tiles, whose rows are the first `planned` ones."""
        words = np.zeros(self._pages + 4 * self._tiles, np.int32)
        words[: len(pages)] = pages
        behind = [(first, TILE, -1, 0) for first in range(planned, self._rows, TILE)]
        named = np.array([*tiles, *behind], np.int32).reshape(-1)
        words[self._pages : self._pages + len(named)] = named
        return words


class ExpandedPrompts:
    """Prompt attention on expanded latents, for layers that are `spec` (one rank's share) and pools of that
    shape.
    """

    def __init__(self, spec: LatentSpec, shape: PoolShape) -> None:
        self._spec, self._shape = spec, shape
        nothing = torch.empty(0, dtype=torch.int32, device=shape.device)
        self._layout = _Layout(nothing, nothing.view(-1, 4), 0)

    def plan(self, spans: Sequence[QuerySpan]) -> bool:
        """Lays out a step with the prompt rows of `spans`, in order.

        False: another attention must run them.
        """
        if not spans or not self.pays(spans):
            return False
        pages, tiles = (on_device(each, self._shape.device) for each in self.laid_out(spans))
        self._layout = _Layout(pages, tiles, sum(span.count for span in spans))
        return True

    def laid_out(self, spans: Sequence[QuerySpan]) -> tuple[np.ndarray, np.ndarray]:
        """The pages of these chunks' sequences, and their tiles: those with most keys begin first."""
        lists = page_lists(spans, self._shape.page_size)
        tiles = [
            (query + i, min(TILE, span.count - i), span.start + i, page * self._shape.page_size)
            for span, query, page in zip(spans, lists.queries, lists.first_page, strict=False)
            for i in range(0, span.count, TILE)
        ]
        return lists.pages, np.array(tiles[::-1], np.int32)

    def room(self, rows: int, sequences: int) -> ExpandedRoom:
        """See `PromptPlan.room`."""
        room = ExpandedRoom(self, self._shape, rows, sequences)
        self._layout = room.layout
        return room

    def made_up(self, rows: int) -> list[QuerySpan]:
        """A prompt in the pool's first page alone; see `PromptPlan.made_up`."""
        return [made_up_chunk(rows, self._shape)]

    def pays(self, spans: Sequence[QuerySpan]) -> bool:
        """True if it is less work than over latents, and what is made has room."""
        spec = self._spec
        pairs = sum(span.count * span.start + span.count * (span.count + 1) // 2 for span in spans)
        rows = sum(span.start + span.count for span in spans)
        made = spec.plain_dim + spec.value_dim
        expanded = pairs * (made + spec.rotated_dim) + rows * spec.kv_rank * made
        room = rows * spec.num_heads * made * max(self._shape.dtype.itemsize, 2) <= MOST_BYTES
        return room and expanded < pairs * (2 * spec.kv_rank + spec.rotated_dim)

    def run(
        self, q: torch.Tensor, layer: torch.Tensor, heads: LatentHeads, first: int, out: torch.Tensor
    ) -> None:
        """q [C, heads * (plain + rotated)] of the planned rows over [pages, 1, page_size, 1, width], where
        their own rows are already -> out [C, heads * value]. `first`: the first of them among the forward's.
        Rows behind the planned ones are zeros.
        """
        planned = self._layout.planned
        rows = rows_at(layer[:, 0, :, 0], self._layout.pages, q.dtype).flatten(0, 1)
        latents, count = rows[:, : self._spec.kv_rank], self._spec.num_heads
        keys = torch.mm(latents, heads.keys.flatten(0, 1).t()).view(rows.shape[0], count, -1)
        values = torch.mm(latents, heads.values.flatten(0, 1).t()).view(rows.shape[0], count, -1)
        rotation = heads.turned(slice(first, None))
        if planned is not None and planned < out.shape[0]:
            out[planned:].zero_()
        attend_expanded(q, ExpandedRows(keys, values, rows), self._layout.tiles, rotation, heads.factor, out)
