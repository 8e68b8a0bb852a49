"""How long the loop listens while a step is in flight."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from eyas.engine.loop import step_loop
from eyas.engine.loop.step_loop import MARGIN_S, POLL_S, StepClock, StepLoop

STEP_S = 0.2  # as long as the clock has learned that a step takes


@dataclass
class InFlightStep:
    """Over when the test says so."""

    works: tuple[Any, ...]
    shape: str = "any"
    depth: None = None
    over: bool = False
    launched: float = field(default_factory=time.monotonic)

    completed: int = 0

    def complete(self) -> None:
        self.completed += 1

    def land(self) -> list[Any]:
        assert self.completed == 1
        self.over = True
        return []


class Runner:
    drafts, ahead = False, True

    def __init__(self) -> None:
        self.flights: list[InFlightStep] = []
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1

    def launch(self, works: list[Any]) -> InFlightStep:
        self.flights.append(InFlightStep(tuple(works)))
        return self.flights[-1]


def a_loop(runner: Runner) -> StepLoop:
    """Of one sequence that is never done; what it gives is thrown away."""
    seq = SimpleNamespace(generation=SimpleNamespace(kind=None, began=1.0), in_flight=0, tree=None)
    seq.grow = lambda count, drafted: None
    work = SimpleNamespace(seq=seq, round=True, tokens=(1,), sample=True, followed=True, fold=0)
    pool = SimpleNamespace(launched=lambda: None, landed=lambda: None)
    scheduler = SimpleNamespace(
        schedule=lambda: [work], preempted=[], pool=pool, crowded=False, state_copies=list
    )
    drafting = SimpleNamespace(
        record_step=lambda landed, seconds: None,
        blocks_next_step=lambda: False,
        wait_s=0.0,
        begin_prompts=lambda works: None,
    )
    committer = SimpleNamespace(drafting=drafting, commit=lambda landed: None)
    return StepLoop(scheduler, runner, committer)  # type: ignore[arg-type]


def test_a_step_that_is_over_is_not_waited_for() -> None:
    """Though one like it was seen to end late: the next is composed at once, and the time is learned anew."""
    runner = Runner()
    loop = a_loop(runner)
    for _ in range(2):
        loop.step()
        time.sleep(STEP_S)
    loop.step()
    assert loop.spare_s == POLL_S, "a step that goes on is looked after often"
    runner.flights[-1].over = True
    assert loop.spare_s == 0.0
    loop.step()
    assert loop.spare_s == 0.0, "it is known now that such a step is short"


def test_what_the_host_commits_is_not_the_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device works on the next step meanwhile, and that ends a step's time after it began."""
    now, step_s, commit_s = 100.0, 0.030, 0.010
    monkeypatch.setattr(step_loop.time, "monotonic", lambda: now)
    began = now

    class Timed(InFlightStep):
        def land(self) -> list[Any]:
            nonlocal now, began
            now = began = began + step_s
            return []

    def commit(landed: list[Any]) -> None:
        nonlocal now
        now += commit_s

    monkeypatch.setattr(f"{__name__}.InFlightStep", Timed)
    loop = a_loop(Runner())
    loop._clock = StepClock(lambda: now)
    monkeypatch.setattr(loop.committer, "commit", commit)
    for _ in range(4):
        loop.step()
    assert loop._clock.spare_s == pytest.approx(step_s - commit_s - MARGIN_S, abs=1e-3)


def test_what_a_drafter_waits_for_lands_before_the_next_step_is_composed() -> None:
    """And when it is waited for no more, steps are in flight again while the next is composed."""
    runner = Runner()
    loop = a_loop(runner)
    for awaited, flying in ((True, 0), (True, 0), (False, 1), (False, 1), (True, 0)):
        loop.committer.drafting.blocks_next_step = lambda awaited=awaited: awaited  # type: ignore[method-assign]
        loop.step()
        assert sum(not flight.over for flight in runner.flights) == flying


def test_at_rest_no_step_is_in_flight() -> None:
    """And the device has done what was launched; the next step begins as the first one did."""
    runner = Runner()
    loop = a_loop(runner)
    loop.step()
    assert [flight.over for flight in runner.flights] == [False]
    loop.quiesce()
    assert [flight.over for flight in runner.flights] == [True]
    assert runner.waited == 1
    loop.quiesce()
    assert len(runner.flights) == 1, "nothing flew"
    loop.step()
    assert [flight.over for flight in runner.flights] == [True, False]
