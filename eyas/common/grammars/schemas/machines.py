"""Machines that read a text character by character, and numbers digit by digit, as the rules of a grammar."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from eyas.common.grammars.schemas.numbers import NumberConstraints
from eyas.common.grammars.string_rules import class_of

Moves = dict[Hashable, list[tuple[str, str, Hashable]]]
"""By state: first character, last character, next state."""
MAX_MULTIPLE = 1024
DECIMALS = 6  # of a bounded number
MAX_DIGITS = 400
MAX_STATES = 4000

_LARGEST_FRACTION = Fraction(10**9)


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


class UnreadNumbers(Exception):
    """Numbers that no small machine reads. Its text says why."""


class _ModulusTest(NamedTuple):
    """Whether a count of units leaves `left` when divided by `modulus`, or does not."""

    modulus: int
    left: int
    expected: bool


@dataclass(frozen=True)
class _MagnitudeRange:
    """Magnitudes in units of 10^-decimals, from `low` to `high` (None: no end)."""

    low: int
    high: int | None
    decimals: int
    tests: tuple[_ModulusTest, ...]
    fraction: bool  # it must have one

    @property
    def modulus(self) -> int:
        return math.lcm(*(test.modulus for test in self.tests)) if self.tests else 1

    def holds(self, left: int) -> bool:
        return all((left % test.modulus == test.left) is test.expected for test in self.tests)


def machine_of(number: NumberConstraints) -> DigitMachine:
    """Returns a machine that reads such numbers. Raises UnwritableBranch for one that would be too large."""
    decimals, tests = _units(number)
    moves: Moves = {}
    ends: set[object] = set()
    if number.whole is False:  # a reader's floats have no decimals for numbers much larger
        number = number.within(least=-_LARGEST_FRACTION, most=_LARGEST_FRACTION)
    for low, high in _intervals(number, decimals):
        fraction = number.whole is False
        if high is None or high >= 0:
            least = max(0, low) if low is not None else 0
            _DigitStates(_MagnitudeRange(least, high, decimals, tests, fraction), moves, ends).add("start")
        if low is None or low < 0:
            least = 1 if high is None else max(1, -high)
            most = None if low is None else -low
            moves.setdefault("start", []).append(("-", "-", ("minus", low, high)))
            _DigitStates(_MagnitudeRange(least, most, decimals, tests, fraction), moves, ends).add(
                ("minus", low, high)
            )
    return DigitMachine("start", moves, ends)


def _units(number: NumberConstraints) -> tuple[int, tuple[_ModulusTest, ...]]:
    """How many decimals such numbers have, and what they must leave when divided."""
    multiples = [*number.multiples, *([Fraction(1)] if number.whole else [])]
    decimals = DECIMALS
    if multiples:
        of = multiples[0]
        for other in multiples[1:]:
            of = Fraction(
                math.lcm(of.numerator, other.numerator), math.gcd(of.denominator, other.denominator)
            )
        decimals = next((d for d in range(40) if (of * 10**d).denominator == 1), 40)
        if decimals == 40:
            raise UnreadNumbers("multipleOf is of a number without an end")
        tests = [_ModulusTest(int(of * 10**decimals), 0, True)]
    else:
        tests = []
    for other in number.others:
        modulus = other.numerator * 10**decimals
        tests.append(_ModulusTest(modulus // math.gcd(modulus, other.denominator), 0, False))
    if number.residue:
        tests.append(_ModulusTest(number.residue[0], number.residue[1], True))
    tests = [test for test in tests if test.modulus > 1 or not test.expected]
    if tests and math.lcm(*(test.modulus for test in tests)) > MAX_MULTIPLE:
        raise UnreadNumbers(f"multipleOf must be of {MAX_MULTIPLE} steps of its last decimal at most")
    return decimals, tuple(tests)


def _intervals(number: NumberConstraints, decimals: int) -> Iterator[tuple[int | None, int | None]]:
    """The bounds in units, both included; what is excluded splits them."""
    unit = 10**decimals
    low = [math.ceil(number.least * unit)] if number.least is not None else []
    low += [math.floor(number.above * unit) + 1] if number.above is not None else []
    high = [math.floor(number.most * unit)] if number.most is not None else []
    high += [math.ceil(number.below * unit) - 1] if number.below is not None else []
    first: int | None = max(low) if low else None
    last: int | None = min(high) if high else None
    if max(len(str(abs(bound))) for bound in (first or 0, last or 0)) > MAX_DIGITS:
        raise UnreadNumbers(f"a bound has more than {MAX_DIGITS} digits")
    points = sorted({int(point * unit) for point in number.excluded if (point * unit).denominator == 1})
    for point in points:
        if (first is not None and point < first) or (last is not None and point > last):
            continue
        if first is None or first < point:
            yield first, point - 1
        first = point + 1
    if first is None or last is None or first <= last:
        yield first, last


class _DigitStates:
    """Adds the states that read a range of magnitudes to a machine."""

    def __init__(self, range: _MagnitudeRange, moves: Moves, ends: set[object]) -> None:
        self._range = range
        self._moves = moves
        self._ends = ends
        self._modulus = range.modulus
        self._unit = 10**range.decimals
        self._todo: list[tuple[object, ...]] = []

    def add(self, start: object) -> None:
        """Adds the states that read a magnitude from `start` on."""
        low, high = self._range.low, self._range.high
        least = len(str(low // self._unit))
        most = least + 1 if high is None else len(str(high // self._unit))
        for count in range(least, most + 1):
            is_open = high is None and count > least
            lowest = str(low).zfill(count + self._range.decimals) if count == least else ""
            highest = str(high) if high is not None and count == most else ""
            highest = highest.zfill(count + self._range.decimals) if highest else ""
            # (kind, integer digits to come, decimals behind, bounds so far, remainder, fraction)
            state = ("open" if is_open else "int", count, 0, lowest, highest, 0, False)
            self._step(start, state, count > 1)
        while self._todo:
            self._from(self._todo.pop())

    def _from(self, state: tuple[object, ...]) -> None:
        kind, count, at, lowest, highest, left, fraction = state
        assert isinstance(count, int) and isinstance(at, int) and isinstance(left, int)
        decimals = self._range.decimals
        if kind in ("int", "open") and count == 0:
            if self._is_end(state, decimals):
                self._ends.add((self._range, state))
            if decimals:
                point = ("point", 0, 0, lowest, highest, left, fraction)
                self._move(state, ".", ".", point)
        if kind == "open" or count > 0:
            self._step(state, state, False)
        if kind in ("point", "dec") and at < decimals:
            self._step(state, ("dec", 0, at, lowest, highest, left, fraction), False)
        if kind == "dec" and self._is_end(state, decimals - at):
            self._ends.add((self._range, state))

    def _step(self, source: object, state: tuple[object, ...], not_zero: bool) -> None:
        """The moves over a digit."""
        kind, count, at, lowest, highest, left, fraction = state
        assert isinstance(lowest, str) and isinstance(highest, str) and isinstance(left, int)
        assert isinstance(count, int) and isinstance(at, int)
        first = max(int(not_zero), int(lowest[0]) if lowest else 0)
        last = int(highest[0]) if highest else 9
        for digit in range(first, last + 1):
            following = (
                kind,
                max(count - 1, 0),
                at + 1 if kind == "dec" else 0,
                lowest[1:] if lowest and digit == int(lowest[0]) else "",
                highest[1:] if highest and digit == int(highest[0]) else "",
                (left * 10 + digit) % self._modulus,
                self._range.fraction and (bool(fraction) or (kind == "dec" and digit > 0)),
            )
            self._move(source, str(digit), str(digit), following)

    def _move(self, source: object, first: str, last: str, target: tuple[object, ...]) -> None:
        key = (self._range, target)
        where = (self._range, source) if isinstance(source, tuple) and source[0] != "minus" else source
        if key not in self._moves:
            self._moves[key] = []
            if len(self._moves) > MAX_STATES:
                raise UnreadNumbers("bounds this far apart are not supported beside this multipleOf")
            self._todo.append(target)
        self._moves.setdefault(where, []).append((first, last, key))

    def _is_end(self, state: tuple[object, ...], zeros: int) -> bool:
        _, _, _, lowest, _, left, fraction = state
        assert isinstance(lowest, str) and isinstance(left, int)
        if lowest.strip("0") or (self._range.fraction and not fraction):
            return False
        return self._range.holds(left * 10**zeros)
