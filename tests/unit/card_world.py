"""A made-up engine on a card like an H200, and the moments in which `tests.gpu.time_mixes` watches one.

Measured on 2026-11-30 (batches of 128 and 256, chains of 0 to 7): a key in a context adds 30 ns to a round,
at every depth. Under load rounds of many rows get longer by up to 8 % within a second, and plain ones do not.
The first plain rounds after others take a sixth longer.
"""

from __future__ import annotations

import numpy as np
from pacing_world import DEPTHS, MIXES, SPEC, Engine, Rates, Run, round_ms

from eyas.engine.speculation.depth import AdaptiveDepth, DecodingBatch

KEY_NS, PROMPT = 30.0, 16
HOT, HEAT_MS = 0.08, 300.0
FIRST_PLAIN, FIRST_ROUNDS = 0.17, 4  # of a plain round
LESSONS, TURNS = 5, 4
BRIEF, LEARNT, COUNTED = (8, 48, 120.0, 300.0), (16, 160, 500.0, 800.0), (16, 64, 200.0, 400.0)
"""Moments: tokens per sequence before, and within; milliseconds at least and at most."""


def together(mix: str) -> np.ndarray:
    """The chance of each draft in turn, once those above it are accepted, of the sequences of a mix."""
    each = np.array(MIXES[mix])
    reached = np.array([np.mean(each**depth) for depth in range(SPEC.steps + 1)])
    return np.asarray(reached[1:] / reached[:-1])


def worths(chances: np.ndarray) -> np.ndarray:
    """Tokens of a round, in the mean, by depth: float64 [steps + 1]."""
    return 1.0 + np.concatenate(([0.0], np.cumsum(np.cumprod(chances))))


class Card(Engine):
    """Batches whose contexts grow. A depth that is `fixed` teaches the policy nothing."""

    def __init__(self, policy: AdaptiveDepth, seed: int) -> None:
        super().__init__(policy, seed, noise=0.015)
        self.fixed: int | None = None
        self._heat = 0.0
        self._plain = FIRST_ROUNDS  # plain rounds in a row
        self._contexts = np.zeros(0)

    def batch(self, size: int) -> None:
        super().batch(size)
        self._flying, self._before, self._heat, self._plain = None, 0, 0.0, FIRST_ROUNDS
        self._contexts = np.full(size, float(PROMPT))

    def moment(
        self, size: int, chances: np.ndarray, lasts: tuple[int, int, float, float], fixed: int | None = None
    ) -> Run:
        """A batch that begins together and is given up at the end."""
        ramp, tokens, least, most = lasts
        self.fixed = fixed
        self.batch(size)
        while self._contexts.mean() < PROMPT + ramp:
            self._round(chances)
        found = Run()
        while found.ms < least or (self._contexts.mean() < PROMPT + ramp + tokens and found.ms < most):
            gave, ms, depth = self._round(chances)
            found.tokens, found.ms = found.tokens + gave, found.ms + ms
            found.rounds[depth] = found.rounds.get(depth, 0) + 1
        return found

    def cells(self, batch: int, *mixes: str) -> dict[str, float]:
        """Depth as it adapts over the best fixed depth, in turns, by mix."""
        half = np.full(SPEC.steps, 0.5)
        brief = {depth: self.moment(batch, half, BRIEF, depth) for depth in DEPTHS}
        took = {depth: seen.ms / sum(seen.rounds.values()) for depth, seen in brief.items()}
        found = {}
        for mix in mixes:
            chances = together(mix)
            best = max(DEPTHS, key=lambda depth: worths(chances)[depth] / took[depth])
            for _ in range(LESSONS):
                self.moment(batch, chances, LEARNT)
            turns = [
                (self.moment(batch, chances, COUNTED, depth)) for _ in range(TURNS) for depth in (None, best)
            ]
            adapted, fixed = (
                sum(one.tokens for one in some) / sum(one.ms for one in some)
                for some in (turns[::2], turns[1::2])
            )
            found[f"{batch}, {mix}"] = adapted / fixed
        return found

    def _round(self, rate: Rates) -> tuple[float, float, int]:
        chances = np.asarray(rate)
        size, keys = len(self._contexts), int(self._contexts.sum())
        riders = DecodingBatch(np.arange(size), self._occupancies, np.full(size, SPEC.steps), keys)
        depth = self.policy.choose(riders) if self.fixed is None else self.fixed
        alike = depth == self._before
        drafted, late = self._catch_up(depth)
        ms = round_ms(size, depth) + late + 1e-6 * KEY_NS * keys
        self._plain = 0 if depth else self._plain + 1
        ms += FIRST_PLAIN * round_ms(size, 0) if 0 < self._plain <= FIRST_ROUNDS else 0.0
        self._heat += (1.0 - self._heat) * ms / HEAT_MS
        ms *= 1.0 + (HOT * max(0.0, 2.0 * self._heat - 1.0) if depth else 0.0)
        kept = self._random.random((size, SPEC.steps)) < chances
        accepted = (kept & (np.arange(SPEC.steps) < drafted[:, None])).cumprod(1).sum(1)
        if self.fixed is None:
            self._land()
        seen = ms * self._random.lognormal(0.0, self._noise)
        self._flying = riders, depth, accepted, drafted, seen, alike
        self._before = depth
        self._contexts = self._contexts + accepted + 1
        return float(worths(chances)[drafted].sum()), ms, depth
