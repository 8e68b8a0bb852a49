"""Admission cannot deadlock: every order in which two small, full tiers can meet is followed to its end.

The engines are real and have no model (`admission_world`). All reachable states are visited. Then every run
that gives each tier its turns, delivers its messages and ends its copies must come to the state in which all
requests have ended and nothing is held: there is no dead end, and no circle to stay in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
from admission_tier import PAGE, ROUND_ROWS
from admission_world import Asked, Sizes, World
from engine_rig import request

from eyas.common.types import RequestChoice
from eyas.engine.batch.sequence import Sequence
from eyas.engine.scheduling.scheduler import Scheduler
from kv_transfer.layout import pages_for

MOST = 20_000  # states; a world that has more is not a test of a few seconds
NOT_OWED = ("hears one", "hears nothing", "cancelled", "breaks")  # may never happen


@dataclass
class Graph:
    """Reachable states by number."""

    moves: list[dict[str, int]] = field(default_factory=list)  # where each leads
    over: list[bool] = field(default_factory=list)
    sights: set[str] = field(default_factory=set)
    came: list[tuple[int, str]] = field(default_factory=list)  # how each was first reached

    def add(self, world: World, state: int, move: str) -> None:
        self.moves.append({})
        self.over.append(world.over())
        self.sights |= world.sights()
        self.came.append((state, move))

    def path(self, state: int) -> list[str]:
        path: list[str] = []
        while state:
            state, move = self.came[state]
            path.append(move)
        return path[::-1]


def explore(start: World) -> Graph:
    """Breadth first, so that the path to a bad state is a short one."""
    graph = Graph()
    graph.add(start, 0, "")
    known = {start.shape(): 0}
    queue = [(0, start.freeze())]
    for state, frozen in queue:
        for move in World.thaw(frozen).moves():
            world = World.thaw(frozen)
            try:
                world.moves()[move]()
            except AssertionError as error:
                raise AssertionError(f"{error}, after {[*graph.path(state), move]}") from error
            shape = world.shape()
            if shape not in known:
                known[shape] = len(known)
                assert len(known) <= MOST, "this world is not small"
                graph.add(world, state, move)
                queue.append((known[shape], world.freeze()))
            graph.moves[state][move] = known[shape]
    return graph


def circles(graph: Graph) -> Iterator[set[int]]:
    """Strongly connected components with a move inside (Tarjan's algorithm, without recursion)."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    todo = [(0, iter(graph.moves[0].values()))]
    order[0] = low[0] = 0
    stack.append(0)
    on_stack.add(0)
    while todo:
        state, targets = todo[-1]
        for target in targets:
            if target not in order:
                order[target] = low[target] = len(order)
                stack.append(target)
                on_stack.add(target)
                todo.append((target, iter(graph.moves[target].values())))
                break
            if target in on_stack:
                low[state] = min(low[state], order[target])
        else:
            todo.pop()
            if todo:
                low[todo[-1][0]] = min(low[todo[-1][0]], low[state])
            if low[state] == order[state]:
                found = set(stack[stack.index(state) :])
                del stack[-len(found) :]
                on_stack -= found
                if any(target in found for s in found for target in graph.moves[s].values()):
                    yield found


def stuck(graph: Graph) -> Iterator[list[str]]:
    """Paths to circles that a run may stay in for ever although everything owed to it happens."""
    for circle in circles(graph):
        possible = [{m for m in graph.moves[s] if not m.endswith(NOT_OWED)} for s in circle]
        always = set.intersection(*possible)
        leave = [m for m in always if not any(graph.moves[s][m] in circle for s in circle)]
        if not leave and not any(graph.over[s] for s in circle):
            yield graph.path(min(circle))


def asked(
    id: str, prompt: tuple[int, ...], most: int = 3, n: int = 1, *, local: bool = False, call: str = ""
) -> Asked:
    made = request(prompt, *map(RequestChoice, range(n)), id=id, max_tokens=most)
    return Asked(msgspec.structs.replace(made, call=call), local)


A, B = tuple(range(5)), tuple(range(10, 15))
LONG = tuple(range(7)), tuple(range(10, 17)), tuple(range(20, 27))
WORLDS = {  # and what is to be seen in each
    "two": ((Sizes(9, 6), [asked("a", A), asked("b", B)]), {"pull drained", "preempted"}),
    "one prompt": ((Sizes(6, 6), [asked("a", A), asked("b", A)]), set()),
    "one slot": ((Sizes(9, 7, max_running=1), [asked("a", A), asked("b", B)]), {"waits for a slot"}),
    "three": ((Sizes(6, 6), [asked(i, p) for i, p in zip("abc", LONG, strict=True)]), {"both tiers full"}),
    "one of decode's own": ((Sizes(5, 7), [asked("a", A), asked("b", B, local=True)]), {"preempted"}),
    "two choices": ((Sizes(9, 6), [asked("a", A, n=2), asked("b", B)]), {"pull drained", "preempted"}),
    "slots of one call": (
        (
            Sizes(9, 20),
            [*(asked(i, A, 5, call="x", local=True) for i in "ab"), asked("c", B, 2)],
        ),
        {"gave way"},
    ),
    "choices of one call": ((Sizes(9, 20), [asked("a", A, n=2), asked("b", B)]), {"gave way"}),
    "pages of one call": (
        (
            Sizes(9, 8, max_running=3),
            [*(asked(i, A, 5, call="x", local=True) for i in "ab"), asked("c", B, 2)],
        ),
        {"gave way", "preempted"},
    ),
    "one cancelled": (
        (Sizes(9, 6), [asked("a", A, 2), asked("b", B, 2)], ("cancel",)),
        {"pull drained", "preempted"},
    ),
    "a Watch breaks": (
        (Sizes(9, 6), [asked("a", A, 2), asked("b", B, 2)], ("break",)),
        {"pull drained", "preempted", "computed again"},
    ),
}
QUICK = {"two", "one of decode's own"}


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Time stands still, and expected events are not logged a thousand times."""
    logging.getLogger("eyas.engine").setLevel(logging.ERROR)
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: 1000.0)
        yield
    logging.getLogger("eyas.engine").setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in WORLDS]
)
def test_every_run_ends(name: str) -> None:
    parts, sights = WORLDS[name]
    graph = explore(World(*parts))
    assert graph.sights >= sights
    assert any(graph.over) and not list(stuck(graph))


@pytest.mark.slow
def test_a_rule_that_deadlocks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences that hold all pages, and a scheduler that takes none back."""

    def wait(scheduler: Scheduler, seq: Sequence) -> bool:
        need = pages_for(seq.kv_len + 2 * ROUND_ROWS, PAGE) - len(seq.pages)
        if need <= 0 or scheduler._make_room(need):
            seq.pages += scheduler.pool.take(max(need, 0))
            return True
        return False

    monkeypatch.setattr(Scheduler, "_reserve", wait)
    parts, _ = WORLDS["two"]
    assert list(stuck(explore(World(*parts))))
