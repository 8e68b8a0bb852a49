"""Rules in GBNF for one text: within quotes as a printer of JSON writes it, or as it stands.

Each character has one spelling. An automaton becomes a rule per state, none of which is ambiguous, so that a
token is looked up once. Where that would be too many, a pattern that is anchored at both ends is written as
it is built, and a length alone as a repetition; these leave out what needs an escape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from eyas.common.grammars.automata import Automaton, both, of_lengths, of_pattern
from eyas.common.grammars.characters import ALL, Ranges, common, of, size, without
from eyas.common.grammars.regex_syntax import (
    ANY_TEXT,
    CharNode,
    EdgeNode,
    EitherNode,
    Node,
    RepeatNode,
    UnsupportedPattern,
    read,
)
from eyas.common.grammars.regex_syntax import RegexSequence as Parts

MAX_RULES = 400
"""The most rules of a text: each takes a while to compile, since it has masks of its own."""
LONG = 128
"""Characters from which on a length alone is a repetition."""

_LETTERS = {"\b": "b", "\t": "t", "\n": "n", "\f": "f", "\r": "r", '"': '"', "\\": "\\"}
_CONTROLS: Ranges = ((1, 0x1F),)
_NUMBERED = without(_CONTROLS, "".join(_LETTERS))


@dataclass(frozen=True)
class StringPattern:
    """The form of a text: patterns that it matches (`anchored`: as a whole), and its least and greatest
    length.
    """

    patterns: tuple[str, ...] = ()
    anchored: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None


@dataclass(frozen=True)
class StringContext:
    """How texts stand among others. `never`: characters that cannot stand there. `quoted`: they are written
    as JSON's escapes, and a quote ends the text.
    """

    never: str = ""
    quoted: bool = False

    @property
    def end(self) -> str:
        """The end of a text in the grammar."""
        return r'"\""' if self.quoted else '""'


JSON = StringContext("".join(map(chr, range(1, 0x20))) + '"\\', quoted=True)
PLAIN = StringContext()


@lru_cache(maxsize=256)
def rules_of(text: StringPattern, writing: StringContext, name: str) -> str:
    """Rules whose `name` derives the text and its end. Raises UnsupportedPattern if there are none."""
    trees = [(read(pattern), True) for pattern in text.patterns]
    trees += [(read(pattern), False) for pattern in text.anchored]
    if (once := _repeated(trees, text)) is not None:
        ranges, least, most = once
        return f"{name} ::= {class_of(_standing(ranges, writing))}{{{least},{most}}} {writing.end}"
    try:
        return of_automaton(_automaton(trees, text, writing), writing, name)
    except UnsupportedPattern:
        whole = _whole(*trees[0]) if len(trees) == 1 and not text.least and text.most is None else None
        if whole is None:
            raise
    return f"{name} ::= ({_built(whole, writing)}) {writing.end}"


def of_automaton(automaton: Automaton, writing: StringContext, name: str) -> str:
    """Rules of an automaton's texts."""
    if len(automaton.edges) > MAX_RULES:
        raise UnsupportedPattern(f"it takes more than {MAX_RULES} states")
    names = [name if not state else f"{name}_{state}" for state in range(len(automaton.edges))]
    lines = list[str]()
    for state, edges in enumerate(automaton.edges):
        parts = [writing.end] if state in automaton.ends else []
        for ranges, at in edges:
            parts += [f"{one} {names[at]}" for one in _spelled(ranges, writing)]
        lines.append(f"{names[state]} ::= {' | '.join(parts)}")
    return "\n".join(lines)


def _automaton(trees: Sequence[tuple[Node, bool]], text: StringPattern, writing: StringContext) -> Automaton:
    automaton = of_pattern(ANY_TEXT, search=False)
    for tree, search in trees:
        automaton = both(automaton, of_pattern(tree, search))
    if writing.never and not writing.quoted:
        stands = of_pattern(RepeatNode(CharNode(without(ALL, writing.never)), 0, None), search=False)
        try:
            automaton = both(automaton, stands)
        except UnsupportedPattern:
            raise UnsupportedPattern(f"{writing.never!r} in it cannot be written where it stands") from None
    return of_lengths(automaton, text.least, text.most) if text.least or text.most is not None else automaton


def _repeated(trees: Sequence[tuple[Node, bool]], text: StringPattern) -> tuple[Ranges, int, int] | None:
    """A text of many characters of one set: the set, how many at least and at most. None: it is not so."""
    whole = ANY_TEXT if not trees else _whole(*trees[0]) if len(trees) == 1 else None
    if not isinstance(whole, RepeatNode) or not isinstance(whole.part, CharNode):
        return None
    least = max(whole.least, text.least)
    bounds = [bound for bound in (whole.most, text.most) if bound is not None]
    if not bounds or min(bounds) < max(least, LONG):
        return None
    return whole.part.ranges, least, min(bounds)


def _whole(tree: Node, search: bool) -> Node | None:
    """The tree without places, if it must be the whole text; else None."""
    parts = tree.parts if isinstance(tree, Parts) else (tree,)
    begins, ends = parts[:1] == (EdgeNode.START,), parts[-1:] == (EdgeNode.END,)
    inner = parts[begins : len(parts) - ends]
    if (search and not (begins and ends)) or any(_has_places(part) for part in inner):
        return None
    return inner[0] if len(inner) == 1 else Parts(inner)


def _has_places(tree: Node) -> bool:
    match tree:
        case EdgeNode():
            return True
        case RepeatNode():
            return _has_places(tree.part)
        case Parts() | EitherNode():
            return any(map(_has_places, tree.parts))
    return False


def _built(tree: Node, writing: StringContext) -> str:
    """A tree without places, as the right side of a rule."""
    match tree:
        case CharNode():
            return class_of(_standing(tree.ranges, writing))
        case Parts():
            return " ".join(_built(part, writing) for part in tree.parts) or '""'
        case EitherNode():
            return f"({' | '.join(_built(part, writing) for part in tree.parts)})"
        case RepeatNode():
            most = "" if tree.most is None else tree.most
            return f"({_built(tree.part, writing)}){{{tree.least},{most}}}"
    raise AssertionError(tree)


def _standing(ranges: Ranges, writing: StringContext) -> Ranges:
    if allowed := without(ranges, writing.never):
        return allowed
    raise UnsupportedPattern("a class of it has no character that can stand as it is")


def _spelled(ranges: Ranges, writing: StringContext) -> list[str]:
    """How one of the characters is written: any of these."""
    allowed = without(ranges, writing.never)
    parts = [class_of(allowed)] if allowed else []
    if not writing.quoted:
        return parts
    letters = "".join(letter for character, letter in _LETTERS.items() if common(ranges, of(character)))
    if letters:
        parts.append(rf'"\\" {class_of(of(letters))}')
    for high in (0, 1):
        if numbered := common(common(ranges, _NUMBERED), ((high << 4, (high << 4) + 15),)):
            digits = "".join(f"{n & 15:x}" for first, last in numbered for n in range(first, last + 1))
            parts.append(rf'"\\u00{high}" {class_of(of(digits))}')
    return parts


def class_of(ranges: Ranges) -> str:
    """One of these characters."""
    if size(ranges) == 1:
        return quoted(chr(ranges[0][0]))
    return "[" + "".join(_range(chr(first), chr(last)) for first, last in ranges) + "]"


def quoted(text: str) -> str:
    """A rule's text."""
    return '"' + "".join(map(_character, text)) + '"'


def _range(first: str, last: str) -> str:
    return _character(first) + ("" if first == last else f"-{_character(last)}")


def _character(character: str) -> str:
    number = ord(character)
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"
