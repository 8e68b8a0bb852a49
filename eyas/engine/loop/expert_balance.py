"""Balances the experts' load over ranks: samples the loads periodically, and replicates experts where it
pays.

The load of an expert is a decaying sum: each sample halves the weight of the earlier ones. One layer is
planned and moved between two steps.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eyas.engine.parallel.expert_plan import NONE, ExpertSlots, Loads, Replicas, planned, unevenness

EVERY_S = 10.0
"""Seconds between two samples of the loads."""

WORTH = 0.05
"""The least gain for which replicas are moved: a fraction of the mean load of a layer's ranks, by which the
busiest rank comes nearer to that mean.
"""

LEAST = 8
"""The mean number of choices per expert that a plan needs: fewer are no evidence."""


class SpreadRanks(Protocol):
    """The experts of all ranks, used between two steps. Implemented by `LeaderSpread`."""

    @property
    def slots(self) -> ExpertSlots:
        """The slots of a layer's experts."""

    @property
    def replicas(self) -> list[Replicas]:
        """The replicas of each layer."""

    def begin_loads(self) -> None:
        """Begins to sum the loads over all ranks."""

    def loads(self) -> npt.NDArray[np.uint32] | None:
        """The sums, counted from the start modulo 2^32: [layers, experts]; None while they are computed."""

    def replicate(self, layer: int, replicas: Replicas) -> None:
        """Sets a layer's replicas on all ranks."""


class ExpertBalance:
    """Decides when which experts are replicated. `poll` is called between steps, by the engine's thread."""

    def __init__(self, ranks: SpreadRanks, every_s: float = EVERY_S) -> None:
        self._ranks, self._every_s = ranks, every_s
        self._next = 0.0  # time of the next sample
        self._begun = False
        self._counted: npt.NDArray[np.uint32] | None = None  # at the last sample
        self._recent: Loads = np.zeros((len(ranks.replicas), ranks.slots.experts))
        self._left = deque[int]()  # layers that are still to be planned
        # per moved layer: unevenness before and after, number of new replicas
        self._moved: list[tuple[float, float, int]] = []

    def poll(self, now: float) -> None:
        """Plans one layer, or takes a sample if one is due. `now`: monotonic seconds."""
        if self._left:
            self._plan(self._left.popleft())
            if not self._left:
                self._report()
        elif self._begun:
            if (loads := self._ranks.loads()) is not None:
                self._begun = False
                self._add_sample(loads)
        elif now >= self._next:
            self._next = now + self._every_s
            self._begun = True
            self._ranks.begin_loads()

    def _add_sample(self, loads: npt.NDArray[np.uint32]) -> None:
        """Adds the choices since the last sample, and queues all layers for planning."""
        before, self._counted = self._counted, loads.copy()
        if before is None:
            return  # the first sample includes the warm-up steps
        new = loads - before  # modulo 2^32, as they are counted
        if new.any():
            self._recent = self._recent / 2 + new
            self._left.extend(range(len(new)))

    def _plan(self, layer: int) -> None:
        """Plans a layer's replicas, and moves them if that pays."""
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
