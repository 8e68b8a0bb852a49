"""One call is one share, however many sequences it has: the one with more than others gives way."""

from __future__ import annotations

import random
import time
from collections import Counter

import msgspec
import pytest
from engine_rig import Rig, handle, request

from eyas.common.types import FirstToken, GenerationRequest, RequestChoice
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence, SequenceWork
from eyas.engine.ipc.messages import AttachKv, OpenPull, PrefillPrompt
from eyas.engine.scheduling.fairness import CallShares
from eyas.engine.scheduling.scheduler import Scheduler

ROWS = 6


def of_call(call: str, number: int, n: int = 1, *, most: int = 20, caller: str = "") -> GenerationRequest:
    """A request of `call`; no two prompts are alike."""
    first = sum(map(ord, caller + call)) + 7 * number
    prompt = tuple((first + i * (1 + number)) % 97 for i in range(ROWS))
    made = request(prompt, *map(RequestChoice, range(n)), id=f"{caller}{call}{number}", max_tokens=most)
    return msgspec.structs.replace(made, call=call, caller=caller)


def commit(rig: Rig, works: list[SequenceWork]) -> None:
    """A step's outputs, as far as sequences and pages go."""
    rig.pool.launched()
    rig.pool.landed()
    for work in works:
        seq = work.seq
        seq.kv_len = work.start + len(work.tokens)
        if not work.sample:
            continue
        seq.output.append(1)
        choices, seq.forks = seq.forks, ()
        for choice in choices:
            follower = Sequence(rig.requests.new_uid(), seq.generation, choice, seq.prompt, [1])
            seq.generation.sequences.append(follower)
            rig.scheduler.fork(seq, follower)
        if len(seq.output) >= seq.generation.request.params.max_tokens:
            rig.requests.end(seq)


def steps(rig: Rig, count: int = 1) -> None:
    for _ in range(count):
        commit(rig, rig.scheduler.schedule())
        rig.poll()
        rig.requests.join(time.monotonic())


def running(rig: Rig) -> dict[str, int]:
    """Sequences that run, by call."""
    return Counter(seq.generation.request.call for seq in rig.scheduler.running)


def test_a_call_of_many_prompts_gives_a_slot_to_another() -> None:
    rig = Rig(200, max_running=4)
    for number in range(6):
        rig.submit(of_call("many", number))
    steps(rig, 4)
    assert running(rig) == {"many": 4}
    eldest, last = rig.scheduler.running[0], rig.scheduler.running[-1]
    rig.submit(of_call("one", 0, most=2))
    steps(rig)
    assert running(rig) == {"many": 3, "one": 1} and rig.scheduler.preemptions == 1
    assert rig.scheduler.running[0] is eldest and last.slot < 0, "who came last gives way"
    steps(rig, 2)
    assert last.slot >= 0, "it has kept its place in the queue"
    steps(rig, 80)
    assert not rig.requests.table and rig.held() == 0 and rig.scheduler.preemptions == 1


def test_slots_are_divided_evenly_and_then_nobody_is_disturbed() -> None:
    rig = Rig(400, max_running=6)
    for call in ("a", "b", "c"):
        for number in range(6):
            rig.submit(of_call(call, number, most=40))
        steps(rig, 12)
    assert running(rig) == {"a": 2, "b": 2, "c": 2}
    disturbed = rig.scheduler.preemptions
    steps(rig, 20)
    assert rig.scheduler.preemptions == disturbed


def test_choices_are_no_requests_of_their_own() -> None:
    """A prompt of many choices takes what is free, and its call gives the rest back to others."""
    rig = Rig(200, max_running=6)
    rig.submit(of_call("many", 0, n=6))
    steps(rig, 3)
    assert running(rig) == {"many": 6}
    rig.submit(of_call("few", 0, n=4))
    rig.submit(of_call("one", 0))
    steps(rig, 4)
    assert sorted(running(rig).values()) == [1, 2, 3] and running(rig)["one"] == 1
    steps(rig, 100)
    assert not rig.requests.table and rig.held() == 0


def test_callers_come_before_their_calls() -> None:
    """Many calls with one key have together what one call with another key has."""
    rig = Rig(400, max_running=6)
    for number in range(8):
        rig.submit(of_call(f"call{number}", 0, caller="busy", most=40))
    steps(rig, 10)
    for number in range(4):
        rig.submit(of_call("only", number, caller="calm", most=40))
    steps(rig, 10)
    assert running(rig)["only"] == 3


@pytest.mark.parametrize("pulled", [False, True])
def test_pages_are_given_back_as_slots_are(pulled: bool) -> None:
    rig = Rig(pages=16, max_running=8)
    for number in range(5):
        rig.submit(of_call("many", number))
    steps(rig, 6)
    assert running(rig)["many"] >= 3 and rig.pool.free < 2
    made = of_call("one", 0, most=3)
    rig.submit(made, attach=pulled)
    if pulled:
        rig.requests.attach(AttachKv("one0", 1, (handle(ROWS),)))
        rig.poll()
        (opened,) = rig.said(OpenPull)
        rig.arrive(opened, FirstToken(0, 60))
    steps(rig, 3)
    assert "one0" not in rig.requests.table, "it should have ended by now"
    steps(rig, 200)
    assert not rig.requests.table and rig.held() == 0


def test_a_pulled_prompt_gets_its_slot() -> None:
    """Others of the call that has all slots wait longer for one: their pages are here as well."""
    rig = Rig(200, max_running=3)
    for number, made in enumerate([*(of_call("many", i) for i in range(5)), of_call("one", 0, most=4)]):
        rig.submit(made, attach=True)
        rig.requests.attach(AttachKv(made.id, 1, (handle(ROWS, id=number),)))
        rig.poll()
        (opened,) = rig.said(OpenPull)
        rig.arrive(opened, FirstToken(0, 60))
    assert running(rig) == {"many": 2, "one": 1} and len(rig.scheduler.joining) == 2
    steps(rig, 3)
    assert "one0" not in rig.requests.table
    steps(rig, 100)
    assert not rig.requests.table and rig.held() == 0


def test_a_prefill_worker_computes_the_prompts_of_calls_in_turn() -> None:
    rig = Rig(200)
    order = []
    for number in range(4):
        rig.requests.prefill(PrefillPrompt(of_call("many", number), 1, False))
    rig.requests.prefill(PrefillPrompt(of_call("one", 0), 1, False))
    for _ in range(5):
        works = rig.scheduler.schedule()
        order += [work.seq.generation.id for work in works if work.start == 0]
        for work in works:
            work.seq.kv_len = work.start + len(work.tokens)
            if work.sample:
                rig.requests.end(work.seq)
    assert order[:3] == ["many0", "one0", "many1"] and len(order) == 5


def test_who_has_begun_elsewhere_comes_before_who_has_not() -> None:
    rig = Rig(200, max_running=1)
    rig.submit(of_call("first", 0, most=4))
    steps(rig)
    rig.submit(of_call("new", 0))
    rig.submit(msgspec.structs.replace(of_call("moved", 0), begun=True))
    steps(rig, 4)
    assert running(rig) == {"moved": 1}


class Watched(Scheduler):
    """Looks that what changes hands makes shares more equal, and never disturbs who has run longest."""

    taken = 0

    def _take_from_richer(self, claimant: Generation, shares: CallShares, gain: int) -> bool:
        before, eldest = unequal(self, claimant, max(gain - 1, 0)), self._movable[:1]
        if not super()._take_from_richer(claimant, shares, gain):
            return False
        assert unequal(self, claimant, gain) < before
        assert self._movable[:1] == eldest
        self.taken += 1
        return True


def unequal(scheduler: Scheduler, claimant: Generation, gain: int) -> tuple[int, int]:
    """Sums of squares of the shares of callers, and of calls, when the claimant has `gain` more."""
    shares = scheduler.shares()
    shares.add(claimant, gain)
    return tuple(sum(n * n for n in part.values()) for part in (shares._callers, shares._calls))  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(12))
def test_what_changes_hands_is_never_handed_back_and_everybody_ends(seed: int) -> None:
    """Calls of all sizes come, by pull or not, to a worker that is short of slots and of pages."""
    pick = random.Random(seed)
    rig = Rig(pages=pick.choice((20, 60)), max_running=pick.choice((3, 6)))
    watched = Watched(rig.pool, rig.cache, rig.scheduler.limits, rig.pulls)
    rig.scheduler = rig.requests.scheduler = watched
    opened: dict[str, OpenPull] = {}
    for step in range(1200):
        if step < 150 and pick.random() < 0.4:
            n, most = pick.choice((1, 1, 2)), pick.randint(2, 12)
            made = of_call(pick.choice("xyz"), step, n, most=most, caller=pick.choice("ab"))
            pulled = pick.random() < 0.5
            rig.submit(made, attach=pulled)
            if pulled and made.id in rig.requests.table:
                rig.requests.attach(AttachKv(made.id, 1, (handle(ROWS, id=step),)))
                for event in rig.said(OpenPull):
                    opened[made.id] = event
        commit(rig, rig.scheduler.schedule())
        rig.poll()
        for id in [i for i, event in opened.items() if pulling(rig, event)]:
            rig.arrive(opened.pop(id), FirstToken(0, 60), FirstToken(1, 61))
        rig.requests.join(time.monotonic())
        if step > 150 and not rig.requests.table:
            break
    assert not rig.requests.table and rig.held() == 0
    assert watched.taken > 0, "no call had too much"


def pulling(rig: Rig, opened: OpenPull) -> bool:
    active = rig.pulls._active.get(opened.pull)
    return active is not None and active.pull.state == "pulling"


def test_a_prompt_for_elsewhere_is_never_disturbed() -> None:
    """Its pages are under a lease."""
    rig = Rig(200, max_running=3)
    for number in range(4):
        rig.requests.prefill(PrefillPrompt(msgspec.structs.replace(of_call("many", number)), 1, False))
    works = rig.scheduler.schedule()
    assert {work.seq.generation.kind for work in works} == {GenerationKind.PREFILL}
    rig.submit(of_call("one", 0))
    rig.scheduler.schedule()
    assert rig.scheduler.preemptions == 0


def test_slots_that_are_kept_for_choices_are_their_calls() -> None:
    """Else a call with several such prompts takes more than its share, and gives it back later."""
    rig = Rig(400, max_running=12)
    for number in range(14):
        rig.submit(of_call("many", number, most=40))
        steps(rig)
    for number in range(3):
        rig.submit(of_call("choices", number, n=4, most=40))
    steps(rig, 6)
    assert running(rig) == {"many": 6, "choices": 6} and rig.scheduler.preemptions == 6


def test_choices_that_begin_elsewhere_need_no_slots_here() -> None:
    rig = Rig(200, max_running=4)
    rig.submit(of_call("here", 0))
    rig.submit(of_call("here", 1))
    steps(rig)
    for number in range(2):
        rig.requests.prefill(PrefillPrompt(of_call("there", number, n=3), 1, False))
    works = rig.scheduler.schedule()
    assert [work.seq.generation.request.call for work in works] == ["here"] * 2 + ["there"] * 2
    assert rig.scheduler.preemptions == 0
