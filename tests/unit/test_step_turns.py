"""Steps with little room: requests get equal parts of them, whatever their rows cost, and prompts yield."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest
from engine_rig import Rig, request

from eyas.engine.batch.sequence import SequenceWork
from eyas.engine.batch.tree import DraftTree
from eyas.engine.loop.drafting import DraftCoordinator
from eyas.engine.scheduling.fairness import WaitingQueue
from eyas.engine.scheduling.limits import PromptYield
from eyas.engine.scheduling.turns import StepRoom

FREE = 1e9  # tokens of context that take as long as a row: it counts for nothing


def _step(rig: Rig) -> list[SequenceWork]:
    """A step, and what the engine does with its outputs."""
    works = rig.scheduler.schedule()
    for work in works:
        seq = work.seq
        seq.kv_len = seq.draft_len = work.start + len(work.tokens)
        seq.tree = None
        if work.sample:
            seq.output.append(1)
            if len(seq.output) >= seq.generation.request.params.max_tokens:
                rig.requests.end(seq)
    rig.scheduler.preempted.clear()
    return works


def _begin(rig: Rig) -> None:
    """Steps until no prompt is left."""
    while rig.scheduler.waiting or any(seq.in_prompt for seq in rig.scheduler.running):
        _step(rig)


def _gained(rig: Rig, steps: int) -> Counter[str]:
    """The rounds of each call in so many steps."""
    return Counter(work.seq.generation.share[1] for _ in range(steps) for work in _step(rig) if work.round)


def _many(rig: Rig, count: int, call: str, **params: int) -> None:
    for i in range(count):
        made = request(i + 1, id=f"{call} {i}", **params)
        rig.submit(msgspec.structs.replace(made, call=call))


def test_requests_take_equal_turns_where_steps_are_full() -> None:
    """A call of many takes no more of a step than others; its sequences go on at one pace, and all end."""
    rig = Rig(pages=400, max_running=12, room=StepRoom(4.5, 4.5, FREE))
    _many(rig, 6, "many", max_tokens=30)
    for id in ("one", "two"):
        rig.submit(request(3, max_tokens=30, id=id))
    _begin(rig)
    gained = _gained(rig, 9)
    assert gained["one"] == gained["two"] == 9, "each has no more than one sequence"
    assert gained["many"] == 18
    many = [len(seq.output) for seq in rig.scheduler.running if seq.generation.share[1] == "many"]
    assert max(many) - min(many) <= 1
    for _ in range(200):
        _step(rig)
    assert not rig.requests.table and rig.held() == 0


def test_a_long_context_gets_its_part_of_the_steps_and_no_more() -> None:
    """A row of it takes as much as many others: so it has so many fewer rounds. It ends all the same."""
    rig = Rig(pages=600, max_running=12, room=StepRoom(8, 8, 4))
    rig.submit(request(48, max_tokens=14, id="long"))  # a row: 1 + 48 / 4
    for i in range(7):
        rig.submit(request(2, max_tokens=60, id=f"short {i}"))  # 1.5, and more as they grow
    _begin(rig)
    gained = _gained(rig, 16)
    shorts = [gained[f"short {i}"] for i in range(7)]
    assert 1 <= gained["long"] < min(shorts)
    assert max(shorts) - min(shorts) <= 2
    for _ in range(200):
        if not any(seq.generation.request.id == "long" for seq in rig.scheduler.running):
            break
        _step(rig)
    else:
        pytest.fail("the long one starved")


def test_who_begins_is_level_with_those_that_run() -> None:
    """It has neither all the turns that they had before it came, nor none."""
    rig = Rig(pages=600, max_running=12, room=StepRoom(2.5, 2.5, FREE))
    for i in range(4):
        rig.submit(request(2, max_tokens=60, id=f"old {i}"))
    _begin(rig)
    _gained(rig, 40)
    rig.submit(request(2, max_tokens=60, id="new"))
    _begin(rig)
    gained = _gained(rig, 20)
    assert set(gained.values()) <= {7, 8, 9}, "five requests, two rounds a step"


def test_drafts_are_rows_too_and_none_are_wanted_in_crowded_steps() -> None:
    rig = Rig(pages=400, max_running=12, room=StepRoom(4.5, 3.5, FREE))
    for id in ("a", "b", "c"):
        rig.submit(request(3, max_tokens=30, id=id))
    _begin(rig)
    for seq in rig.scheduler.running:
        seq.tree = DraftTree([5, 6], [-1, 0])
    assert len(_step(rig)) == 3, "all of three decode, with drafts"
    assert not rig.scheduler.crowded
    rig.submit(request(3, max_tokens=30, id="d"))
    _begin(rig)
    assert len(_step(rig)) == 4
    assert rig.scheduler.crowded
    for seq in rig.scheduler.running:
        seq.tree = DraftTree([5, 6], [-1, 0])
    assert len(_step(rig)) == 1, "two do not fit with the drafts that they have"


def test_no_proposal_is_waited_for_that_is_not_wanted() -> None:
    """It was asked for before so many decoded: whoever has no turn meanwhile takes nothing back."""
    drafter = SimpleNamespace(owed=lambda: True)
    drafting = DraftCoordinator(drafter, width=4, most_nodes=3)  # type: ignore[arg-type]
    assert drafting.owed()
    drafting.plain = True
    assert not drafting.owed()


def test_a_prompt_that_is_computed_yields_to_a_short_one() -> None:
    """It has been begun, and takes many steps: the short one gets the next one's first rows."""
    rig = Rig(pages=400, room=StepRoom(4.5, 4.5, FREE))
    rig.scheduler.waiting = WaitingQueue(PromptYield(0.001))
    rig.submit(request(60, max_tokens=2, id="long"))
    assert [len(work.tokens) for work in _step(rig)] == [16]
    rig.submit(request(tuple(range(70, 75)), max_tokens=2, id="short"))
    rig.submit(request(tuple(range(99, 39, -1)), max_tokens=2, id="another"))
    works = _step(rig)
    assert [(work.seq.generation.id, len(work.tokens)) for work in works] == [("short", 5), ("long", 11)]
    _begin(rig)
    assert not rig.scheduler.waiting, "nobody starves"


@pytest.mark.parametrize("room", [None, StepRoom(4.5, 4.5, FREE)])
def test_prompts_of_one_length_are_computed_as_they_came(room: StepRoom | None) -> None:
    rig = Rig(pages=400, room=room)
    rig.scheduler.waiting = WaitingQueue(PromptYield(0.001))
    for first, id in ((0, "a"), (30, "b"), (50, "c")):
        rig.submit(request(tuple(range(first, first + 40)), max_tokens=2, id=id))
    came = [work.seq.generation.id for _ in range(8) for work in _step(rig) if not work.round]
    assert list(dict.fromkeys(came)) == ["a", "b", "c"]
    assert came == sorted(came)


def test_a_chunk_after_a_long_context_has_fewer_rows() -> None:
    """A worker answers nobody before its step is over: it takes as long whatever the prompt has behind it."""
    rig = Rig(pages=400, room=StepRoom(4.5, 4.5, 16))
    rig.submit(request(60, max_tokens=2, id="long"))
    found = []
    while not rig.requests.table["long"].sequences[0].output:
        found += [len(work.tokens) for work in _step(rig)]
    assert found[:4] == [16, 8, 6, 6], "16 rows without context, 8 after 16 tokens, 6 after 24 and after 30"
    assert sum(found) == 60
    rig = Rig(pages=400, room=StepRoom(4.5, 4.5, 0.01))
    rig.submit(request(60, max_tokens=2, id="long"))
    assert [len(work.tokens) for _ in range(3) for work in _step(rig)] == [16, 1, 1], (
        "it goes on all the same"
    )
