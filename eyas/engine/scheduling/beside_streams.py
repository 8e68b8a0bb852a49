"""How many prompt rows a step has that also decodes: so few that its streams hardly wait for them.

Times are those that a start has measured: of a step's rows, of what its sequences attend to, and of what a
chunk attends to. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from eyas.common.step_times import ChunkSize, PiecewiseCurve

LONGER = 1.7
"""A step with prompts takes at most so many times as long as the same step without."""

SOON_S = 0.6
"""But what waits is computed within so many seconds, in longer steps that have a graph, if these can."""

LATE_S = 1.2
"""If steps that have a graph need longer for it, prompts come first."""


class Streams(NamedTuple):
    """What a step has before its prompts: `decoding` sequences, which attend to `context` tokens together."""

    decoding: int
    context: int


@dataclass(frozen=True)
class MixedTimes:
    """Milliseconds of steps. `plain_ms`: by the sequences that decode, without what they attend to.
    `rows_ms`: by a step's rows; between two of its points lies what so many rows of prompts take.
    `context_ms` per token that is attended to in decoding; `behind_ms`: by a step's rows, per token before
    its chunk.
    """

    plain_ms: PiecewiseCurve
    rows_ms: PiecewiseCurve
    context_ms: float
    behind_ms: PiecewiseCurve

    def plain(self, streams: Streams) -> float:
        """Of a step without prompts."""
        return self.plain_ms.at(streams.decoding) + self.context_ms * streams.context

    def mixed(self, streams: Streams, size: ChunkSize, start: int) -> float:
        """Of a step whose prompt rows come after `start` others."""
        more = self.rows_ms.at(size.total) - self.rows_ms.at(size.total - size.rows)
        return self.plain(streams) + more + self.behind_ms.at(size.total) * start


@dataclass(frozen=True)
class BesideStreams:
    """Chooses among `sizes`: decoding sequences -> steps with a graph, ascending."""

    times: MixedTimes
    sizes: Callable[[int], SequenceOf[ChunkSize]]

    def many(self, streams: Streams) -> float:
        """More prompt tokens than this are not computed in time by steps that have a graph."""
        largest = self.sizes(streams.decoding)[-1]
        return 1e3 * LATE_S * largest.rows / self.times.mixed(streams, largest, 0)

    def rows(self, streams: Streams, start: int, waiting: int) -> int:
        """The prompt rows of a step while `waiting` tokens are to be computed, the first of them after
        `start` others: the most that keep it within `LONGER`, or the fewest that compute all within `SOON_S`.
        """
        most = LONGER * self.times.plain(streams)
        smallest, *larger = self.sizes(streams.decoding)
        chosen, ms = smallest.rows, self.times.mixed(streams, smallest, start)
        for size in larger:
            next_ms = self.times.mixed(streams, size, start)
            if next_ms > most and 1e3 * SOON_S * chosen >= waiting * ms:
                break
            chosen, ms = size.rows, next_ms
        return chosen
