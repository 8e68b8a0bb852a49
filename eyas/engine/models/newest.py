"""What the newest certain row of each page gave at the stages of a draft head, kept in the page itself.

Of such a head the row before is needed to make the next: it may be one of an earlier step, of a prefix that
was cached, or of a prompt that another worker sent. Kept with the page, it is wherever the row's KV is. This
file knows rows and pages, not what was given.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eyas.engine.batch.spans import QuerySpan
from eyas.engine.kv.pool import KvPool


class Newest:
    """For the certain rows of one forward. `stages`: the layers before the last one, whose rows are `width`
    wide.
    """

    def __init__(self, spans: Sequence[QuerySpan], pool: KvPool, stages: int, width: int) -> None:
        """`spans`: of the forward, one after the other."""
        self._kept = pool.behind(stages + 1, stages, width)
        size = pool.page_size
        self._firsts: list[
            tuple[int, int]
        ] = []  # rows whose row before is no row here, and its page (-1: none)
        self._ends: list[tuple[int, int]] = []  # the last row in each page, and the page
        row = 0
        for span in spans:
            before, end = span.start - 1, span.start + span.count
            self._firsts.append((row, span.pages[before // size] if span.start else -1))
            for last in [*range(span.start // size * size + size, end, size), end]:
                self._ends.append((row + last - 1 - span.start, span.pages[(last - 1) // size]))
            row += span.count

    def before(self, gave: torch.Tensor, stage: int) -> torch.Tensor:
        """gave [R, width]: what the rows gave at a stage -> what the row before each did; zeros: none."""
        found = gave.roll(1, 0)
        for row, page in self._firsts:
            found[row] = self._kept[page, stage] if page >= 0 else 0.0
        return found

    def keep(self, gave: Sequence[torch.Tensor]) -> None:
        """By stage, as of `before`."""
        for stage, rows in enumerate(gave):
            for row, page in self._ends:
                self._kept[page, stage] = rows[row]
