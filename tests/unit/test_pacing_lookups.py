"""Adaptive depth where drafts are looked up: rounds without any are rounds that were wide for nothing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from pacing_world import SPEC, Rider, round_ms, started

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.types import RequestDraftLimits
from eyas.engine.batch.tree import DraftCounts
from eyas.engine.speculation import depth as depth_module
from eyas.engine.speculation.depth_pacing import DepthPacing, pacing_of

ROUNDS = {1: 1500, 32: 500, 64: 500}
PROSE = (0.22, 0.3)  # how often something is found; the chance of each draft, once those before it were right
COPIES = (0.7, 0.95)


class World:
    """`batch` sequences, drafts found for each in a share of rounds; times as of a head's, less it."""

    def __init__(self, batch: int, text: tuple[float, float], limit: int = 0) -> None:
        request = SimpleNamespace(speculative=True, draft_limits=RequestDraftLimits(steps=limit))
        self.seqs = [
            Rider(slot=i, occupancy=i, generation=SimpleNamespace(request=request)) for i in range(batch)
        ]
        self.found, self.right = text
        self.random = np.random.default_rng(3)

    def tokens(self, depth: int) -> float:
        """Of a round, in the mean."""
        drafts = sum(self.right**i for i in range(1, depth + 1))
        return len(self.seqs) * (1.0 + self.found * drafts)

    def ms(self, depth: int) -> float:
        return round_ms(len(self.seqs), depth) - (0.25 + 0.19 * depth if depth else 0.0)

    def speed(self, pacing: DepthPacing) -> float:
        """Tokens per millisecond over rounds as the policy chooses them."""
        tokens = ms = 0.0
        for _ in range(ROUNDS[len(self.seqs)]):
            pacing.choose(self.seqs, [True] * len(self.seqs))
            depth = pacing.depth
            tokens, ms = tokens + self.tokens(depth), ms + self.ms(depth)
            pacing.landed([self.landed(seq, depth) for seq in self.seqs], depth, 1e-3 * self.ms(depth))
        return tokens / ms

    def landed(self, seq: SimpleNamespace, depth: int) -> SimpleNamespace:
        offered = depth if self.random.random() < self.found else 0
        right = (self.random.random(offered) < self.right).cumprod().sum()
        work = SimpleNamespace(seq=seq, occupancy=seq.occupancy, round=True)
        tokens = (0,) * (1 + int(right))
        return SimpleNamespace(work=work, tokens=tokens, drafts=DraftCounts(int(right), offered, offered))

    def best(self) -> float:
        """Of the fixed depths."""
        return max(self.tokens(depth) / self.ms(depth) for depth in (0, 1, 3, 5, 7))


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("text", [PROSE, COPIES], ids=["prose", "copies"])
def test_no_batch_and_no_text_is_slower_than_the_best_fixed_depth(
    batch: int, text: tuple[float, float]
) -> None:
    """From the first round on, so what is learnt at first, and trials of one depth less, take their part."""
    world = World(batch, text)
    assert world.speed(DepthPacing(started(), sparse=True)) >= 0.975 * world.best()


def test_drafts_that_are_missing_and_do_not_count_make_rounds_too_wide() -> None:
    """What is found is often right: a policy that hears of nothing else drafts for the other rounds too."""
    world = World(64, (0.05, 0.9))
    heard = world.speed(DepthPacing(started(), sparse=True)) / world.best()
    unheard = world.speed(DepthPacing(started())) / world.best()
    assert heard >= 0.98 and unheard < 0.9


def test_what_a_request_did_not_ask_for_is_not_missing() -> None:
    """Of limits on its drafts, and of a round that had room for fewer."""
    pacing = DepthPacing(started(), sparse=True)
    for limit, depth, accepted, offered, counts in (
        (0, 7, 0, 0, 1),
        (0, 7, 2, 2, 3),
        (0, 7, 7, 7, 7),
        (0, 1, 1, 1, 1),
        (2, 7, 2, 2, 2),
        (0, 0, 0, 0, 0),
    ):
        [seq] = World(1, PROSE, limit).seqs
        one = SimpleNamespace(work=SimpleNamespace(seq=seq), drafts=DraftCounts(accepted, offered, offered))
        assert pacing._offered(one, depth) == counts
    seq.generation.request.speculative = False
    assert pacing._offered(one, 7) == 0


def test_only_lookups_alone_are_sparse() -> None:
    adaptive = SpeculationConfig(SPEC.steps, 1, SPEC.draft_tokens, ngram=True, adaptive=True)
    beside, alone = (pacing_of(EngineConfig(draft=draft, speculation=adaptive)) for draft in ("head", None))
    assert beside is not None and not beside._sparse
    assert alone is not None and alone._sparse
    assert pacing_of(EngineConfig(draft=None)) is None


def test_a_plain_round_looks_at_no_sequence_unless_a_choice_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before it nor when it has landed: the host has other work in large batches."""
    world, pacing, looks = World(32, (1.0, 0.0)), DepthPacing(started()), [0]
    limit = DepthPacing._limit

    def counted(self: DepthPacing, seq: SimpleNamespace) -> int:
        looks[0] += 1
        return limit(self, seq)

    monkeypatch.setattr(DepthPacing, "_limit", counted)
    monkeypatch.setattr(depth_module, "BUDGET", 0.0)
    world.speed(pacing)
    rounds = ROUNDS[32]
    assert pacing.depth == 0 and looks[0] == 32 * rounds / depth_module.STABLE_ROUNDS
    told = []
    monkeypatch.setattr(pacing.depths, "landed", lambda *args: told.append(args))
    world.speed(pacing)
    assert not told
