"""A made-up engine whose depth adapts, on a clock of its own: what its rounds take, and what they give.

Times are those of an 8B model with an EAGLE-3 head on one H200, measured by tests/gpu/time_adaptive.py on
2026-11-24; other batches lie on straight lines between them. What a start measures has neither contexts nor
steps that overlap. It knows the policy alone: no device, no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from eyas.common.config import SpeculationConfig
from eyas.engine.speculation.depth import AdaptiveDepth, DecodingBatch

SPEC = SpeculationConfig(steps=7, topk=1, draft_tokens=8)
DEPTHS = (0, 1, 3, 5, 7)
BATCHES = (1, 4, 16, 64, 128, 256)
TABLES = (0.0, 0.5, 0.75, 0.95)
STARTS = (1, 8, 32, 64, 128, 256)  # batches that are measured at a start
KEPT_ROWS = 16  # plain rounds after which the draft head catches up
HOST_MS = 0.3  # of a step that does not overlap with the one before it
INTERRUPTED, LONGER = 0.01, 0.5  # a share of rounds, and by how much each
ANSWER = 700  # tokens, in the mean
FIRST = 3  # rounds of a batch
ROUND_MS = {
    1: (4.01, 4.32, 4.76, 5.07, 5.52),
    4: (4.01, 4.33, 4.82, 5.25, 5.70),
    16: (4.19, 4.49, 5.25, 6.33, 6.91),
    64: (4.73, 5.98, 8.88, 12.2, 15.4),
    128: (5.81, 8.80, 15.2, 22.0, 28.2),
    256: (8.52, 15.1, 29.5, 43.5, 55.5),
}
"""Of rounds at each of DEPTHS, by sequences."""


class Rider(SimpleNamespace):
    """A sequence without a text."""

    def __len__(self) -> int:
        return 0


def round_ms(batch: int, steps: int) -> float:
    """A round of chains."""
    times = [by_depth[DEPTHS.index(steps)] for by_depth in ROUND_MS.values()]
    return float(np.interp(batch, list(ROUND_MS), times))


def catch_up_ms(batch: int, rows: int, steps: int) -> float:
    """The head over rows that plain rounds left to it, and its drafts below them.

    Before a plain round it only writes keys and values.
    """
    row = 0.0019 if steps else 0.0007
    return 0.3 + row * batch * rows + steps * (0.19 + 0.0012 * batch)


Rates = float | np.ndarray
"""The chance of a draft, once those above it were accepted: of all sequences, or float64 [n] of each."""


MIXES: dict[str, tuple[float, ...]] = {
    "prose": (0.45, 0.55),
    "chat": (0.7, 0.8),
    "code": (0.85, 0.9),
    "copies": (0.95, 0.98),
    "agents": (0.95, 0.5, 0.97, 0.2),  # calls as before, and thoughts
    "strangers": (0.0, 0.05, 0.3),  # a head that was made for other texts
}
"""Chances of a draft of the sequences of a batch, in turns."""


def mixed(mix: str, batch: int) -> np.ndarray:
    """Of each sequence of a batch, float64 [batch]."""
    return np.resize(np.array(MIXES[mix]), batch)


def worth(rate: float, drafts: int) -> float:
    """Tokens of a round, in the mean: luck is no part of a figure."""
    return sum(rate**i for i in range(drafts + 1))


def best_fixed(batch: int, rate: Rates) -> float:
    """Tokens per millisecond of the best fixed depth."""
    rates = np.broadcast_to(rate, batch)
    return max(worths(rates, np.full(batch, depth)).sum() / round_ms(batch, depth) for depth in DEPTHS)


def worths(rates: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """As `worth`, of each sequence: float64 [n]."""
    powers = np.asarray(rates, float)[:, None] ** np.arange(SPEC.steps + 1)
    return np.asarray((powers * (np.arange(SPEC.steps + 1) <= drafts[:, None])).sum(1))


def started(slots: int = max(BATCHES)) -> AdaptiveDepth:
    """A policy that knows what a start measures."""
    policy = AdaptiveDepth(SPEC, slots)
    for batch in STARTS:
        for depth in policy.depths:
            policy.times.measured(batch, depth, 1e-3 * (round_ms(batch, depth) + HOST_MS))
    return policy


@dataclass
class Run:
    """What came of a while: tokens, milliseconds without noise, and how many rounds each depth had."""

    tokens: float = 0.0
    ms: float = 0.0
    rounds: dict[int, int] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        return self.tokens / self.ms


class Engine:
    """Runs `policy` for batches that change; a round is chosen before the one before it has landed.

    An answer ends now and then, and another one takes its slot. `noise`: of times, as a share. `held_up`: by
    how much, at most, the first rounds of a batch are longer, since its prompts keep the host busy.
    """

    def __init__(
        self, policy: AdaptiveDepth, seed: int = 1, noise: float = 0.02, held_up: float = 0.0
    ) -> None:
        self.policy = policy
        self._held_up = held_up
        self._first = 0  # rounds of the batch that are still to be held up
        self._random = np.random.default_rng(seed)
        self._noise = noise
        self._occupancies = np.zeros(0, np.int64)
        self._waiting = np.zeros(0, np.int64)  # rows that the head has yet to take, by sequence
        self._newest = 0
        self._before = 0  # the depth of the round before: what it has drafted
        self._flying: tuple[DecodingBatch, int, np.ndarray, np.ndarray, float, bool] | None = None

    def batch(self, size: int) -> None:
        """From now on `size` new sequences decode."""
        self._occupancies = np.arange(self._newest, self._newest + size)
        self._newest += size
        self._waiting = np.zeros(size, np.int64)
        self._first = FIRST if self._held_up else 0

    def run(self, rate: Rates, ms: float) -> Run:
        """For so long; each draft is accepted with this chance, once those above it were."""
        found = Run()
        while found.ms < ms:
            tokens, took, depth = self._round(rate)
            found.tokens, found.ms = found.tokens + tokens, found.ms + took
            found.rounds[depth] = found.rounds.get(depth, 0) + 1
        return found

    def hold_up(self, rate: float, ms: float) -> None:
        """Runs up to the next round that is as deep as none before it, which takes so much longer."""
        usual, depth = self._before, self._before
        while depth == usual:
            _, _, depth = self._round(rate)
        assert self._flying is not None
        riders, depth, accepted, drafted, took, alike = self._flying
        self._flying = riders, depth, accepted, drafted, took + ms, alike

    def _round(self, rate: Rates) -> tuple[float, float, int]:
        size = len(self._occupancies)
        riders = DecodingBatch(np.arange(size), self._occupancies.copy(), np.full(size, SPEC.steps))
        depth = self.policy.choose(riders)
        alike = depth == self._before
        drafted, late = self._catch_up(depth)
        ms = round_ms(size, depth) + late
        seen = ms * self._random.lognormal(0.0, self._noise)
        seen *= 1.0 + LONGER * (self._random.random() < INTERRUPTED)
        if self._first:
            seen *= 1.0 + self._held_up * self._random.random()
            self._first -= 1
        rates = np.broadcast_to(rate, size)
        kept = self._random.random((size, SPEC.steps)) < rates[:, None]
        accepted = (kept & (np.arange(SPEC.steps) < drafted[:, None])).cumprod(1).sum(1)
        self._land()
        self._flying = riders, depth, accepted, drafted, seen, alike
        self._before = depth
        tokens = float(worths(rates, drafted).sum())
        self._renew(tokens)
        return tokens, ms, depth

    def _catch_up(self, depth: int) -> tuple[np.ndarray, float]:
        """What each sequence's round verifies, and the milliseconds before it."""
        drafted = np.full(len(self._waiting), min(self._before, depth))
        late = self._waiting >= (1 if depth or self._waiting.max() == KEPT_ROWS else KEPT_ROWS)
        ms = 0.0
        if late.any():
            ms = catch_up_ms(int(late.sum()), int(self._waiting[late].max()), depth)
            drafted[late] = depth
            self._waiting[late] = 0
        self._waiting += depth == 0
        return drafted, ms

    def _land(self) -> None:
        if self._flying is None:
            return
        riders, depth, accepted, drafted, ms, alike = self._flying
        self.policy.landed(riders, depth, accepted, drafted)
        self.policy.took(len(riders), depth, 1e-3 * ms, len(riders) + int(accepted.sum()), alike=alike)

    def _renew(self, tokens: float) -> None:
        """Some answers end, and others begin in their slots: prompts cost nothing here."""
        ended = self._random.random(len(self._occupancies)) < tokens / len(self._occupancies) / ANSWER
        count = int(ended.sum())
        self._occupancies[ended] = np.arange(self._newest, self._newest + count)
        self._newest += count
        self._waiting[ended] = 0
