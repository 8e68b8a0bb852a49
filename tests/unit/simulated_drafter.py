"""One draft worker and the sequences it drafts for, in simulated time: what waits for what, for how long.

The rule is the draft engine's: whatever has committed is answered in one batch.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """`forward_s`, `row_s`: seconds of one forward, and of each of its rows. `verify_s`: of a round in the
    verifier, which no other sequence shares. `tokens`: per round.
    """

    forward_s: float = 0.0004
    row_s: float = 0.000002
    verify_s: float = 0.006
    steps: int = 5
    tokens: float = 3.0

    def proposal_s(self, batch: int) -> float:
        """One extension, and a forward for each further draft."""
        return self.steps * (self.forward_s + self.row_s * batch)


class SimulatedDrafter:
    """Serves `count` sequences. `tokens`: that they have been given."""

    def __init__(self, costs: Costs, count: int, seed: int = 1) -> None:
        self.costs = costs
        self.tokens = 0.0
        self.now = 0.0
        self._draws = random.Random(seed)
        self._commits = [self._draws.random() * costs.verify_s for _ in range(count)]  # when each comes
        heapq.heapify(self._commits)

    def run(self, seconds: float) -> float:
        """Tokens per second from now on."""
        began, before = self.now, self.tokens
        while self.now < began + seconds:
            self._turn()
        return (self.tokens - before) / (self.now - began)

    def _turn(self) -> None:
        self.now = max(self.now, self._commits[0])
        batch = 0
        while self._commits and self._commits[0] <= self.now:
            heapq.heappop(self._commits)
            self.tokens += int(self.costs.tokens) + (self._draws.random() < self.costs.tokens % 1)
            batch += 1
        self.now += self.costs.proposal_s(batch)
        for _ in range(batch):
            heapq.heappush(self._commits, self.now + self.costs.verify_s * self._draws.uniform(0.9, 1.1))
