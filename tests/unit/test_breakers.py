"""Breakers and the retry budget, by simulation: a worker that fails at once, and a cluster in trouble."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from eyas.common.errors import Overloaded, Unavailable
from gateway.backends.retries import (
    LEAST_PER_S,
    MAX_IN_ALL,
    MAX_RETRIES,
    MOST_SAVED,
    SHARE,
    RetryBudget,
    RetryState,
)
from gateway.routing.breakers import FAILURES, LONGEST_PAUSE_S, TRIAL_S, CircuitBreaker, WorkerBreakers
from gateway.routing.router import RouterCandidate, choose_prefill
from tests.unit.routed_workers import PREFILL, worker

RATE, WORK_S, SICK = 20.0, 0.1, "w0"


def simulate(sick_s: float, total_s: float, breakers: bool) -> tuple[list[float], list[float]]:
    """Four workers, of which one fails at once for `sick_s`: (when it was tried, when it succeeded)."""
    rng, now = random.Random(1), 0.0
    known: dict[str, CircuitBreaker] = {}
    busy: list[tuple[float, str]] = []  # until when, where
    tried, served = [], []
    while now < total_s:
        now += rng.expovariate(RATE)
        for end, name in [one for one in busy if one[0] <= now]:
            busy.remove((end, name))
            known[name] = known.get(name, CircuitBreaker()).succeeded()
            served += [end] if name == SICK else []
        loads = Counter(name for _, name in busy)
        workers = [
            RouterCandidate(
                worker(name, PREFILL, running=loads[name]).info,
                broken=breakers and not known.get(name, CircuitBreaker()).allows(now),
            )
            for name in ("w0", "w1", "w2", "w3")
        ]
        found = choose_prefill(workers)
        assert found is not None
        name = found.info.worker
        known[name] = known.get(name, CircuitBreaker()).sent(now)
        if name == SICK and now < sick_s:
            tried.append(now)
            known[name] = known[name].failed(now)
        else:
            busy.append((now + WORK_S, name))
    return tried, served


def test_a_worker_that_fails_at_once_draws_no_requests_and_comes_back() -> None:
    tried, served = simulate(60.0, 120.0, breakers=True)
    assert len(tried) <= FAILURES + 6  # trials after 1, 2, 4, 8, 16, 30 s
    assert served and min(served) < 60.0 + LONGEST_PAUSE_S + 1
    assert len(served) > 100  # and it is one like the others again
    hole, _ = simulate(60.0, 120.0, breakers=False)
    assert len(hole) > 300  # idle because it fails, it is chosen again and again


def test_a_few_failures_pass_nobody_over() -> None:
    breaker = CircuitBreaker()
    for _ in range(10):
        for _ in range(FAILURES - 1):
            breaker = breaker.failed(1.0)
        assert breaker.allows(1.0)
        breaker = breaker.succeeded()
    assert breaker == CircuitBreaker()


def test_many_failures_at_once_are_one() -> None:
    breaker = CircuitBreaker()
    for _ in range(256):
        breaker = breaker.failed(5.0)
    assert not breaker.allows(5.9) and breaker.allows(6.0)
    breaker = breaker.sent(6.0)
    assert not breaker.allows(6.1)  # one trial at a time
    assert breaker.allows(6.0 + TRIAL_S)  # unless it is lost
    assert breaker.succeeded().allows(6.1)
    assert not breaker.failed(6.2).allows(8.1) and breaker.failed(6.2).allows(8.2)


def test_a_new_engine_has_failed_nothing() -> None:
    breakers = WorkerBreakers()
    breakers.note("w", 1, CircuitBreaker().failed(0.0))
    assert breakers.of("w", 1).failures == 1 and breakers.of("w", 2) == CircuitBreaker()
    breakers.note("w", 1, CircuitBreaker())
    assert breakers._breakers == {}


def test_broken_workers_are_taken_before_none() -> None:
    broken = RouterCandidate(worker("a", PREFILL).info, broken=True)
    sound = worker("b", PREFILL, running=9)
    assert choose_prefill([broken, sound]) == sound
    assert choose_prefill([broken]) == broken
    assert choose_prefill([broken, sound], {"b"}) == broken  # the other one has just failed this request


# --- retries -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [5.0, 200.0])
def test_a_cluster_in_trouble_is_asked_little_more(rate: float) -> None:
    rng, now, budget, tries, asked = random.Random(2), 0.0, RetryBudget(), 0, 0
    while now < 120.0:
        now += rng.expovariate(rate)
        retries = RetryState(budget, now)
        asked += 1
        try:
            while True:
                tries += 1
                retries.spend(Unavailable("no"), 0, now, admitted=False)
        except Unavailable:
            continue
    bound = asked * (1 + SHARE) + LEAST_PER_S * 120 + MOST_SAVED
    assert tries <= bound
    assert tries < 0.7 * asked * (1 + MAX_RETRIES)  # what it would be without a budget


def test_admitted_requests_do_not_depend_on_the_budget() -> None:
    budget = RetryBudget()
    while budget.take(0.0):
        pass
    retries = RetryState(budget, 0.0)
    for _ in range(MAX_RETRIES):
        retries.spend(Unavailable("lost"), 0, 0.0, admitted=True)
    with pytest.raises(Unavailable):
        retries.spend(Unavailable("lost"), 0, 0.0, admitted=True)
    retries.spend(Unavailable("lost"), 7, 0.0, admitted=True)  # tokens came in between
    retries.spend(Overloaded("full"), 7, 0.0, admitted=True)
    with pytest.raises(Unavailable):
        RetryState(budget, 0.0).spend(Unavailable("lost"), 0, 0.0, admitted=False)
    RetryState(budget, 1.0).spend(Unavailable("lost"), 0, 1.0, admitted=False)  # it fills


def test_tokens_in_between_do_not_make_tries_endless() -> None:
    """A request that brings down whatever runs it, after a token each time, ends all the same."""
    retries = RetryState(RetryBudget(), 0.0)
    for tokens in range(1, 1 + MAX_IN_ALL):
        retries.spend(Unavailable("stalled"), tokens, 0.0, admitted=True)
    with pytest.raises(Unavailable, match="stalled"):
        retries.spend(Unavailable("stalled"), 1 + MAX_IN_ALL, 0.0, admitted=True)
    retries.spend(Overloaded("full"), 2 + MAX_IN_ALL, 0.0, admitted=True)  # a full worker has not failed
