"""One draft worker and the sequences it drafts for, in simulated time: what waits for what, for how long.

The rules are the draft engine's: what was drafted ahead is answered at once, the others in one batch;
drafting ahead goes on one forward at a time while no commit waits.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Seconds and chances. `forward_s`, `row_s`: of one forward, and of each of its rows.

    `verify_s`: of a round in the verifier, which no other sequence shares. `hit`: the chance that a
    round's outcome is among those drafted for. `tokens`, `tokens_after_hit`: per round, by what its draft
    was made of. `contention`: how much longer a round takes while its drafter works ahead (on its cores).
    """

    forward_s: float = 0.0004
    row_s: float = 0.000002
    verify_s: float = 0.006
    steps: int = 5
    outcomes: int = 8
    hit: float = 0.7
    tokens: float = 3.0
    tokens_after_hit: float = 2.9
    contention: float = 1.0

    def proposal_s(self, batch: int) -> float:
        """One extension, and a forward for each further draft."""
        return self.steps * (self.forward_s + self.row_s * batch)

    def ahead_s(self, batch: int) -> float:
        """One forward below every outcome."""
        return self.forward_s + self.row_s * batch * self.outcomes


@dataclass
class _Sequence:
    left: int | None = None  # forwards until its outcomes are drafted for; None: nothing is
    tokens: float = 3.0  # of the round that is being verified


class SimulatedDrafter:
    """Serves `count` sequences. `ahead`: it drafts ahead. `tokens`: that they have been given."""

    def __init__(self, costs: Costs, count: int, *, ahead: bool, seed: int = 1) -> None:
        self.costs, self.ahead = costs, ahead
        self.tokens = 0.0
        self.now = 0.0
        self._draws = random.Random(seed)
        self._sequences = [_Sequence() for _ in range(count)]
        self._owed = 0.0
        self._commits = [(self._draws.random() * costs.verify_s, i) for i in range(count)]  # when, whose
        heapq.heapify(self._commits)

    def run(self, seconds: float) -> float:
        """Tokens per second from now on."""
        began, before = self.now, self.tokens
        while self.now < began + seconds:
            self._turn()
        return (self.tokens - before) / (self.now - began)

    def _turn(self) -> None:
        working = [one for one in self._sequences if one.left]
        if not working:
            self.now = max(self.now, self._commits[0][0])
        missed = []
        while self._commits and self._commits[0][0] <= self.now:
            _, which = heapq.heappop(self._commits)
            if not self._answered(which):
                missed.append(which)
        if missed:
            self.now += self.costs.proposal_s(len(missed))
            for which in missed:
                self._verify(which, self.costs.tokens)
        elif working:
            self.now += self.costs.ahead_s(len(working))
            for one in working:
                one.left = one.left - 1 if one.left else one.left

    def _answered(self, which: int) -> bool:
        one = self._sequences[which]
        whole = int(one.tokens) + (self._draws.random() < one.tokens % 1)
        self.tokens += whole
        ready, one.left = one.left == 0, None
        if not ready or self._draws.random() >= self.costs.hit:
            return False
        self._verify(which, self.costs.tokens_after_hit)
        return True

    def _verify(self, which: int, tokens: float) -> None:
        one, costs = self._sequences[which], self.costs
        one.tokens = tokens
        one.left = costs.steps + 1 if self.ahead else None
        took = costs.verify_s * self._draws.uniform(0.9, 1.1) * (costs.contention if one.left else 1.0)
        heapq.heappush(self._commits, (self.now + took, which))
