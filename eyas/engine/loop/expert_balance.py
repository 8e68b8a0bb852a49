"""Keeps ranks' experts busy alike: looks at the loads now and then, and has replicas made where they pay.

Loads are those of the last while: what was counted before counts half in each following look. One layer is
planned and moved between two steps, and the steps go on.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eyas.engine.parallel.expert_plan import NONE, ExpertSlots, Loads, Replicas, planned, unevenness

EVERY_S = 10.0
"""Seconds between two looks at the loads."""

WORTH = 0.05
"""Replicas are moved where they bring the busiest rank of a layer nearer to the mean by this part of it."""

LEAST = 8
"""Choices per expert that must have been counted, on average: fewer say little about any."""


class SpreadRanks(Protocol):
    """All ranks, between two steps; `eyas.engine.loop.spread_ranks` has them."""

    @property
    def slots(self) -> ExpertSlots:
        """The slots of a layer's experts."""

    @property
    def replicas(self) -> list[Replicas]:
        """The replicas of each layer."""

    def begin_loads(self) -> None:
        """Has the loads added up."""

    def loads(self) -> npt.NDArray[np.uint32] | None:
        """The loads that were begun, counted from the start modulo 2^32: [layers, experts]; None: not yet."""

    def replicate(self, layer: int, replicas: Replicas) -> None:
        """Has all ranks go by these replicas of a layer."""


class ExpertBalance:
    """`poll` is called between steps, by the engine's thread."""

    def __init__(self, ranks: SpreadRanks, every_s: float = EVERY_S) -> None:
        self._ranks, self._every_s = ranks, every_s
        self._next = 0.0  # when it looks again
        self._begun = False
        self._counted: npt.NDArray[np.uint32] | None = None  # at the last look
        self._recent: Loads = np.zeros((len(ranks.replicas), ranks.slots.experts))
        self._left = deque[int]()  # layers that are still to be planned
        # of each layer: uneven by, before and after; replicas
        self._moved: list[tuple[float, float, int]] = []

    def poll(self, now: float) -> None:
        """A step of it, if one is due. `now`: monotonic seconds."""
        if self._left:
            self._plan(self._left.popleft())
            if not self._left:
                self._report()
        elif self._begun:
            if (loads := self._ranks.loads()) is not None:
                self._begun = False
                self._hear(loads)
        elif now >= self._next:
            self._next = now + self._every_s
            self._begun = True
            self._ranks.begin_loads()

    def _hear(self, loads: npt.NDArray[np.uint32]) -> None:
        """Takes in what was chosen since the last look."""
        before, self._counted = self._counted, loads.copy()
        if before is None:
            return  # the start's made-up steps are among them
        new = loads - before  # modulo 2^32, as they are counted
        if new.any():
            self._recent = self._recent / 2 + new
            self._left.extend(range(len(new)))

    def _plan(self, layer: int) -> None:
        """Plans a layer's replicas, and has them made if that pays."""
        slots, loads, before = self._ranks.slots, self._recent[layer], self._ranks.replicas[layer]
        uneven = unevenness(loads, slots, before)
        if loads.sum() < LEAST * slots.experts or uneven < 1 + WORTH:
            return
        replicas = planned(loads, slots, before)
        if uneven - (even := unevenness(loads, slots, replicas)) < WORTH:
            return
        self._ranks.replicate(layer, replicas)
        new = sum(a not in (NONE, b) for a, b in zip(replicas, before, strict=True))
        self._moved.append((uneven, even, new))

    def _report(self) -> None:
        if not self._moved:
            return
        (before, after, _), count = np.mean(self._moved, 0), sum(each[2] for each in self._moved)
        text = "experts: %d replicas moved in %d of %d layers: "
        text += "the busiest rank there had %.2f of the mean, now %.2f"
        layers = len(self._recent)
        logging.getLogger("eyas.engine").info(text, count, len(self._moved), layers, before, after)
        self._moved.clear()
