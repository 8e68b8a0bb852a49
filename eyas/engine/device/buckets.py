"""Which shapes have graphs, and which of them a step takes: torch-free arithmetic.

A step of rounds alone takes the next larger batch; a step with a small prompt chunk takes the next larger
pair of batch and chunk. What fits nowhere keeps its exact shape and runs without a graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from eyas.engine.device.step import StepShape

MAX_ENDS = 8
"""Prompts that may end in one captured step with a chunk."""


@dataclass(frozen=True)
class Buckets:
    """Ascending batches (of rounds alone, and beside a chunk) and chunks. `width`: rows of a round."""

    width: int
    tile_rows: int
    batches: tuple[int, ...]
    mixed_batches: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()

    def shape(self, batch: int, chunk: int, tiles: int, ends: int) -> StepShape:
        """The captured shape that holds such a step, or the exact one."""
        exact = StepShape(batch, self.width, chunk, tiles, ends)
        if not chunk:
            larger = _next(self.batches, batch)
            return exact if larger is None else StepShape(larger, self.width)
        larger, longer = _next(self.mixed_batches, batch), _next(self.chunks, chunk)
        if larger is None or longer is None or ends > MAX_ENDS or tiles > self._tiles(longer):
            return exact
        return self._mixed(larger, longer)

    def captured(self) -> Iterator[StepShape]:
        """Every shape that has a graph, the largest first: the others then fit in its memory."""
        shapes = [StepShape(batch, self.width) for batch in self.batches]
        shapes += [self._mixed(batch, chunk) for batch in self.mixed_batches for chunk in self.chunks]
        return iter(sorted(shapes, key=lambda shape: -shape.rows))

    def _mixed(self, batch: int, chunk: int) -> StepShape:
        return StepShape(batch, self.width, chunk, self._tiles(chunk), MAX_ENDS)

    def _tiles(self, chunk: int) -> int:
        """Every prompt in a chunk may leave one tile partly empty."""
        return -(-chunk // self.tile_rows) + MAX_ENDS


def default_batches(most: int) -> tuple[int, ...]:
    """Dense where a padded row costs most: 1, 2, 4, 8, then steps of 8, of 16 from 64, of 32 from 128."""
    wanted = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, most + 1, 32)]
    return tuple(sorted({batch for batch in wanted if batch <= most} | {most}))


def _next(sizes: SequenceOf[int], size: int) -> int | None:
    place = bisect_left(sizes, size)
    return sizes[place] if place < len(sizes) else None
