"""The wait of a request is bounded by its turn: who passes it is shorter, and came soon after it.

The scheduler of an engine under four times as many prompts as it computes, and with pages for a few of them,
on a simulated clock; lengths and rates are those of `s8k` over 32.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceOf

import pytest
from engine_rig import request

from eyas.common.prompt_room import PromptRoom, StepBudget
from eyas.common.step_times import PiecewiseCurve, StepTimes
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence, SequenceWork
from eyas.engine.scheduling.fairness import CallShares, WaitingQueue
from eyas.engine.scheduling.limits import GPU_YIELD, BatchLimits, PromptYield
from eyas.engine.scheduling.scheduler import Scheduler
from eyas.simulator.goodput import quantile
from eyas.simulator.workload import RandomTraffic, SimulatedRequest, poisson
from tests.played_steps import PlayedSteps

SCALE = 32
YIELD = PromptYield(GPU_YIELD.tokens_per_s / SCALE, GPU_YIELD.most_s)
TIMES = StepTimes(PiecewiseCurve(((1, 4.0), (96, 90.0))), PiecewiseCurve(((0, 0.2), (16384, 15.0))), 0.0)
BUDGET = StepBudget(96, 16)
PAGES = 60


def arrivals(seed: int) -> list[SimulatedRequest]:
    return poisson(RandomTraffic(8192 // SCALE, 1024 // SCALE, shortest=0.01), 16.0, 200, seed)


def played(load: SequenceOf[SimulatedRequest], yields: PromptYield, pages: int = PAGES) -> PlayedSteps:
    limits = BatchLimits(
        *(16, 256, BUDGET.chunk_tokens, 1),
        mixed_prefill_budget=BUDGET.mixed_prefill_budget,
        yields=yields,
    )
    steps = PlayedSteps(TIMES, BUDGET, limits, pages)
    steps.run(load)
    return steps


def passed_wrongly(
    load: SequenceOf[SimulatedRequest], steps: PlayedSteps, yields: PromptYield = YIELD
) -> list[tuple[int, int]]:
    """(who waited, who passed it) where the one that passed was no shorter, or came too late for that."""
    return [
        (one, other)
        for one, other in itertools.combinations(range(len(load)), 2)
        if steps.admitted[other] < steps.admitted[one]
        and (
            load[other].prompt >= load[one].prompt
            or load[other].at_s - load[one].at_s >= yields.seconds(load[one].prompt)
        )
    ]


@pytest.mark.parametrize("pages", [PAGES, 40_000])
def test_who_is_passed_is_passed_by_shorter_prompts_that_came_soon_after_it(pages: int) -> None:
    load = arrivals(1)
    steps = played(load, YIELD, pages)
    assert passed_wrongly(load, steps) == []
    assert any(steps.admitted[i + 1] < steps.admitted[i] for i in range(len(load) - 1)), "nobody passed"


def test_the_law_sees_a_prompt_that_yields_for_ever() -> None:
    load = arrivals(1)
    assert passed_wrongly(load, played(load, PromptYield(YIELD.tokens_per_s / 10)))


def test_the_law_sees_small_prompts_that_pass_one_without_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose pages are not free is left out, and the next one gets them."""
    admissions = Scheduler._admissions

    def greedy(self: Scheduler, room: PromptRoom, before: Sequence | None = None) -> list[SequenceWork]:
        works, aside = admissions(self, room, before), []
        while not works and self.waiting and room.rows:
            aside.append(self.waiting.first(self.shares()))
            self.waiting.remove(aside[-1])
            works = admissions(self, room, before)
        for seq in aside:
            self.waiting.add(seq)
        return works

    load = arrivals(1)
    assert passed_wrongly(load, played(load, PromptYield()), PromptYield()) == []
    monkeypatch.setattr(Scheduler, "_admissions", greedy)
    assert passed_wrongly(load, played(load, PromptYield()), PromptYield())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_longest_waits_are_those_of_first_come_first_served(seed: int) -> None:
    """And the median is lower."""
    load = arrivals(seed)
    ours, theirs = (
        sorted(steps.first[i] - load[i].at_s for i in range(len(load)))
        for steps in (played(load, YIELD), played(load, PromptYield()))
    )
    assert quantile(ours, 0.99) <= 1.1 * quantile(theirs, 0.99)
    assert quantile(ours, 0.5) <= 0.7 * quantile(theirs, 0.5)


def test_prompts_of_one_length_are_served_as_they_came() -> None:
    queue = WaitingQueue(YIELD)
    for number, at_s in enumerate((0.0, 1.0, 2.0, 3.0)):
        made = request(9, id=str(number))
        generation = Generation(made, 1, GenerationKind.LOCAL, arrived=at_s, deadline=1e9)
        queue.add(Sequence(number, generation, 0, made.prompt_ids, []))
    order = []
    while len(queue):
        queue.remove(seq := queue.first(CallShares()))
        order.append(seq.uid)
    assert order == [0, 1, 2, 3]
