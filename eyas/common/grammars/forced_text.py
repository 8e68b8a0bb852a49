"""How much text in a row a grammar forces at most.

An engine has all text that is forced next computed at once, by a call of the library that nothing
interrupts: in a rule whose texts never end that call would not end either. What is forced begins each text
that is possible there, the shortest one too; so the shortest texts are the bound.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf

from eyas.common.errors import InvalidRequest

MOST_FORCED = 1 << 16
"""Characters in a row: as long as the notation of a grammar may be."""

_RULE = re.compile(r"^(\S+) ::= (.*(?:\n(?!\S+ ::= ).*)*)", re.MULTILINE)
_TOKEN = re.compile(
    r'(?P<text>"(?:[^"\\]|\\.)*")'
    r"|(?P<class>\[(?:[^\]\\]|\\.)*\]\*?)"
    r"|(?P<ahead>\(=)|(?P<choice>\|)"
    r'|(?P<name>[^\s()|"\[{]+)(?:\{(?P<times>\d+), -?\d+\})?',
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x..|u.{4}|U.{8}|.)", re.DOTALL)
_DISPATCHES = ("TagDispatch(", "TokenTagDispatch(")


@dataclass(frozen=True)
class _Form:
    """One alternative of a rule: the characters that it forces itself, and how often it needs other rules."""

    characters: int
    parts: Mapping[str, int]

    def shortest(self, shortest: Mapping[str, float]) -> float:
        """The forced characters of its shortest text; infinite without one, as far as `shortest` knows."""
        return self.characters + sum(times * shortest[name] for name, times in self.parts.items() if times)


def check_forced(rules: str) -> None:
    """Raises InvalidRequest if a rule that `root` needs has no text that ends, or if more than `MOST_FORCED`
    characters may be forced in a row. `rules`: a grammar, as the library prints it.
    """
    forms = _used(dict(_RULE.findall(rules)))
    shortest = _shortest(forms)
    for name, length in shortest.items():
        if length == inf:
            _refuse(f"its rule {name:.40} has no text that ends")
    for name, alternatives in forms.items():
        longest = max(form.shortest(shortest) for form in alternatives)
        if longest > MOST_FORCED:
            _refuse(f"its rule {name:.40} forces {longest:.0f} characters in a row, more than {MOST_FORCED}")


def _used(bodies: Mapping[str, str]) -> dict[str, list[_Form]]:
    """The rules that `root` needs."""
    used, todo = dict[str, list[_Form]](), ["root"]
    while todo:
        name = todo.pop()
        if name not in used:
            used[name] = _forms(bodies[name], bodies)
            todo += (part for form in used[name] for part in form.parts)
    return used


def _shortest(forms: Mapping[str, list[_Form]]) -> dict[str, float]:
    """Of each rule, the forced characters of the text that has the fewest."""
    users = defaultdict[str, set[str]](set)
    for name, alternatives in forms.items():
        for form in alternatives:
            for part in form.parts:
                users[part].add(name)
    shortest, todo = dict.fromkeys(forms, inf), list(forms)
    while todo:
        name = todo.pop()
        length = min(form.shortest(shortest) for form in forms[name])
        if length < shortest[name]:
            shortest[name] = length
            todo += users[name]
    return shortest


def _forms(body: str, names: Collection[str]) -> list[_Form]:
    """A rule's right side: a choice of sequences, or a dispatch of tags, which may be without a tag."""
    if body.startswith(_DISPATCHES):
        tags = Counter(token["name"] for token in _TOKEN.finditer(body) if token["name"] in names)
        return [_Form(0, {}), _Form(0, tags)]
    forms, characters, parts = list[_Form](), 0, Counter[str]()
    for token in _TOKEN.finditer(body):
        if token["ahead"]:  # what follows the rule is another rule's
            break
        if token["choice"]:
            forms.append(_Form(characters, parts))
            characters, parts = 0, Counter()
        elif token["text"]:
            characters += len(_ESCAPE.sub("_", token["text"])) - 2
        elif token["class"]:
            characters += len(_ESCAPE.sub("_", token["class"])) == len("[_]")
        elif token["name"] in names:
            parts[token["name"]] += int(token["times"] or 1)
    return [*forms, _Form(characters, parts)]


def _refuse(reason: str) -> None:
    raise InvalidRequest(reason, param="grammar")
