"""A grammar that is slow to follow waits by itself: aside, within a budget, and no other sequence for it."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from grammar_cases import request, text_of
from loopback import Loopback, wait_all

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.errors import GrammarTooSlow
from eyas.common.grammars.notations import Grammar
from eyas.engine.batch.tree import DraftTree
from eyas.engine.grammar import grammars
from eyas.engine.grammar.grammars import ALLOWED_S, PER_TOKEN_S, QUICK_LOOKS, SLOW_S, PacedState
from eyas.engine.grammar.state import GrammarState, MaskRoom
from eyas.engine.loop import engine as engine_module
from eyas.engine.loop.engine import Engine
from eyas.engine.loop.step_loop import StepLoop
from tests.unit.crossed import crossed

pytestmark = pytest.mark.usefixtures("one_thread")


class SlowState:
    """Twin of `GrammarState`: a mask takes `mask_s` of a clock that it moves itself, once `gate` is open."""

    def __init__(self) -> None:
        self.now = self.mask_s = 0.0
        self.followed, self.known = 0, -1
        self.gate = threading.Event()
        self.gate.set()
        self.threads: list[str] = []

    def follow(self, output: Sequence[int]) -> None:
        self.followed = len(output)

    def knows(self, output: Sequence[int]) -> bool:
        return self.known == len(output)

    def masks(self, tree: DraftTree | None, room: MaskRoom | None = None) -> list[np.ndarray | None]:
        assert self.gate.wait(60)
        self.threads.append(threading.current_thread().name)
        self.now, self.known = self.now + self.mask_s, self.followed
        return []


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, "aside") as thread:
        yield thread


def paced_by(state: SlowState, aside: ThreadPoolExecutor, backlog: int = 0) -> PacedState:
    twin: Any = state
    return PacedState(twin, lambda: aside, backlog, clock=lambda: state.now)


def brought(made: PacedState, output: Sequence[int]) -> None:
    while not made.ready(output):
        look = made._look
        assert look is not None
        look.exception(60)


def test_what_was_slow_is_done_aside_until_it_is_fast_again(aside: ThreadPoolExecutor) -> None:
    state = SlowState()
    made = paced_by(state, aside)
    made.follow([1])
    made.masks(None)
    assert not made.slow
    state.mask_s = 2 * SLOW_S
    made.masks(None)
    assert made.slow and not made.looking
    state.gate.clear()
    assert not made.ready([1, 2]) and made.looking and not made.ready([1, 2]), "nobody waits for it"
    state.gate.set()
    brought(made, [1, 2])
    assert made.slow and state.threads[-1].startswith("aside") and len(state.threads) == 3
    state.mask_s = SLOW_S / 8
    for looks in range(1, QUICK_LOOKS + 1):
        assert made.slow, "texts pass through quick places between slow ones"
        brought(made, [1, 2, *[3] * looks])
    assert not made.slow


def test_what_was_slow_for_others_begins_aside(aside: ThreadPoolExecutor) -> None:
    state: Any = SlowState()
    made = PacedState(state, lambda: aside, slow=True, clock=lambda: state.now)
    assert made.slow and not made.ready([])
    brought(made, [])
    assert state.threads[-1].startswith("aside")


def test_an_output_that_was_begun_elsewhere_is_followed_aside(aside: ThreadPoolExecutor) -> None:
    assert not paced_by(SlowState(), aside, backlog=1).slow
    state = SlowState()
    made = paced_by(state, aside, backlog=grammars.AT_ONCE + 1)
    assert made.slow
    brought(made, [1] * 100)
    assert state.followed == 100 and not made.slow


@pytest.mark.parametrize("slowly", [False, True])
def test_its_budget_grows_with_its_tokens_and_no_further(aside: ThreadPoolExecutor, slowly: bool) -> None:
    state = SlowState()
    made = paced_by(state, aside)
    state.mask_s = PER_TOKEN_S
    for tokens in range(300):  # as much per token as it may take, for ever
        if slowly:
            brought(made, [1] * tokens)
        else:
            made.follow([1] * tokens)
            made.masks(None)
    state.mask_s = ALLOWED_S + 2 * PER_TOKEN_S
    with pytest.raises(GrammarTooSlow, match="s of a processor for 301 tokens; it is too ambiguous") as error:
        if slowly:
            brought(made, [1] * 301)
        else:
            made.follow([1] * 301)
            made.masks(None)
    assert (error.value.http_status, error.value.code) == (400, "grammar_too_slow")
    assert error.value.param == "grammar"


# --- in an engine ----------------------------------------------------------------------------------------

TRAP = Grammar.ebnf('root ::= [a-z ]{20} (([a-z ]*)* [a-z ]*)* "x"')
WAYS = {
    "plain": {"draft": None},
    "tree": {"speculation": SpeculationConfig(steps=4, topk=3, draft_tokens=10)},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig(num_pages=200, pool_dir=str(tmp_path_factory.mktemp("pools")), worker="unified")


@pytest.mark.parametrize("way", crossed(WAYS, quick=lambda way: way == "tree"))
def test_others_go_on_while_a_mask_is_filled_aside(
    base: EngineConfig, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose mask takes as long as others run is late, and its answer is what it would be."""
    grammar, masks = Grammar.regex("[A-Z][a-z ]{30,}"), GrammarState.masks
    gate, taken = threading.Event(), []

    def slow_at_five(self: GrammarState, *given: Any) -> list[np.ndarray | None]:
        if self._params.seed == 3 and self.followed >= 5:
            taken.append(threading.current_thread().name)
            if taken[-1].startswith("slow-grammars"):
                assert gate.wait(120)
        return masks(self, *given)

    config = replace(base, **WAYS[way])
    slow, other = request("slow", grammar, seed=3), request("other", grammar, seed=4)
    other = msgspec.structs.replace(other, params=msgspec.structs.replace(other.params, grammar=None))
    (alone,) = run(Loopback(config), [slow])
    monkeypatch.setattr(GrammarState, "masks", slow_at_five)
    monkeypatch.setattr(grammars, "SLOW_S", -1.0)  # all are: what is not in a thread aside would be seen
    cluster = Loopback(config)
    late, soon = (cluster.submit(one, split=False) for one in (slow, other))
    wait_all([soon], 120)
    assert not late.done.is_set()
    gate.set()
    wait_all([late], 120)
    cluster.close()
    assert late.tokens == alone.tokens and "slow-grammars_0" in taken


@pytest.mark.parametrize("way", crossed(WAYS, quick=lambda way: way == "plain"))
def test_what_is_too_slow_fails_alone(base: EngineConfig, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "ALLOWED_S", 0.1)
    monkeypatch.setattr(grammars, "PER_TOKEN_S", 0.0)
    cluster = Loopback(replace(base, **WAYS[way]))
    bad = cluster.submit(request("bad", TRAP, max_tokens=300, temperature=1.0, seed=1), split=False)
    good = cluster.submit(request("good", Grammar.choice(["Paris"])), split=False)
    wait_all([good], 120)
    assert bad.done.wait(120) and bad.failure is not None and "too long to follow" in bad.failure
    assert text_of(good.tokens[0]) == "Paris"
    cluster.close()


def test_what_is_ready_just_after_it_was_asked_for_is_not_slept_over(
    base: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled, or looked at aside, between a step that waits for it and the nap behind that step."""
    cluster = Loopback(replace(base, draft=None))
    engine, step, waits = cluster.workers["unified"].engine, StepLoop.step, []
    assert isinstance(engine, Engine)

    def stepped(loop: StepLoop) -> bool:
        busy, manager = step(loop), engine._parts.grammars
        futures = [*manager._compiled.values(), *(s._look for s in manager._states.values() if s._look)]
        waits.append([future for future in futures if not future.done() and not busy])
        concurrent.futures.wait(waits[-1], 60)
        return busy

    try:
        time.sleep(2 * engine_module.IDLE_S)
        monkeypatch.setattr(engine_module, "IDLE_S", 6.0)
        monkeypatch.setattr(grammars, "SLOW_S", -1.0)
        monkeypatch.setattr(StepLoop, "step", stepped)
        began = time.monotonic()
        wait_all([cluster.submit(request("r", Grammar.regex("[a-z]{6}")), split=False)], 120)
        assert time.monotonic() - began < 5.0 and sum(map(bool, waits)) > 1
    finally:
        monkeypatch.undo()
        cluster.close()


def run(cluster: Loopback, requests: Sequence[Any]) -> list[Any]:
    results = [cluster.submit(one, split=False) for one in requests]
    wait_all(results, 120)
    cluster.close()
    return results


def test_the_processors_clock_is_near_and_asks_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that works all the time: what it says differs by less than `CLOCK_S`. While it rests less than
    that counts.
    """
    now, asked = [5.0], []
    rested = [0.0]
    monkeypatch.setattr(grammars.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(grammars.time, "thread_time", lambda: asked.append(1) or now[0] - rested[0] - 4.0)
    clock = grammars.ProcessorClock()
    for _ in range(100):
        now[0] += 0.00013
        assert clock() == pytest.approx(now[0] - 4.0)
    assert len(asked) < 15
    before = clock()
    now[0], rested[0] = now[0] + 3.0, 3.0
    assert abs(clock() - before) <= grammars.CLOCK_S
