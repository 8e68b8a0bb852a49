"""Two workers that compute prompts for each other may hold the pages that the other one's pulls wait for.

Neither reads what the other leases, so neither gets its pages back, until a deadline. Who waits so gives up
one prompt, whose pages its owner then has again, and computes it itself.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from eyas.common.types import FirstToken
from eyas.engine.kv.leases import LeaseTable
from eyas.engine.kv.pulls import PullManager
from eyas.engine.scheduling.ranked import Schedulers

PATIENCE_S = 1.0
"""Readers of what is leased here are as quick as this, unless they wait themselves."""


@dataclass
class PullCrossing:
    """The pull that is first in line, and since when."""

    scheduler: Schedulers
    leases: LeaseTable
    pulls: PullManager
    _first: Hashable = None
    _since: float = 0.0

    def given_up(self, first: Hashable, tokens: int, now: float) -> tuple[Any, tuple[FirstToken, ...]] | None:
        """There is no room for `first`, of `tokens` rows. Whose prompt is to be computed here, and what it
        gave where it was computed; None: nobody's, yet.

        It is the last that is whole elsewhere, once in PATIENCE_S, where leases alone leave no room.
        """
        if first != self._first:
            self._first, self._since = first, now
        if now - self._since < PATIENCE_S:
            return None
        self._since = now
        rows = max([tokens, *map(len, self.scheduler.waiting)])
        if self.scheduler.tables.needed(rows) <= self.scheduler.beside(self.leases.pages()):
            return None
        whole = self.pulls.whole()
        return whole[-1] if whole else None
