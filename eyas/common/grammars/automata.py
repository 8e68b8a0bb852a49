"""Deterministic automata over characters: those of patterns, of lengths, and what several have in common.

A pattern's automaton is built from its tree by subsets. Places between characters (`^`, `$`, `\\b`) are
followed as such: a state has the kind of the character before it, and steps on only once the next one is
there. The number of states has a bound, since patterns may need exponentially many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from eyas.common.grammars.characters import ALL, NO_WORD, WORD, Ranges, common, joined
from eyas.common.grammars.regex_syntax import (
    ANY_TEXT,
    CharNode,
    EdgeNode,
    EitherNode,
    Node,
    RepeatNode,
    UnsupportedPattern,
)
from eyas.common.grammars.regex_syntax import RegexSequence as Parts

MAX_STATES = 2000
_MOST_NODES = 20_000  # of an automaton that is not yet deterministic
_MOST_STEPS = 400_000

Edges = list[tuple[Ranges, int]]


class NoText(UnsupportedPattern):
    """The error of a pattern that no text fits."""


class Automaton(NamedTuple):
    """Begins in state 0. From each state, where the characters lead; `ends`: the states a text may end in."""

    edges: list[Edges]
    ends: frozenset[int]


def of_pattern(tree: Node, search: bool) -> Automaton:
    """The texts that a pattern matches as a whole; with `search`, those in which it matches somewhere.

    Raises UnsupportedPattern for a pattern that needs too many states.
    """
    nodes = _NfaNodes()
    end = nodes.add(Parts((ANY_TEXT, tree, ANY_TEXT)) if search else tree, nodes.new())
    return _smallest(*_deterministic(nodes, end))


def of_others(names: Sequence[str]) -> Automaton:
    """All texts but these."""
    edges, ends, places = list[dict[int, int]]([{}]), set[int](), {"": 0}
    for name in names:
        for i in range(len(name)):
            if name[: i + 1] not in places:
                places[name[: i + 1]] = len(edges)
                edges[places[name[:i]]][ord(name[i])] = len(edges)
                edges.append({})
        ends.add(places[name])
    free = len(edges)
    moves = [_with_rest([(((c, c),), at) for c, at in one.items()], free) for one in edges]
    return Automaton([*moves, [(ALL, free)]], frozenset(range(free + 1)) - ends)


def all_but(automaton: Automaton) -> Automaton:
    """The texts that are none of its own."""
    free = len(automaton.edges)
    moves = [_with_rest(edges, free) for edges in automaton.edges]
    return Automaton([*moves, [(ALL, free)]], frozenset(range(free + 1)) - automaton.ends)


def reads(automaton: Automaton, text: str) -> bool:
    """Whether the text is one of its own."""
    state = 0
    for number in map(ord, text):
        following = [at for ranges, at in automaton.edges[state] if any(a <= number <= b for a, b in ranges)]
        if not following:
            return False
        state = following[0]
    return state in automaton.ends


def _with_rest(edges: Edges, free: int) -> Edges:
    taken = joined([part for ranges, _ in edges for part in ranges])
    rest, at = list[tuple[int, int]](), 0
    for first, last in (*taken, (0x110000, 0x110000)):
        if at < first:
            rest.append((at, first - 1))
        at = last + 1
    return [*edges, (common(tuple(rest), ALL), free)]


def both(one: Automaton, other: Automaton) -> Automaton:
    """The texts of both. Raises UnsupportedPattern where that takes too many states."""
    places, todo = {(0, 0): 0}, [(0, 0)]
    edges, ends = list[Edges](), set[int]()
    for mine, theirs in todo:
        if mine in one.ends and theirs in other.ends:
            ends.add(len(edges))
        here: Edges = []
        for ranges, at in one.edges[mine]:
            for others, there in other.edges[theirs]:
                if shared := common(ranges, others):
                    here.append((shared, _place(places, todo, (at, there))))
        edges.append(here)
    return _smallest(edges, ends)


def of_lengths(automaton: Automaton, least: int, most: int | None) -> Automaton:
    """The texts of `least` to `most` characters. Raises UnsupportedPattern for too many states."""
    counted = most if most is not None else least
    if most is not None and (longest := length(automaton)) is not None and longest <= most:
        most, counted = None, least
    places, todo = {(0, 0): 0}, [(0, 0)]
    edges, ends = list[Edges](), set[int]()
    for state, count in todo:
        if count >= least and state in automaton.ends:
            ends.add(len(edges))
        here: Edges = []
        for ranges, at in automaton.edges[state]:
            if count < counted or most is None:
                here.append((ranges, _place(places, todo, (at, min(count + 1, counted)))))
        edges.append(here)
    return _smallest(edges, ends)


def length(automaton: Automaton) -> int | None:
    """Returns the length of the longest text; None: there is none."""
    depth, left = [0] * len(automaton.edges), [0] * len(automaton.edges)
    for edges in automaton.edges:
        for _, at in edges:
            left[at] += 1
    ready, seen = [state for state, count in enumerate(left) if not count], 0
    for state in ready:
        seen += 1
        for _, at in automaton.edges[state]:
            depth[at] = max(depth[at], depth[state] + 1)
            left[at] -= 1
            if not left[at]:
                ready.append(at)
    return max(depth) if seen == len(depth) else None


def _place(places: dict[Any, int], todo: list[Any], key: Any) -> int:
    if key not in places:
        if len(places) >= MAX_STATES:
            raise UnsupportedPattern(f"it takes more than {MAX_STATES} states")
        places[key] = len(places)
        todo.append(key)
    return places[key]


class _NfaNodes:
    """An automaton that may be in several nodes at once: steps by characters, and by nothing, some of them
    only at a place.
    """

    def __init__(self) -> None:
        self.steps: list[list[tuple[Ranges, int]]] = []
        self.free: list[list[tuple[EdgeNode | None, int]]] = []

    def new(self) -> int:
        if len(self.steps) >= _MOST_NODES:
            raise UnsupportedPattern("its repetitions are too many")
        self.steps.append([])
        self.free.append([])
        return len(self.steps) - 1

    def add(self, tree: Node, at: int) -> int:
        """Adds what leads from `at` over the tree; the node where that ends."""
        match tree:
            case CharNode():
                end = self.new()
                self.steps[at].append((tree.ranges, end))
                return end
            case EdgeNode():
                end = self.new()
                self.free[at].append((tree, end))
                return end
            case Parts():
                for part in tree.parts:
                    at = self.add(part, at)
                return at
            case EitherNode():
                end = self.new()
                for part in tree.parts:
                    self.free[self.add(part, self._after(at))].append((None, end))
                return end
        return self._times(tree, at)

    def _times(self, tree: RepeatNode, at: int) -> int:
        for _ in range(tree.least):
            at = self.add(tree.part, at)
        end = self.new()
        if tree.most is None:
            again = self._after(at)
            self.free[self.add(tree.part, again)].append((None, again))
            self.free[again].append((None, end))
            return end
        for _ in range(tree.most - tree.least):
            self.free[at].append((None, end))
            at = self.add(tree.part, self._after(at))
        self.free[at].append((None, end))
        return end

    def _after(self, at: int) -> int:
        end = self.new()
        self.free[at].append((None, end))
        return end


_START, _WORD, _NO_WORD, _NEITHER = range(4)
"""Kinds of neighbours of a place: nothing, a letter or digit, none of them, or a character that some take for
a letter: no place is decided beside that.
"""


def _holds(edge: EdgeNode, before: int, after: int) -> bool:
    """Whether a place is such a one."""
    if edge in (EdgeNode.START, EdgeNode.END):
        return (before if edge is EdgeNode.START else after) == _START
    if _NEITHER in (before, after) or before == after == _START:  # of no text, too, they think differently
        return False
    return ((before == _WORD) != (after == _WORD)) == (edge is EdgeNode.WORD)


def _closure(nodes: _NfaNodes, states: frozenset[int], before: int, after: int) -> frozenset[int]:
    """The nodes that are reached without a character, at a place between two kinds of characters."""
    reached, todo = set(states), list(states)
    while todo:
        for edge, at in nodes.free[todo.pop()]:
            if at not in reached and (edge is None or _holds(edge, before, after)):
                reached.add(at)
                todo.append(at)
    return frozenset(reached)


def _atoms(sets: Sequence[Ranges]) -> tuple[list[Ranges], dict[Ranges, int]]:
    """Sets of characters that none of these sets tells apart; and each set, as bits of them."""
    sets = list(dict.fromkeys(sets))
    changes = dict[int, list[int]]()
    for i, ranges in enumerate(sets):
        for first, last in ranges:
            changes.setdefault(first, []).append(i)
            changes.setdefault(last + 1, []).append(i)
    marks, now = sorted(changes), 0
    groups = dict[int, list[tuple[int, int]]]()
    for mark, end in zip(marks, marks[1:], strict=False):
        for i in changes[mark]:
            now ^= 1 << i
        if now:
            groups.setdefault(now, []).append((mark, end - 1))
    bits = dict.fromkeys(sets, 0)
    for atom, group in enumerate(groups):
        for i, ranges in enumerate(sets):
            if group >> i & 1:
                bits[ranges] |= 1 << atom
    return [joined(parts) for parts in groups.values()], bits


class _CharacterSets:
    """Sets of characters by the bits of their atoms."""

    def __init__(self, atoms: Sequence[Ranges]) -> None:
        self._atoms = atoms
        self._known = dict[int, Ranges]()

    def of(self, bits: int) -> Ranges:
        if bits not in self._known:
            parts = [part for i, atom in enumerate(self._atoms) if bits >> i & 1 for part in atom]
            self._known[bits] = joined(parts)
        return self._known[bits]


def _deterministic(nodes: _NfaNodes, end: int) -> tuple[list[Edges], set[int]]:
    """States are sets of nodes, each with the kind of the character before it, where places need it."""
    used = {edge for free in nodes.free for edge, _ in free if edge is not None}
    words = [WORD, NO_WORD] if used & {EdgeNode.WORD, EdgeNode.NO_WORD} else []
    atoms, bits = _atoms([*words, *(ranges for step in nodes.steps for ranges, _ in step)])
    kinds = [_kind(1 << i, bits) if words else _NEITHER for i in range(len(atoms))]
    steps = [
        [(i, at) for ranges, at in step for i in range(len(atoms)) if bits[ranges] >> i & 1]
        for step in nodes.steps
    ]
    sets = _CharacterSets(atoms)
    first = (frozenset({0}), _START)
    places, todo = {first: 0}, [first]
    edges, ends, work = list[Edges](), set[int](), 0
    for states, before in todo:
        if end in _closure(nodes, states, before, _START):
            ends.add(len(edges))
        here = dict[int, int]()
        for kind in set(kinds) if used else (_NEITHER,):
            targets = dict[int, set[int]]()
            for node in _closure(nodes, states, before, kind):
                work += 1 + len(steps[node])
                for i, at in steps[node]:
                    if not used or kinds[i] == kind:
                        targets.setdefault(i, set()).add(at)
            if work > _MOST_STEPS:
                raise UnsupportedPattern("it takes too many steps to follow")
            for i, after in targets.items():
                place = _place(places, todo, (frozenset(after), kinds[i] if used else _START))
                here[place] = here.get(place, 0) | 1 << i
        edges.append([(sets.of(atoms_of), place) for place, atoms_of in here.items()])
    return edges, ends


def _kind(atom: int, bits: dict[Ranges, int]) -> int:
    return _WORD if bits[WORD] & atom else _NO_WORD if bits[NO_WORD] & atom else _NEITHER


def _smallest(edges: list[Edges], ends: set[int]) -> Automaton:
    """Minimizes the automaton. Raises UnsupportedPattern if there is no text."""
    alive = _alive(edges, ends)
    if 0 not in alive:
        raise NoText("no text fits it")
    atoms, bits = _atoms([ranges for here in edges for ranges, _ in here])
    sets = _CharacterSets(atoms)
    steps = {
        state: [(bits[ranges], at) for ranges, at in edges[state] if at in alive] for state in sorted(alive)
    }
    group = _alike(steps, _reach(edges, ends, alive))
    numbers = {name: number for number, name in enumerate(dict.fromkeys(group.values()))}
    moves = list[Edges]([[] for _ in numbers])
    for state, here in steps.items():
        after = _by_group(here, group)
        moves[numbers[group[state]]] = [(sets.of(atoms_of), numbers[at]) for at, atoms_of in after.items()]
    return Automaton(moves, frozenset(numbers[group[state]] for state in alive if state in ends))


def _by_group(steps: list[tuple[int, int]], group: dict[int, int]) -> dict[int, int]:
    """Returns the atoms that enter each group."""
    parts = dict[int, int]()
    for atoms_of, at in steps:
        parts[group[at]] = parts.get(group[at], 0) | atoms_of
    return parts


def _alike(steps: dict[int, list[tuple[int, int]]], unlike: dict[int, Any]) -> dict[int, int]:
    """A number for each state, in the states' order, the same where the same texts follow.

    `steps`: by state, (atoms, the state behind them). `unlike`: states of other values have other texts.
    Groups are split until nothing tells states of one apart; a state is looked at again only when one behind
    it got another number (after Hopcroft, 1971).
    """
    back = dict[int, list[int]]()
    for state, here in steps.items():
        for _, at in here:
            back.setdefault(at, []).append(state)
    names = dict[Any, int]()
    group = {state: names.setdefault(unlike[state], len(names)) for state in steps}
    sizes, changed = Counter(group.values()), list(steps)
    todo: Iterable[int] = steps
    while changed:
        changed = []
        looked_at = dict[int, dict[Any, list[int]]]()  # by group, then by what follows
        for state in todo:
            follows = frozenset(_by_group(steps[state], group).items())
            looked_at.setdefault(group[state], {}).setdefault(follows, []).append(state)
        for name, parts in looked_at.items():
            others = sizes[name] - sum(map(len, parts.values()))  # alike: nothing behind them has changed
            ordered = sorted(parts.values(), key=len)
            for part in ordered if others else ordered[:-1]:
                sizes[name] -= len(part)
                sizes[new := len(sizes)] = len(part)
                group.update(dict.fromkeys(part, new))
                changed += part
        todo = dict.fromkeys(earlier for state in changed for earlier in back.get(state, ()))
    return group


def _reach(edges: list[Edges], ends: set[int], alive: set[int]) -> dict[int, Any]:
    """Returns the least and greatest length of the texts from each live state: unlike states may differ."""
    back, ahead = dict[int, list[int]](), dict[int, int]()
    for state in alive:
        after = {at for _, at in edges[state] if at in alive}
        ahead[state] = len(after)
        for at in after:
            back.setdefault(at, []).append(state)
    least, todo = {state: 0 for state in ends}, list(ends)
    for state in todo:
        for earlier in back.get(state, ()):
            if earlier not in least:
                least[earlier] = least[state] + 1
                todo.append(earlier)
    most = dict[int, int]()
    todo = [state for state in alive if not ahead[state]]
    for state in todo:
        most.setdefault(state, 0)
        for earlier in back.get(state, ()):
            most[earlier] = max(most.get(earlier, 0), most[state] + 1)
            ahead[earlier] -= 1
            if not ahead[earlier]:
                todo.append(earlier)
    return {state: (least[state], None if ahead[state] else most[state]) for state in alive}


def _alive(edges: list[Edges], ends: set[int]) -> set[int]:
    """States from which a text may end."""
    back = dict[int, list[int]]()
    for state, here in enumerate(edges):
        for _, at in here:
            back.setdefault(at, []).append(state)
    alive, todo = set(ends), list(ends)
    while todo:
        for state in back.get(todo.pop(), ()):
            if state not in alive:
                alive.add(state)
                todo.append(state)
    return alive
