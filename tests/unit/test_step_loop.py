"""How long the loop listens while a step is in flight."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from eyas.engine.loop.step_loop import LOOK_S, StepLoop

STEP_S = 0.2  # as long as the clock has learned that a step takes


@dataclass
class Flight:
    """Over when the test says so."""

    works: tuple[Any, ...]
    shape: str = "any"
    over: bool = False
    launched: float = field(default_factory=time.monotonic)

    def land(self) -> list[Any]:
        self.over = True
        return []


class Runner:
    drafts, ahead = False, True

    def __init__(self) -> None:
        self.flights: list[Flight] = []

    def launch(self, works: list[Any]) -> Flight:
        self.flights.append(Flight(tuple(works)))
        return self.flights[-1]


def a_loop(runner: Runner) -> StepLoop:
    """Of one sequence that is never done; what it gives is thrown away."""
    seq = SimpleNamespace(generation=SimpleNamespace(kind=None, began=1.0), in_flight=0, tree=None)
    seq.grow = lambda count, drafted: None
    work = SimpleNamespace(seq=seq, round=True, tokens=(1,), sample=True, followed=True)
    pool = SimpleNamespace(launched=lambda: None, landed=lambda: None)
    scheduler = SimpleNamespace(schedule=lambda: [work], preempted=[], pool=pool)
    drafting = SimpleNamespace(stepped=lambda landed, seconds: None)
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
    assert loop.spare_s == LOOK_S, "a step that goes on is looked after often"
    runner.flights[-1].over = True
    assert loop.spare_s == 0.0
    loop.step()
    assert loop.spare_s == 0.0, "it is known now that such a step is short"
