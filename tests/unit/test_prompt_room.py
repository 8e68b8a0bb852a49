"""The prompt rows of a step: the rule, to which an engine, a simulation and a router's estimate keep."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from eyas.common import prompt_room
from eyas.common.prompt_room import StepBudget, WaitingPrompt, rows_of
from eyas.common.step_times import prompt_s
from eyas.engine.scheduling.limits import GPU_YIELD
from eyas.simulator.hardware import example
from eyas.simulator.worker import SimulatedJob, SimulatedWorker
from eyas.simulator.workload import SimulatedRequest
from tests.played_steps import engine

STREAMS, SHORT, ANSWER = 48, 30, 300
LOADS = {
    "long": [8192],
    "a short one behind": [8192, 900],
    "two long ones": [5000, 4500],
    "not long": [4096],
    "many": [8192, 6000, 700],
}


def test_a_lone_long_prompt_has_few_of_the_rows_beside_streams() -> None:
    budget, times = StepBudget(3072, 512), example().times
    assert rows_of(budget, 48, 8192) == 160 - 48 and rows_of(budget, 48, 4096) == 512 - 48
    assert rows_of(budget, 48, 8192, 100) == 160 - 48 and rows_of(budget, 48, 100, 8192) == 512 - 48
    assert rows_of(budget, 0, 8192) == 3072 and rows_of(budget, 48, 8192, 6000) == 3072 - 48
    assert rows_of(StepBudget(3072, 1024), 48, 8192) == 256 - 48
    assert rows_of(StepBudget(512, 512), 48, 8192) == 512 - 48, "all steps are alike"
    assert prompt_s(times, budget, 8192, 0, 48, 0) > prompt_s(times, budget, 2000, 6192, 48, 0)


def test_what_is_left_goes_to_short_prompts() -> None:
    budget = StepBudget(3072, 512)
    room = prompt_room.prompt_room(budget, 48, [WaitingPrompt(8192, 100), WaitingPrompt(900, 900)])
    assert (room.of(8192), room.behind(8192, 100).of(900)) == (112, 364)
    assert room.behind(900, 100).of(8192) == 112 and room.behind(8192, 100).of(8192) == 12


def test_long_prompts_have_more_rows_where_another_waits_or_they_have_waited() -> None:
    budget, long = StepBudget(3072, 512), 8192

    def rows(*waiting: WaitingPrompt) -> int:
        return prompt_room.prompt_room(budget, 48, waiting).of(long)

    assert rows(WaitingPrompt(long, 100), WaitingPrompt(long, long)) == 112, "the first is nearly done"
    assert rows(WaitingPrompt(long, 1300), WaitingPrompt(long, long)) == 208
    assert rows(WaitingPrompt(5800, 5700), WaitingPrompt(6000, 6000)) == 464, "it has just begun"
    assert rows(WaitingPrompt(long, 100, ahead=1300)) == 208, "to its end"
    assert prompt_room.tokens_ahead(long, [WaitingPrompt(long, 100), WaitingPrompt(900, 900)]) == 100
    assert prompt_room.tokens_ahead(900, [WaitingPrompt(long, 100)]) == 0, "not long"


def scheduled(prompts: Sequence[int]) -> list[tuple[int, int]]:
    """(sequences that decode, prompt rows) of an engine's steps with both. The streams come first."""
    played = engine(example(), GPU_YIELD)
    played.run(arrivals(prompts))
    return [(step.decoding, step.rows) for step in played.steps if step.decoding and step.rows]


def simulated(prompts: Sequence[int]) -> list[tuple[int, int]]:
    """The same of a simulated worker."""
    worker, steps, now = SimulatedWorker(example(), None), [], 0.0
    for number, arrival in enumerate(arrivals(prompts)):
        worker.enqueue(SimulatedJob(number, arrival, 0, 0, missing=arrival.prompt), now)
    while step := worker.begin(now):
        decoding = len(worker._decoding)
        if decoding and step.rows:
            steps.append((decoding, sum(rows for _, rows in step.rows)))
        for job in worker.finish()[0]:
            worker.decode(job)
        now = step.end_s
    return steps


def arrivals(prompts: Sequence[int]) -> list[SimulatedRequest]:
    """Streams, and these prompts with them, which yield to them."""
    streams = [SimulatedRequest(0.0, SHORT, ANSWER)] * STREAMS
    return streams + [SimulatedRequest(0.0, prompt, 8) for prompt in prompts]


@pytest.mark.parametrize("load", LOADS)
def test_a_simulated_worker_composes_the_steps_of_an_engine(load: str) -> None:
    steps = scheduled(LOADS[load])
    assert simulated(LOADS[load]) == steps and steps


def test_the_law_sees_another_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the engine alone knows it."""
    steps = scheduled(LOADS["long"])
    monkeypatch.setattr(prompt_room, "LONG_PROMPT", 1 << 20)
    assert simulated(LOADS["long"]) != steps
