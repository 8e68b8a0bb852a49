"""How long steps take over what a table says: measured by engines, put together by gateways."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from eyas.common.step_times import (
    CHANGE,
    ENOUGH_S,
    FADE_S,
    MOST,
    UNSEEN,
    PaceMeter,
    StepPace,
    alike,
    mean_pace,
)
from eyas.engine.loop.step_loop import StepLoop, StepPaces
from eyas.simulator.hardware import example
from gateway.routing.preference import PaceMemory

TIMES = example().times


def ran(meter: PaceMeter, decoding: int, rows: int, factor: float, seconds: float) -> None:
    """Steps of 10 ms for `seconds`, as predicted."""
    for _ in range(round(seconds / 0.01)):
        meter.ran(decoding, rows, factor * 0.01, 0.01)


# --- the engine's side -------------------------------------------------------------------------------------


def test_each_kind_of_step_has_a_pace_of_its_own() -> None:
    meter = PaceMeter()
    assert meter.pace == UNSEEN
    for decoding, rows, factor in ((8, 0, 1.1), (0, 512, 1.2), (8, 504, 1.5)):
        ran(meter, decoding, rows, factor, 1.0)
    assert meter.pace == StepPace(pytest.approx(1.1), pytest.approx(1.2), pytest.approx(1.5))


def test_a_pace_follows_its_steps_and_stays_without_any() -> None:
    meter = PaceMeter()
    ran(meter, 8, 0, 1.0, 10.0)
    ran(meter, 8, 504, 2.0, 10.0)
    ran(meter, 8, 0, 1.5, FADE_S)
    assert meter.pace.decode == pytest.approx(1.0 + 0.5 * 0.68, abs=0.03)
    assert meter.pace.mixed == pytest.approx(2.0)


def test_a_few_steps_say_nothing_and_one_that_hung_says_little() -> None:
    meter = PaceMeter()
    ran(meter, 8, 0, 3.0, 0.9 * ENOUGH_S)
    assert meter.pace.decode == 0.0
    ran(meter, 8, 0, 1.0, 30.0)
    meter.ran(8, 0, 60.0, 0.01)
    assert meter.pace.decode < 1.0 + 2 * MOST * 0.01 / FADE_S


def work(start: int, tokens: int, *, round: bool) -> Any:
    return SimpleNamespace(start=start, tokens=[0] * tokens, round=round, fold=0)


@pytest.mark.parametrize(
    ("works", "true"),
    [
        ([work(999, 1, round=True)] * 40, TIMES.step_s(40, 40_000)),
        ([work(1024, 1000, round=False)], TIMES.step_s(0, 0, 1000, 1000 * 1524)),
        ([work(99, 1, round=True), work(0, 400, round=False)], TIMES.step_s(1, 100, 400, 400 * 200)),
    ],
    ids=["decode", "prompt", "mixed"],
)
def test_a_step_is_compared_with_what_the_table_says_of_its_works(works: list[Any], true: float) -> None:
    paces = StepPaces(TIMES)
    for _ in range(200):
        paces.landed(works, 1.25 * true)
    seen = [value for value in (paces.pace.decode, paces.pace.prompt, paces.pace.mixed) if value]
    assert seen == [pytest.approx(1.25)]


def test_a_step_lasts_from_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is launched while that one runs. After a pause it lasts from its launch."""
    now, told, drafted_for = 0.0, [], []
    monkeypatch.setattr("eyas.engine.loop.step_loop.time.monotonic", lambda: now)

    class Runner:
        drafts, ahead = False, True

        def launch(self, works: list[Any]) -> Any:
            flown = {"complete": lambda: None, "land": self.land}
            return SimpleNamespace(works=works, launched=now, shape=1, depth=None, over=False, **flown)

        def land(self) -> list[Any]:
            nonlocal now
            now += 0.004
            return []

    seq = SimpleNamespace(generation=SimpleNamespace(kind=None, began=1.0), in_flight=0, tree=None)
    seq.grow = lambda count, drafted: None
    composed = [SimpleNamespace(seq=seq, round=True, tokens=(1,), sample=True, followed=True, fold=0)]
    pool = SimpleNamespace(launched=lambda: None, landed=lambda: None, copying=False)
    scheduler = SimpleNamespace(
        schedule=lambda: composed, preempted=[], pool=pool, crowded=False, state_copies=list
    )
    drafting = SimpleNamespace(
        record_step=lambda landed, seconds: drafted_for.append(seconds),
        blocks_next_step=lambda: False,
        wait_s=0.0,
        begin_prompts=lambda works: None,
    )
    committer = SimpleNamespace(drafting=drafting, commit=lambda landed: None)
    paces = SimpleNamespace(landed=lambda works, seconds: told.append(seconds))
    loop = StepLoop(scheduler, Runner(), committer, paces=paces)  # type: ignore[arg-type]
    for _ in range(4):
        loop.step()
    composed = []
    loop.step()
    loop.step()
    now += 5.0
    composed = [work(0, 1, round=True)]
    composed[0].seq, composed[0].sample, composed[0].followed = seq, True, True
    for _ in range(2):
        loop.step()
    assert told == drafted_for == [pytest.approx(0.004)] * 5


# --- the gateway's side ------------------------------------------------------------------------------------


def test_what_some_worker_has_seen_counts_and_what_none_has_is_tried() -> None:
    told = [StepPace(1.2, 0.0, 1.5), StepPace(1.0, 0.0, 0.0), UNSEEN]
    assert mean_pace(told) == StepPace(pytest.approx(1.1), pytest.approx(1.1), 1.5)
    assert mean_pace([UNSEEN]) == mean_pace([]) == StepPace()


def test_small_differences_are_none() -> None:
    assert alike(StepPace(1.0 + 0.9 * CHANGE), StepPace())
    assert not alike(StepPace(mixed=1.0 - 1.1 * CHANGE), StepPace())


def test_what_was_seen_with_other_preferences_is_not_forgotten() -> None:
    memory, slow = PaceMemory(), StepPace(1.0, 1.0, 1.5)
    assert memory.at(3) == StepPace()
    memory.record(0, slow)
    assert memory.at(1) == memory.at(0) == slow, "all that is known"
    memory.record(1, StepPace(1.3, 1.0, 1.5))
    memory.record(1, StepPace(1.31, 1.0, 1.5))
    assert memory.at(0) == slow and memory.at(7) == StepPace(1.3, 1.0, 1.5)


def test_a_pace_makes_steps_of_its_kind_longer() -> None:
    slow = replace(TIMES, pace=StepPace(1.1, 1.2, 1.5))
    for factor, step in ((1.1, (8, 8000)), (1.2, (0, 0, 512)), (1.5, (8, 8000, 504, 1e5))):
        assert slow.step_s(*step) == pytest.approx(factor * TIMES.step_s(*step))
