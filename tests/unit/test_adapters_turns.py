"""Slots of adapters: who gets one, who loses one, and that nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from eyas.common.errors import EngineError, InvalidRequest, NotFound
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.adapters.table import AdapterTable
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence
from eyas.engine.ipc.adapter_messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from eyas.engine.scheduling.adapter_turns import TURN_S, AdapterTurns


@dataclass(frozen=True)
class Stored:
    id: str
    rank: int = 4
    host_bytes: int = 100


@dataclass
class HandMemory:
    """Copies end when the test says so."""

    slots: int
    inside: dict[int, str] = field(default_factory=dict)
    done: bool = True
    forgotten: list[str] = field(default_factory=list)

    def forget(self, adapter: Any) -> None:
        self.forgotten.append(adapter.id)

    def read(self, folder: Path) -> Stored:
        if folder.name == "wrong":
            raise InvalidRequest("it is wrong", param="lora_path")
        if folder.name == "lost":
            raise EngineError("rank 1 of 2 has ended")
        if folder.name == "odd":
            raise KeyError("odd")
        return Stored(folder.name)

    def fill(self, slot: int, adapter: Any) -> Callable[[], bool]:
        self.inside[slot] = adapter.id
        return lambda: self.done


class World:
    """A table with adapters, and the sequences that want them."""

    def __init__(self, slots: int, *names: str, pinned: tuple[str, ...] = ()) -> None:
        self.memory = HandMemory(slots)
        self.table = AdapterTable(self.memory)
        self.now = 0.0
        self.turns = AdapterTurns(self.table, lambda: self.now)
        self._numbers = 0
        for name in names:
            assert self.load(name, pinned=name in pinned).failure is None

    def load(self, name: str, *, pinned: bool = False) -> AdapterLoaded:
        self.table.load(LoadAdapter(1, f"/adapters/{name}", name, pinned=pinned))
        self.table._reading[-1][1].exception()  # waits
        (answer,) = self.table.poll()
        return answer

    def sequence(self, name: str) -> Sequence:
        self._numbers += 1
        request = GenerationRequest(str(self._numbers), (1,), SamplingParams(), adapter=name)
        generation = Generation(request, 0, GenerationKind.LOCAL, 0.0, 0.0)
        return Sequence(self._numbers, generation, 0, request.prompt_ids, [])

    def poll(self) -> list[Sequence]:
        self.table.poll()
        return self.turns.poll()

    def entered(self, name: str) -> Sequence:
        """A sequence that is in its adapter."""
        seq = self.sequence(name)
        if not self.turns.enter(seq):
            self.poll()
            assert seq in [*self.poll(), seq] and seq.adapter_slot
        return seq


def test_a_sequence_waits_until_its_adapter_is_there() -> None:
    world = World(2, "a")
    world.memory.done = False
    plain, first, second = world.sequence(""), world.sequence("a"), world.sequence("a")
    assert world.turns.enter(plain) and plain.adapter_slot == 0
    assert not world.turns.enter(first) and not world.turns.enter(second)
    assert world.poll() == [] and world.poll() == []  # it is being copied
    world.memory.done = True
    assert world.poll() == [first, second]
    assert first.adapter_slot == second.adapter_slot == 1 and world.turns.waiting == 0
    assert world.turns.enter(world.sequence("a"))  # at once
    assert world.table.loads == 1


def test_the_least_recently_used_idle_adapter_loses_its_slot() -> None:
    world = World(2, "a", "b", "c")
    used = [world.entered(name) for name in ("a", "b")]
    for seq in used:
        world.turns.leave(seq)
    world.turns.leave(world.entered("a"))
    world.entered("c")
    assert sorted(world.table.on_device) == ["a", "c"]


def test_a_busy_adapter_takes_no_more_once_another_waits() -> None:
    """Its slot goes over when those that are in have left, though new ones come all the time."""
    world = World(1, "a", "b")
    running = world.entered("a")
    late = world.sequence("b")
    assert not world.turns.enter(late) and world.poll() == []
    newer = world.sequence("a")
    assert not world.turns.enter(newer)
    assert world.turns.enter(running)  # a sequence that is in may always go on
    world.turns.leave(running)
    world.poll()
    assert late.adapter_slot and world.table.on_device == ["b"]
    assert not newer.adapter_slot
    world.turns.leave(late)
    world.poll(), world.poll()
    assert newer.adapter_slot and world.table.on_device == ["a"]


def test_an_adapter_that_was_to_make_room_goes_on_if_another_did() -> None:
    """Else those that came for it meanwhile would wait for ever: nobody is left to take its slot."""
    world = World(2, "a", "b", "c")
    running = [world.entered(name) for name in ("a", "b")]
    other = world.sequence("c")
    assert not world.turns.enter(other) and world.poll() == []
    newer = world.sequence("a")
    assert not world.turns.enter(newer)  # it is to make room
    world.turns.leave(running[1])
    assert world.poll() == [other] and world.poll() == [newer] and sorted(world.table.on_device) == ["a", "c"]
    assert world.turns.enter(world.sequence("a"))


def test_a_turn_ends_where_others_wait_however_long_answers_are() -> None:
    world = World(1, "a", "b")
    running = world.entered("a")
    world.now = 100.0
    assert not world.turns.overdue  # nobody waits for its slot
    late = world.sequence("b")
    assert not world.turns.enter(late) and world.poll() == []
    world.now += TURN_S - 0.1
    assert not world.turns.overdue
    world.now += 0.1
    assert world.turns.overdue == "a"
    world.turns.leave(running)  # it is sent back
    assert world.poll() == [late] and not world.turns.overdue
    assert not world.turns.enter(running) and world.poll() == []
    world.now += TURN_S
    assert world.turns.overdue == "b"
    world.turns.leave(running)  # it is cancelled: nobody waits any more
    assert world.poll() == [] and not world.turns.overdue


def test_pinned_adapters_stay() -> None:
    world = World(2, "a", "b", "c", pinned=("a",))
    world.turns.leave(world.entered("a"))
    for name in ("b", "c", "b"):
        world.turns.leave(world.entered(name))
        assert "a" in world.table.on_device
    refused = world.load("c", pinned=True).failure
    assert refused is not None and "leave no slot of 2" in refused.message
    assert World(1).load("a", pinned=True).failure is not None


def test_an_adapter_is_unloaded_once_nobody_needs_it() -> None:
    world = World(1, "a", "b")
    requests = {"a"}
    world.table.has_requests = requests.__contains__
    seq = world.entered("a")
    world.table.unload(UnloadAdapter(2, "a"))
    with pytest.raises(NotFound):
        world.table.check("a")
    world.poll()
    assert world.table.on_device == ["a"]  # its request goes on
    world.turns.leave(seq)
    world.poll()
    assert world.table.on_device == ["a"]
    requests.clear()
    world.poll()
    assert world.table.on_device == [] and world.table.counts(0).host_bytes == 100
    assert world.memory.forgotten == ["a"]
    world.table.check("b")
    world.table.check("")
    assert world.load("a").failure is None
    world.table.check("a")


def test_a_rank_that_ends_while_it_reads_ends_the_engine() -> None:
    """It would serve on until its next step, whose other ranks are gone."""
    with pytest.raises(EngineError, match="rank 1"):
        World(1).load("lost")


def test_a_folder_that_is_refused_changes_nothing() -> None:
    world = World(1, "a")
    failure = world.load("wrong").failure
    assert failure is not None and failure.param == "lora_path"
    failure = world.load("odd").failure  # what nobody thought of ends no engine
    assert failure is not None and "KeyError" in failure.message
    world.table.load(LoadAdapter(1, "/adapters/b", "b", id="another"))
    world.table._reading[-1][1].exception()
    (answer,) = world.table.poll()
    assert answer.failure is not None and "another was to be loaded" in answer.failure.message
    assert world.memory.forgotten == ["b"]  # by other ranks too
    assert world.load("a").failure is None and world.memory.forgotten == ["b", "a"]  # the second of two
    with pytest.raises(NotFound):
        world.table.check("b")
