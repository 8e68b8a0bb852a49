"""Machines that read a text character by character, written as the rules of a grammar.

It makes the smallest machine that reads the same, and rules for states that several moves lead to.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from eyas.common.grammars.string_rules import class_of

Moves = dict[Hashable, list[tuple[str, str, Hashable]]]
"""By state: first character, last character, next state."""


class DigitMachine(NamedTuple):
    """A state machine of digits: its start, its moves, and the states in which a text may end."""

    start: Hashable
    moves: Moves
    ends: set[Hashable]

    @property
    def is_empty(self) -> bool:
        """Whether no text ends in one of its ends."""
        return not _alive(self)[1]


def rules(machine: DigitMachine, name: str) -> dict[str, str]:
    """Right sides of rules by name; `name` reads what the machine reads."""
    blocks, alive = _blocks(machine)
    bodies: dict[int, dict[int, list[tuple[str, str]]]] = {}
    ends = {blocks[state] for state in machine.ends if state in blocks}
    for state in alive:
        block = blocks[state]
        if block in bodies:
            continue
        moves: dict[int, list[tuple[str, str]]] = {}
        bodies[block] = moves
        for first, last, target in machine.moves.get(state, ()):
            if target in alive and (first, last) not in moves.setdefault(blocks[target], []):
                moves[blocks[target]].append((first, last))
    start = blocks[machine.start]
    named = {block: name if block == start else f"{name}_{block}" for block in bodies}
    return {named[block]: _side(bodies[block], block in ends, named) for block in bodies}


def _side(body: Mapping[int, list[tuple[str, str]]], is_end: bool, named: Mapping[int, str]) -> str:
    parts = ['""'] if is_end else []
    for target, ranges in body.items():
        pairs = _joined(sorted((ord(a), ord(b)) for a, b in ranges))
        parts.append(f"{class_of(tuple(pairs))} {named[target]}")
    return " | ".join(parts)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, last in ranges:
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _alive(machine: DigitMachine) -> tuple[set[Hashable], bool]:
    """States from which an end can be reached; whether the start is one."""
    before: dict[Hashable, list[Hashable]] = {}
    for state, moves in machine.moves.items():
        for _, _, target in moves:
            before.setdefault(target, []).append(state)
    alive, todo = set(machine.ends), list(machine.ends)
    while todo:
        for state in before.get(todo.pop(), ()):
            if state not in alive:
                alive.add(state)
                todo.append(state)
    return alive, machine.start in alive


def _blocks(machine: DigitMachine) -> tuple[dict[Hashable, int], list[Hashable]]:
    """Returns a number per state, equal if they read the same texts, and the states that reach an end."""
    living = _alive(machine)[0]
    alive = [state for state in {**machine.moves, **dict.fromkeys(machine.ends)} if state in living]
    block: dict[Hashable, int] = {state: int(state in machine.ends) for state in alive}
    count = len(set(block.values()))
    while True:
        numbers: dict[Hashable, int] = {}
        refined = {}
        for state in alive:
            moves = {(a, b, block[to]) for a, b, to in machine.moves.get(state, ()) if to in block}
            refined[state] = numbers.setdefault((block[state], frozenset(moves)), len(numbers))
        block = refined
        if len(numbers) == count:
            return block, alive
        count = len(numbers)
