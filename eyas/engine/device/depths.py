"""Chooses a step's graph where the depth of drafts is adaptive: each depth has its own graphs.

A step verifies as many drafts as it makes: the first of a new depth finds fewer than it has rows for, or
leaves the deeper ones. Steps with prompts are plain, or as deep as may be: other depths have no graphs there.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from eyas.engine.batch.sequence import Sequence
from eyas.engine.device.buckets import GraphBuckets
from eyas.engine.speculation.depths.pacing import DepthPacing


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
