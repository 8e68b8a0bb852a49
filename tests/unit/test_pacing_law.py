"""The law of adaptive depth, simulated: nearly as fast as the best fixed depth, whatever is accepted.

One engine runs through all of it, as in tests/gpu/time_adaptive.py: what it learnt of one batch and one table
is wrong for the next. Seeds are fixed, so a figure is the same on every machine.
"""

from __future__ import annotations

import pytest
from pacing_world import (
    BATCHES,
    HOST_MS,
    MIXES,
    SPEC,
    STARTS,
    TABLES,
    Engine,
    best_fixed,
    mixed,
    round_ms,
    started,
)

from eyas.engine.speculation import depth as depth_module
from eyas.engine.speculation import round_times
from eyas.engine.speculation.depth import AcceptanceRates, AdaptiveDepth

LAW = 0.98
MANY, PLAIN = 64, 0.97  # of batches so large, where plain rounds are best
CHANGED = 0.93  # of the best, from the moment on at which acceptance changes: learning takes a part of it


def shares(engine: Engine, batches: tuple[int, ...], learn: float, count: float) -> dict[str, float]:
    """Of the best fixed depth's speed, by batch and table, in windows of `count` milliseconds."""
    found = {}
    for batch in batches:
        for rate in TABLES:
            engine.batch(batch)
            engine.run(rate, learn)
            found[f"{batch} at {rate}"] = engine.run(rate, count).speed / best_fixed(batch, rate)
    return found


def least(engine: Engine, batches: tuple[int, ...], rate: float, ms: float = 3000.0) -> float:
    """The smallest share, each batch counted from its first round."""
    found = []
    for batch in batches:
        engine.batch(batch)
        found.append(engine.run(rate, ms).speed / best_fixed(batch, rate))
    return min(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "learn", "count"),
    [
        pytest.param((4, 64), 1000.0, 4000.0, id="some"),
        pytest.param(BATCHES, 2000.0, 8000.0, id="all", marks=pytest.mark.slow),
    ],
)
def test_nearly_as_fast_as_the_best_fixed_depth(batches: tuple[int, ...], learn: float, count: float) -> None:
    """Where plain rounds are best in large batches, less: what keeps the head up to date takes 1.5 % of the
    time there, and trials, whose rounds take nearly twice as long, 0.5 %.
    """
    found = shares(Engine(started(), seed=2), batches, learn, count)
    bounds = {f"{batch} at {rate}": bound(batch, rate) for batch in batches for rate in TABLES}
    assert all(share >= bounds[cell] for cell, share in found.items()), found


@pytest.mark.parametrize(
    "batches", [pytest.param((64,), id="some"), pytest.param(BATCHES, id="all", marks=pytest.mark.slow)]
)
def test_six_mixes_of_traffic(batches: tuple[int, ...]) -> None:
    """Through one engine, a mix after the other; as it is without any option."""
    engine, found = Engine(started(), seed=2), {}
    for batch in batches:
        for mix in MIXES:
            rates = mixed(mix, batch)
            engine.batch(batch)
            engine.run(rates, 2000.0)
            found[f"{batch}, {mix}"] = float(engine.run(rates, 6000.0).speed / best_fixed(batch, rates))
    print({cell: round(share, 3) for cell, share in found.items()})
    plain = {f"{b}, {m}" for b in batches for m in MIXES if best_fixed(b, mixed(m, b)) <= b / round_ms(b, 0)}
    assert all(
        share >= (PLAIN if cell in plain or len(batches) > 1 else LAW) for cell, share in found.items()
    ), found


def bound(batch: int, rate: float) -> float:
    """Of the best fixed depth's speed, what must be reached."""
    plain = batch / round_ms(batch, 0) >= best_fixed(batch, rate)
    return PLAIN if plain and batch >= MANY else LAW


@pytest.mark.slow
def test_with_what_learning_costs() -> None:
    """Windows of 10 s that begin with the change."""
    found = shares(Engine(started(), seed=2), BATCHES, 0.0, 10_000.0)
    assert min(found.values()) >= 0.96, found


def in_moments(batches: tuple[int, ...], seed: int, held_up: float = 2.0) -> dict[str, float]:
    """As tests/gpu/time_adaptive.py measures: batches begin again and again, and some moments are counted."""
    engine, found = Engine(started(), seed=seed, held_up=held_up), {}
    for batch in batches:
        for rate in TABLES:
            moments = []
            for _ in range(4):
                engine.batch(batch)
                engine.run(rate, 700.0)
            for _ in range(4):
                engine.batch(batch)
                moments.append(engine.run(rate, 350.0))
            speed = sum(one.tokens for one in moments) / sum(one.ms for one in moments)
            found[f"{batch} at {rate}"] = speed / best_fixed(batch, rate)
    return found


@pytest.mark.slow
def test_rounds_that_newcomers_hold_up_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rounds of every batch take up to three times as long, whatever their depth."""
    found = in_moments((16, 64), seed=4)
    assert min(found.values()) >= 0.975, found
    monkeypatch.setattr(round_times, "LATE", 1e9)
    assert min(in_moments((16, 64), seed=4).values()) < min(found.values()) - 0.01


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 6])
def test_moments_of_all_batches(seed: int) -> None:
    """Four seconds after each change of what is accepted, which are 100 rounds of the largest batches: it
    still learns there.
    """
    found = in_moments(BATCHES, seed)
    assert min(found.values()) >= 0.96, found


@pytest.mark.slow
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 64])
def test_acceptance_that_goes_and_returns(batch: int) -> None:
    engine = Engine(started(), seed=3)
    engine.batch(batch)
    for rate in (0.75, 0.0, 0.75, 0.95, 0.5, 0.0):
        share = engine.run(rate, 10_000.0).speed / best_fixed(batch, rate)
        assert share >= CHANGED, (rate, share)


def test_times_are_learnt_while_it_runs() -> None:
    """Nothing was measured before, and in large batches deep rounds take twice what is guessed."""
    for rate in TABLES:
        engine = Engine(AdaptiveDepth(SPEC, 64))
        assert least(engine, (1, 64), rate) >= 0.95, rate


def test_the_deepest_rounds_are_left_though_others_are_believed_slow() -> None:
    """A start measured all depths but the deepest 1.7 times too long."""
    policy = started()
    for batch in STARTS:
        for depth in policy.depths[:-1]:
            policy.times.measured(batch, depth, 1.7e-3 * (round_ms(batch, depth) + HOST_MS))
    engine = Engine(policy, seed=2)
    engine.batch(64)
    engine.run(0.95, 1000.0)
    engine.run(0.75, 5000.0)
    assert engine.run(0.75, 10_000.0).speed / best_fixed(64, 0.75) >= 0.95


@pytest.mark.slow
def test_a_trial_that_is_held_up_leaves_trials_affordable() -> None:
    """A second beside rounds of 4 ms: a host that pauses must not leave rounds plain for minutes."""
    engine = Engine(started())
    engine.batch(4)
    engine.run(0.0, 2000.0)
    engine.hold_up(0.0, 1000.0)
    assert engine.run(0.95, 30_000.0).speed / best_fixed(4, 0.95) >= 0.8


def test_looks_cost_what_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is ever accepted, the share of time beyond plain rounds and what they leave."""
    lost = []
    for budget in (0.0, depth_module.BUDGET):
        monkeypatch.setattr(depth_module, "BUDGET", budget)
        engine = Engine(started(), noise=0.0)
        engine.batch(64)
        engine.run(0.0, 500.0)
        lost.append(1.0 - engine.run(0.0, 8000.0).speed / best_fixed(64, 0.0))
    assert 0.0 < lost[1] - lost[0] < 1.5 * depth_module.BUDGET, lost


def test_what_never_tries_never_learns_that_acceptance_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth_module, "BUDGET", 0.0)
    engine = Engine(started())
    engine.batch(8)
    engine.run(0.0, 2000.0)
    assert engine.run(0.95, 4000.0).speed < 0.5 * best_fixed(8, 0.95)


def test_wrong_rules_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that looks at tokens alone; trials that are not paid for; counts that never forget."""
    with monkeypatch.context() as patch:
        patch.setattr(depth_module, "best", lambda tokens, seconds, current: int(tokens.argmax()))
        assert least(Engine(started()), (64,), 0.5) < 0.9
    with monkeypatch.context() as patch:
        patch.setattr(depth_module, "BUDGET", 1.0)
        assert least(Engine(started()), (256,), 0.0) < 0.95
    monkeypatch.setattr(AcceptanceRates, "_forget", lambda self: None)
    engine = Engine(started())
    engine.batch(4)
    engine.run(0.95, 6000.0)
    assert engine.run(0.0, 3000.0).speed / best_fixed(4, 0.0) < CHANGED


@pytest.mark.parametrize(
    ("batch", "rate", "beside"), [(4, 0.95, 7), (64, 0.95, 7), (128, 0.75, 0), (4, 0.0, 0)]
)
def test_beside_prompts_rounds_are_plain_unless_the_deepest_lose_less(
    batch: int, rate: float, beside: int
) -> None:
    """128 at 0.75 draft one token each, and would lose a round with the deepest."""
    engine = Engine(started())
    assert engine.policy.beside_prompts == SPEC.steps, "before anything is known"
    engine.batch(batch)
    engine.run(rate, 8000.0)
    assert engine.policy.beside_prompts == beside
