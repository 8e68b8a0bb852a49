"""The kind of rounds as a choice, simulated: a head drafts, or waits while drafts are looked up, or neither.

Times are those of `pacing_world`; a round in which the head waits takes what one of its chains does without
its steps, and half of what two such rounds leave to it.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pacing_world import DEPTHS, HOST_MS, SPEC, STARTS, catch_up_ms, round_ms, worth

from eyas.engine.batch.tree import DraftCounts
from eyas.engine.speculation import depth as depth_module
from eyas.engine.speculation.depth import AdaptiveDepth, DecodingBatch
from eyas.engine.speculation.depth_pacing import DepthPacing

ALONE = -SPEC.deepest
RATES = {"prose": (0.75, 0.1), "copies": (0.8, 0.95), "strange": (0.05, 0.9), "nothing": (0.05, 0.05)}
"""Of a head's drafts and of those that are looked up, once those above them were accepted."""


def ms_of(batch: int, depth: int) -> float:
    """A round of any kind."""
    if depth >= 0:
        return round_ms(batch, depth)
    steps = SPEC.steps * (0.19 + 0.0012 * batch)
    return round_ms(batch, SPEC.steps) - steps + catch_up_ms(batch, 2 * (SPEC.steps + 1), 0) / 2


def speed(batch: int, kind: str, depth: int) -> float:
    """Tokens per millisecond of a fixed kind and depth."""
    head, looked_up = RATES[kind]
    rate = looked_up if depth < 0 else head
    return batch * worth(rate, abs(depth)) / ms_of(batch, depth)


def started(batch: int) -> AdaptiveDepth:
    """A policy that knows what a start measures."""
    policy = AdaptiveDepth(SPEC, batch, looks_up=True)
    for size in STARTS:
        for depth in policy.depths:
            policy.times.measured(size, depth, 1e-3 * (ms_of(size, depth) + HOST_MS))
    return policy


class Rounds:
    """`batch` sequences that decode for ever; a policy's steps land one late."""

    def __init__(self, policy: AdaptiveDepth, batch: int, seed: int = 1) -> None:
        self.policy, self.batch = policy, batch
        self._random = np.random.default_rng(seed)
        self._riders = DecodingBatch(*(np.arange(batch),) * 2, np.full(batch, SPEC.steps))
        self._before = 0
        self._flying: tuple[Any, ...] | None = None

    def run(self, kind: str, ms: float) -> float:
        """Tokens per millisecond over so long."""
        tokens = passed = 0.0
        head, looked_up = RATES[kind]
        while passed < ms:
            depth, before = self.policy.choose(self._riders), self._before
            by = before if depth < 0 < before else depth  # whose drafts these are
            rate, drafts = looked_up if by < 0 else head, min(abs(by), abs(depth))
            kept = self._random.random((self.batch, SPEC.steps)) < rate
            accepted = (kept & (np.arange(SPEC.steps) < drafts)).cumprod(1).sum(1)
            self._land()
            took = ms_of(self.batch, depth)
            seen = took * self._random.lognormal(0.0, 0.02)
            self._flying = by, depth, accepted, drafts, seen, depth == before
            tokens, passed, self._before = tokens + self.batch * worth(rate, drafts), passed + took, depth
        return tokens / passed

    def _land(self) -> None:
        if self._flying is not None:
            by, depth, accepted, drafts, ms, alike = self._flying
            self.policy.landed(self._riders, by, accepted, np.full(self.batch, drafts))
            gave = self.batch + int(accepted.sum())
            self.policy.took(self.batch, depth, 1e-3 * ms, gave, alike=alike)


@pytest.mark.parametrize("batch", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 64))])
def test_nearly_as_fast_as_the_best_kind_and_depth(batch: int) -> None:
    """One after the other, and back: what was learnt of one is wrong for the next."""
    rounds = Rounds(started(batch), batch)
    found: dict[tuple[str, int], float] = {}
    for kind in (*RATES, "prose", "strange"):
        rounds.run(kind, 3000.0 if batch < 64 else 12_000.0)  # a look is dear there, and saved up for
        best = max(speed(batch, kind, depth) for depth in (*DEPTHS, ALONE))
        found[kind, len(found)] = rounds.run(kind, 4000.0) / best
    print({name: round(share, 3) for name, share in found.items()})
    assert min(found.values()) >= 0.97, found


def test_each_kind_is_the_best_somewhere() -> None:
    best = {kind: max((*DEPTHS, ALONE), key=lambda depth: speed(1, kind, depth)) for kind in RATES}
    assert best["prose"] > 0 and best["nothing"] == 0 and best["copies"] == best["strange"] == ALONE


def test_what_never_tries_the_other_kind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth_module, "BUDGET", 0.0)
    rounds = Rounds(started(8), 8)
    rounds.run("nothing", 2000.0)
    assert rounds.run("strange", 4000.0) < 0.8 * speed(8, "strange", ALONE)


def test_the_first_round_that_lets_a_head_wait_has_its_drafts() -> None:
    """What they are worth says something of the head; later ones are of what was looked up, found or not."""
    pacing = DepthPacing(AdaptiveDepth(replace(SPEC, ngram=True), 2, looks_up=True))
    learnt: list[tuple[int, int]] = []
    pacing.depths.landed = lambda batch, depth, accepted, offered: learnt.append((depth, int(offered[0])))  # type: ignore[method-assign]
    for depth, offered in ((3, 3), (ALONE, 3), (ALONE, 0), (ALONE, 5), (0, 0), (ALONE, 2)):
        pacing.landed([landed(offered)], depth, 0.004)
    assert learnt == [(3, 3), (3, 3), (ALONE, 1), (ALONE, 5), (ALONE, 2)]


def landed(offered: int) -> Any:
    limits = SimpleNamespace(deepest=0)
    request = SimpleNamespace(speculative=True, draft_limits=limits)
    seq = SimpleNamespace(slot=0, occupancy=1, generation=SimpleNamespace(request=request))
    work = SimpleNamespace(seq=seq, occupancy=1, round=True)
    return SimpleNamespace(work=work, drafts=DraftCounts(0, offered, offered), tokens=(5,))
