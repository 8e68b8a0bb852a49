"""First come, first served: small requests do not overtake a large one for ever."""

from __future__ import annotations

import itertools
import time

import msgspec
import pytest
from engine_rig import Rig, handle, request

from eyas.common.types import FirstToken
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence, SequenceWork
from eyas.engine.ipc.messages import AttachKv, OpenPull
from eyas.engine.scheduling.fairness import CallShares, WaitingQueue
from eyas.engine.scheduling.limits import PromptYield

SHORT = 3
LONG = 40


def _commit(rig: Rig, works: list[SequenceWork]) -> None:
    """A step's outputs, as far as sequences and pages go."""
    for work in works:
        work.seq.kv_len = work.start + len(work.tokens)
        if work.sample:
            work.seq.output.append(1)
            if len(work.seq.output) >= work.seq.generation.request.params.max_tokens:
                rig.requests.end(work.seq)


class Crowd:
    """A worker to which short prompts come as long as its queue has a place for them."""

    def __init__(self, pulled: bool) -> None:
        self.rig = Rig(pages=12, max_running=6)
        self.pulled = pulled
        self.opened: dict[str, OpenPull] = {}
        self._numbers = itertools.count(1)

    def comes(self, id: str, rows: int, pulled: bool, most: int) -> None:
        number = next(self._numbers)
        prompt = tuple((17 * number + i) % 50 for i in range(rows))
        self.rig.submit(request(prompt, id=id, max_tokens=most), attach=pulled)
        assert id in self.rig.requests.table
        if pulled:
            self.rig.said(OpenPull)
            self.rig.requests.attach(AttachKv(id, 1, (handle(rows, id=number),)))
            (self.opened[id],) = self.rig.said(OpenPull)

    def step(self) -> set[str]:
        """Who ran."""
        while len(self.rig.requests.table) - len(self.rig.scheduler.running) < 4:
            number = next(self._numbers)
            self.comes(f"short {number}", SHORT, self.pulled, 4 + number % 7)  # they do not end together
        works = self.rig.scheduler.schedule()
        _commit(self.rig, works)
        self.rig.poll()
        self.rig.requests.join(time.monotonic())
        for id, opened in list(self.opened.items()):
            if self.rig.pulls._active[opened.pull].pull.state == "pulling":
                self.rig.arrive(self.opened.pop(id), FirstToken(0, 60))
        return {work.seq.generation.id for work in works}


@pytest.mark.parametrize("crowd_pulled", [False, True])
@pytest.mark.parametrize("long_pulled", [False, True])
def test_a_long_prompt_is_not_starved_by_short_ones(crowd_pulled: bool, long_pulled: bool) -> None:
    crowd = Crowd(crowd_pulled)
    for _ in range(5):
        crowd.step()
    crowd.comes("long", LONG, long_pulled, 3)
    ran = [crowd.step() for _ in range(40)]
    assert any("long" in step for step in ran)


def _waiting(id: str, arrived: float, priority: int, caller: str = "") -> Sequence:
    asked = msgspec.structs.replace(request(SHORT, id=id), priority=priority, caller=caller)
    generation = Generation(asked, 1, GenerationKind.LOCAL, arrived=arrived, deadline=100.0)
    return Sequence(int(id), generation, 0, asked.prompt_ids, [])


def test_a_priority_moves_a_request_by_seconds_among_its_callers_own() -> None:
    queue = WaitingQueue(PromptYield())
    for number, (arrived, priority) in enumerate([(0.0, 0), (1.0, -3), (2.0, 1), (2.5, 0), (6.0, -3)]):
        queue.add(_waiting(str(number), arrived, priority))
    order = []
    while len(queue):
        queue.remove(seq := queue.first(CallShares()))
        order.append(seq.generation.id)
    assert order == ["1", "0", "3", "2", "4"]  # the last is urgent, and came too late to pass all others


def test_a_priority_moves_no_other_callers_requests() -> None:
    queue, shares = WaitingQueue(PromptYield()), CallShares()
    urgent, other = _waiting("1", 0.0, -100, "a"), _waiting("2", 9.0, 100, "b")
    queue.add(urgent)
    queue.add(other)
    shares.add(urgent.generation)  # A has a sequence that runs already
    assert queue.first(shares) is other
