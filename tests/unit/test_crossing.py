"""A pull that waits behind leases gives up in time, and its prompt is computed where it decodes."""

from __future__ import annotations

import time

import pytest
from engine_rig import PAGE, Rig, handle, request

from eyas.common.types import FinishCause, FirstToken, RequestChoice
from eyas.engine.batch.sequence import GenerationKind
from eyas.engine.ipc.messages import (
    AttachKv,
    OpenPull,
    PagesLost,
    PrefillPrompt,
    PullDone,
    PullReady,
    ReleaseHandle,
    StepReply,
)
from eyas.engine.scheduling.crossing import PATIENCE_S

ROWS = 5 * PAGE


class Clock:
    """Stands still until it is put on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "monotonic", found)
    return found


def leased(rig: Rig, rows: int = ROWS) -> None:
    """A prompt for another worker, computed here, whose pages nobody reads."""
    rig.requests.prefill(PrefillPrompt(request(tuple(range(50, 50 + rows)), id="theirs"), 1, False))
    (work,) = rig.scheduler.schedule()
    rig.leases.offer(work.seq.generation, work.seq.pages)
    rig.requests.end(work.seq)


def waiting(rig: Rig, id: str = "a", *choices: RequestChoice) -> OpenPull:
    """A prompt that comes from another worker, which has not finished it."""
    rig.submit(request(ROWS, *choices, id=id), attach=True)
    rig.requests.attach(AttachKv(id, 1, (handle(ROWS),)))
    rig.poll()
    (pull,) = rig.said(OpenPull)
    return pull


def test_a_prompt_that_is_whole_elsewhere_is_computed_here_when_leases_leave_no_room(clock: Clock) -> None:
    rig = Rig(9)
    leased(rig)
    pull = waiting(rig)
    rig.pulls.receive(PullReady(pull.pull, ROWS - 1))
    clock.now += PATIENCE_S
    rig.poll()
    assert rig.pulls.waiting(), "what it gives is not known yet"
    rig.pulls.receive(PullDone(pull.pull, (FirstToken(0, 7),)))
    clock.now += PATIENCE_S
    rig.poll()
    events = rig.outbox.take()
    assert [e.handle for e in events if isinstance(e, ReleaseHandle)] == [pull.handle]
    assert not [e for e in events if isinstance(e, PagesLost)]
    (step,) = [e for e in events if isinstance(e, StepReply)]
    assert [(entry.id, list(entry.tokens)) for entry in step.entries] == [("a", [7])]
    (seq,) = rig.scheduler.waiting
    assert (seq.output, seq.generation.kind) == ([7], GenerationKind.LOCAL) and not rig.pulls.active


def test_it_waits_as_long_as_others_may_make_room(clock: Clock) -> None:
    """Running sequences end. Only leases that nobody reads may stay for ever."""
    rig = Rig(20)
    leased(rig)
    rig.submit(request(tuple(range(30, 30 + 2 * ROWS)), id="running"))
    assert rig.scheduler.schedule()
    pull = waiting(rig)
    rig.pulls.receive(PullDone(pull.pull, (FirstToken(0, 7),)))
    for _ in range(5):
        clock.now += PATIENCE_S
        rig.poll()
    assert len(rig.pulls.waiting()) == 1 and not rig.said(ReleaseHandle)


def test_the_last_one_gives_up_and_the_others_wait_on(clock: Clock) -> None:
    rig = Rig(9)
    leased(rig)
    for id in "ab":
        pull = waiting(rig, id)
        rig.pulls.receive(PullDone(pull.pull, (FirstToken(0, 7),)))
    rig.poll()
    clock.now += PATIENCE_S
    rig.poll()
    assert [generation.id for generation in rig.pulls.waiting()] == ["a"]
    rig.poll()
    assert [generation.id for generation in rig.pulls.waiting()] == ["a"], "one in that time"


def test_choices_that_ended_at_their_first_token_are_not_computed(clock: Clock) -> None:
    rig = Rig(9)
    leased(rig)
    pull = waiting(rig, "a", RequestChoice(0), RequestChoice(1))
    first = FirstToken(0, 7), FirstToken(1, 8, finish=FinishCause.STOP)
    rig.pulls.receive(PullDone(pull.pull, first))
    clock.now += PATIENCE_S
    rig.poll()
    assert [seq.choice for seq in rig.scheduler.waiting] == [0]
