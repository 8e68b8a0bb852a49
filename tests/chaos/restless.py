"""`auto` that changes its mind all the time: what workers prefer must never cost a request."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from gateway.observe.metrics import PlacementMetrics
from gateway.routing.layouts import AutoLayout
from gateway.routing.placement import AdmissionPreference, LatencyTargets
from gateway.routing.router import RouterCandidate

EASY = LatencyTargets(ttft_s=60.0, tpot_s=1.0)
"""Always kept, so that preferences alone say where a prompt goes."""


class Restless(AutoLayout):
    """Second by second: none of two or more workers prefers prompts, the first one, the second, and so on."""

    def __init__(self, workers: Callable[[], Sequence[RouterCandidate]]) -> None:
        super().__init__(workers, EASY, PlacementMetrics(CollectorRegistry()))
        self._all = workers
        self._turns = itertools.count()

    async def think(self) -> None:
        names = sorted(worker.info.worker for worker in self._all())
        first = next(self._turns) % (len(names) + 1)
        self.preferences = {}
        if first:
            roles = {name: AdmissionPreference.DECODE for name in names}
            self.preferences = roles | {names[first - 1]: AdmissionPreference.PREFILL}
