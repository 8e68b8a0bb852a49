"""Sums in one kernel end, and read what was sent, however few of their programs a GPU has room for at a time.

A model of two GPUs. Each starts programs in their order as others end, those of the next sum too, which begin
once the sum before has ended (programmatic dependent launch). A program sends, waits for its like, and ends.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from eyas.engine.parallel.one_shot import INBOXES

SUMS = (5, 1, 3, 5, 2, 4, 1, 5)
"""Programs of each sum that follows."""
Place = tuple[int, int]


@dataclass
class ModelProgram:
    """Of a sum: which one, its turn, and whether it has sent."""

    sum: int
    number: int
    turn: int
    sent: bool = False


@dataclass
class ModelGpu:
    """`waiting`: programs that have no room yet, the next one last. `inbox`: turns that came, by place."""

    waiting: list[ModelProgram]
    left: list[int]
    resident: list[ModelProgram] = field(default_factory=list)
    inbox: dict[Place, int] = field(default_factory=dict)
    read: dict[Place, int] = field(default_factory=dict)

    @classmethod
    def with_sums(cls, order: Sequence[int]) -> ModelGpu:
        """`order`: of the programs of a sum."""
        programs, turns = [], dict.fromkeys(order, 0)
        for place, count in enumerate(SUMS):
            for number in (each for each in order if each < count):
                turns[number] += 1
                programs.append(ModelProgram(place, number, turns[number]))
        return cls(programs[::-1], list(SUMS))

    def moves(self, inboxes: int) -> list[ModelProgram]:
        """Programs that can go on: those of the first sum that has not ended."""
        now = next((place for place, left in enumerate(self.left) if left), None)
        mine = [program for program in self.resident if program.sum == now]
        return [one for one in mine if not one.sent or self.inbox.get(_place(one, inboxes)) == one.turn]


def _place(program: ModelProgram, inboxes: int) -> Place:
    return program.number, program.turn % inboxes


def play(
    seed: int,
    room: int,
    inboxes: int = INBOXES,
    orders: tuple[Sequence[int], Sequence[int]] = (range(5),) * 2,
) -> str:
    """What becomes of all sums on two GPUs with `room` for programs, by one order of events."""
    chance, gpus = random.Random(seed), [ModelGpu.with_sums(order) for order in orders]
    while any(any(gpu.left) for gpu in gpus):
        for gpu in gpus:
            while gpu.waiting and len(gpu.resident) < room:
                gpu.resident.append(gpu.waiting.pop())
        able = [(rank, program) for rank, gpu in enumerate(gpus) for program in gpu.moves(inboxes)]
        if not able:
            return "nothing goes on"
        rank, program = chance.choice(able)
        own, other, place = gpus[rank], gpus[1 - rank], _place(program, inboxes)
        if program.sent:
            own.read[place] = program.turn
            own.resident.remove(program)
            own.left[program.sum] -= 1
            continue
        if other.inbox.get(place, 0) != other.read.get(place, 0):
            return "sent over what was not read"
        other.inbox[place], program.sent = program.turn, True
    return "ended"


@pytest.mark.parametrize("room", [1, 2, 3, 5, 8, 100])
def test_sums_end_whatever_room_there_is(room: int) -> None:
    assert {play(seed, room) for seed in range(40)} == {"ended"}


def test_one_inbox_would_be_sent_over() -> None:
    assert "sent over what was not read" in {play(seed, 5, inboxes=1) for seed in range(40)}


def test_programs_that_start_in_other_orders_would_need_room_for_all() -> None:
    """That a GPU starts them in their order is what sums of more programs than it has room for rely on."""
    backwards = range(5), range(4, -1, -1)
    assert {play(seed, 2, orders=backwards) for seed in range(40)} == {"nothing goes on"}
    enough = itertools.repeat(max(SUMS), 40)
    assert {play(seed, room, orders=backwards) for seed, room in enumerate(enough)} == {"ended"}
