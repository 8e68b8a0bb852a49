"""The rows of a step as a call to every rank: spans and tokens as integers, and back.

Pages are numbered through all ranks: of `pages` each, rank r has those from r * pages on. So a span's pages
say which rank attends with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from eyas.engine.batch.spans import QuerySpan
from eyas.engine.parallel.ranks import RankCall

STEP = "step"


@dataclass(frozen=True)
class StepRows:
    """Spans, one token for each of their rows, and the layers whose input is asked for."""

    spans: SequenceOf[QuerySpan]
    tokens: SequenceOf[int]
    taps: tuple[int, ...] = ()

    def shares(self, ranks: int, pages: int) -> list[StepRows]:
        """Divides the rows among the ranks; an idle one has no rows.

        Spans must stand in the order of their ranks.
        """
        spans: list[list[QuerySpan]] = [[] for _ in range(ranks)]
        tokens: list[list[int]] = [[] for _ in range(ranks)]
        first = last = 0
        for span in self.spans:
            rank = span.pages[0] // pages
            if rank < last:
                raise AssertionError(f"rows of rank {rank} follow rows of rank {last}")
            last = rank
            spans[rank].append(span)
            tokens[rank] += self.tokens[first : first + span.count]
            first += span.count
        return [StepRows(mine, theirs, self.taps) for mine, theirs in zip(spans, tokens, strict=True)]


def step(rows: StepRows) -> RankCall:
    """The numbers: how many tokens there are, and the taps."""
    words = [*rows.tokens, *(word for span in rows.spans for word in _words(span))]
    return RankCall(STEP, (len(rows.tokens), *rows.taps), np.array(words, np.int32).tobytes())


def rows_of(call: RankCall) -> StepRows:
    """Decodes the rows that `step` encoded."""
    count, *taps = call.numbers
    words = np.frombuffer(call.data, np.int32).tolist()
    return StepRows(tuple(_spans(words[count:])), words[:count], tuple(taps))


def _words(span: QuerySpan) -> list[int]:
    """Encodes a span: its sizes, its pages, and of each of its paths the length and the rows."""
    paths = span.paths or ()
    sizes = [span.start, span.count, span.offset, len(span.pages), len(paths)]
    return [*sizes, *span.pages, *(word for path in paths for word in (len(path), *path))]


def _spans(words: list[int]) -> Iterator[QuerySpan]:
    at = 0

    def take(count: int) -> list[int]:
        nonlocal at
        at += count
        return words[at - count : at]

    while at < len(words):
        start, count, offset, pages, paths = take(5)
        table = take(pages)
        ways = tuple(tuple(take(take(1)[0])) for _ in range(paths))
        yield QuerySpan(table, start, count, ways or None, offset)
