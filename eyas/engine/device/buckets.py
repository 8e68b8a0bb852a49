"""Chooses the shapes that have graphs, and the graph of a step: arithmetic on plain numbers.

A step of rounds alone takes the next larger batch, and so does one of sequences without drafts; a step with
a small prompt chunk takes the next larger batch, and then a total of rows. A larger chunk alone may have a
graph too. What fits nowhere keeps its exact shape and runs without a graph.

Where the depth of drafts is adaptive each depth has its own graphs, and so have rounds whose drafts are
looked up alone (`eyas.engine.speculation.depth`). A step verifies as many drafts as it
makes: the first of a new depth finds fewer than it has rows for, or leaves the deeper ones. Steps with
prompts are plain, or as deep as may be: other depths have no graphs there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cached_property

from eyas.common.prompt_room import LEAST_ROWS, beside, long_rows, step_totals
from eyas.engine.batch.sequence import Sequence
from eyas.engine.device.step import StepShape
from eyas.engine.kernels.launch.sizes import padded_batch
from eyas.engine.speculation.depth_pacing import DepthPacing

MAX_ENDS, MAX_PROMPTS = 8, 16
"""Prompts that may end in one captured step with a chunk, and that may have rows in it."""
FEW_SINGLES = 8
"""Sequences without drafts that a captured step of rounds has room for."""


@dataclass(frozen=True)
class GraphBuckets:
    """Ascending batches with a graph, of rounds alone and of those beside a chunk. `width`: rows of a round.
    `alone`: also of sequences without drafts alone. `lone_chunks`: ascending rows of chunks that have a graph
    where nothing decodes beside them. `headless`: a head in the step lets its rows wait.

    `chunk_tokens` and `mixed_tokens`: rows of a step with prompts, those of rounds included: the most, and as
    many as a step should have that also has rounds (0: there is no difference, and no graph).
    """

    width: int
    tile_rows: int
    batches: tuple[int, ...]
    mixed_batches: tuple[int, ...] = ()
    chunk_tokens: int = 0
    mixed_tokens: int = 0
    alone: bool = True
    lone_chunks: tuple[int, ...] = ()
    headless: bool = False

    @property
    def headed(self) -> int:
        """See `StepShape.headed`."""
        return 1 if self.headless else self.width

    def mixed_prefill_budget(self, batch: int, many: bool) -> int:
        """Gives the prompt rows beside `batch` rounds: those of a captured shape, or the most allowed.

        Where these are the same, rounds that only pad the batch would be a few more: not worth a graph.
        """
        if not self.mixed_tokens:
            return max(self.chunk_tokens - batch * self.width, self._least)
        if many and self.mixed_tokens < (most := beside(self.chunk_tokens)):
            return max(most - batch * self.width, self._least)
        return self._chunks(_next(self.mixed_batches, batch) or batch)[-1]

    def long_prompt_rows(self, batch: int, ahead: int) -> int:
        """Those of these rows that long prompts with `ahead` tokens ahead have where not many wait: with them
        the step has a captured shape too.
        """
        rows = self.mixed_prefill_budget(batch, False)
        if not 0 < self.mixed_tokens < self.chunk_tokens:
            return rows
        return long_rows(self._chunks(_next(self.mixed_batches, batch) or batch), self.mixed_tokens, ahead)

    def shape(
        self, batch: int, chunk: int, tiles: int, ends: int, singles: int = 0, prompts: int = 0
    ) -> StepShape:
        """The captured shape that holds such a step with the fewest rows, or the exact one.

        `singles`: how many sequences more have no drafts, and a row each. A graph without such rows takes
        them as rounds, if it is the smallest; beside a chunk all graphs are like that. `prompts`: as of
        `StepShape`, but that 0 are a few.
        """
        if singles:
            return self._smallest(
                self._own(StepShape(batch, self.width, chunk, tiles, ends, singles, prompts))
            )
        exact = self._own(StepShape(batch, self.width, chunk, tiles, ends, prompts=prompts))
        if not chunk:
            larger = _next(self.batches, batch)
            return exact if larger is None else self._own(StepShape(larger, self.width))
        larger, longer = _next(self.mixed_batches, batch), None
        if larger is not None:
            longer = _next(self._chunks(larger), chunk)
        if longer is None and not batch:
            larger, longer = 0, _next(self.lone_chunks, chunk)
        if larger is None or longer is None or tiles > self._tiles(longer):
            return exact
        if ends > MAX_ENDS or prompts > MAX_PROMPTS:
            return exact
        return self._mixed(larger, longer)

    def captured(self) -> Iterator[StepShape]:
        """Every shape that has a graph, the largest first: the others then fit in its memory."""
        shapes = [self._own(StepShape(batch, self.width)) for batch in self.batches]
        shapes += [self._mixed(batch, chunk) for batch in self.mixed_batches for chunk in self._chunks(batch)]
        shapes += [self._mixed(0, chunk) for chunk in self.lone_chunks]
        shapes += self._singles
        return iter(sorted(shapes, key=lambda shape: -shape.rows))

    def _smallest(self, exact: StepShape) -> StepShape:
        """The smallest shape for a step with singles."""
        rounds, sizes = exact.batch + exact.singles, (exact.chunk, exact.tiles, exact.ends)
        wide = self.shape(rounds, *sizes, prompts=exact.prompts)
        fitting = [wide] if wide in self._graphs else []
        if not exact.chunk:
            fitting += [s for s in self._singles if s.batch >= exact.batch and s.singles >= exact.singles]
        return min(fitting, key=lambda shape: shape.rows, default=exact)

    def _own(self, shape: StepShape) -> StepShape:
        return replace(shape, headless=self.headless)

    @cached_property
    def _graphs(self) -> frozenset[StepShape]:
        return frozenset(self.captured())

    @cached_property
    def _singles(self) -> list[StepShape]:
        """Graphs of sequences without drafts, alone and beside rounds; the smallest first."""
        if self.width == 1:
            return []
        sizes = [size for size in self.batches if size & (size - 1) == 0 or size == self.batches[-1]]
        alone = [self._own(StepShape(0, self.width, singles=size)) for size in sizes] if self.alone else []
        return alone + [
            self._own(StepShape(size, self.width, singles=FEW_SINGLES)) for size in sizes if size > 1
        ]

    def _chunks(self, batch: int) -> tuple[int, ...]:
        """Prompt rows of the captured steps with `batch` rounds."""
        taken = batch * self.width
        totals = step_totals(self.mixed_tokens)
        return tuple(total - taken for total in totals if total - taken >= self._least) or (self._least,)

    @property
    def _least(self) -> int:
        return min(LEAST_ROWS, self.chunk_tokens)

    def _mixed(self, batch: int, chunk: int) -> StepShape:
        return self._own(
            StepShape(batch, self.width, chunk, self._tiles(chunk), MAX_ENDS, prompts=MAX_PROMPTS)
        )

    def _tiles(self, chunk: int) -> int:
        """The most tiles of a chunk: every prompt in it may leave one tile partly empty."""
        return -(-chunk // self.tile_rows) + MAX_ENDS


def default_batches(most: int) -> tuple[int, ...]:
    """The batches that smaller ones are padded to, up to `most`, which is one of them."""
    return tuple(sorted({min(padded_batch(batch), most) for batch in range(1, most + 1)}))


def _next(sizes: SequenceOf[int], size: int) -> int | None:
    place = bisect_left(sizes, size)
    return sizes[place] if place < len(sizes) else None


class DepthBuckets:
    """`buckets`: of every depth between which `pacing` chooses; 0: of plain rounds, one row each."""

    def __init__(self, pacing: DepthPacing, buckets: Mapping[int, GraphBuckets]) -> None:
        self._pacing = pacing
        self._buckets = buckets
        self.fixed: int | None = None  # the depth of all rounds, while they are measured

    @property
    def places(self) -> tuple[int, ...]:
        """The depths, ascending."""
        return tuple(self._buckets)

    def graphed(self, batch: int) -> int:
        """The smallest batch of at least `batch` sequences whose plain rounds have a graph; else `batch`."""
        return min((one for one in self._buckets[0].batches if one >= batch), default=batch)

    def beside_prompts(self) -> GraphBuckets:
        """The buckets of the next step, if it has prompts."""
        return self._buckets[self._pacing.beside_prompts]

    def choose(
        self, sequences: SequenceOf[Sequence], followed: SequenceOf[bool], *, prompts: bool
    ) -> tuple[int, GraphBuckets]:
        """The depth of a step with a round of each of these sequences, beside `prompts` or not.

        `followed`: those for which the head drafts. Prompt rows were counted by what was chosen before: more
        of them than fit beside deep rounds stay with plain ones.
        """
        if self.fixed is not None:
            return self.fixed, self._buckets[self.fixed]
        counted = self._pacing.beside_prompts
        self._pacing.choose(sequences, followed)
        depth = min(counted, self._pacing.beside_prompts) if prompts else self._pacing.depth
        if sequences and not any(followed):
            depth = 0
        return depth, self._buckets[depth]
