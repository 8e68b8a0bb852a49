"""How much text in a row a grammar forces at most.

An engine has all text that is forced next computed at once, by a call of the library that nothing
interrupts: in a rule whose texts never end that call would not end either. What is forced begins each text
that is possible there, the shortest one too; so the shortest texts are the bound.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import NoReturn

from eyas.common.errors import InvalidRequest

MOST_FORCED = 1 << 16
"""Characters in a row: as long as the notation of a grammar may be."""

_RULE = re.compile(r"^(\S+) ::= (.*(?:\n(?!\S+ ::= ).*)*)", re.MULTILINE)
_TOKEN = re.compile(
    r'(?P<text>"(?:[^"\\]|\\.)*")'
    r"|(?P<class>\[(?:[^\]\\]|\\.)*\])"
    r"|(?P<ahead>\(=)|(?P<open>\()|(?P<close>\))|(?P<choice>\|)"
    r"|(?P<repeat>[*+?]|\{(?P<least>\d*)[^}]*\})"
    r'|(?P<name>[^\s()|"\[\]{}*+?]+)',
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x..|u.{4}|U.{8}|.)", re.DOTALL)
_DISPATCHES = ("TagDispatch(", "TokenTagDispatch(")


@dataclass
class _Form:
    """One alternative of a rule: the characters that it forces itself, and how often it needs other rules."""

    characters: int = 0
    parts: Counter[str] = field(default_factory=Counter)

    def shortest(self, shortest: Mapping[str, float]) -> float:
        """The forced characters of its shortest text; infinite without one, as far as `shortest` knows."""
        return self.characters + sum(times * shortest[name] for name, times in self.parts.items() if times)


def check_forced(rules: str) -> None:
    """Raises InvalidRequest if a rule that `root` needs has no text that ends, or if more than `MOST_FORCED`
    characters may be forced in a row. `rules`: as the library reads or prints them, each on its own lines.
    """
    forms = _used(dict(_RULE.findall(rules)))
    shortest = _shortest(forms)
    for name, length in shortest.items():
        if length == inf:
            _refuse(name, "has no text that ends")
    for name, alternatives in forms.items():
        if max(form.shortest(shortest) for form in alternatives) > MOST_FORCED:
            _refuse(name, f"forces more than {MOST_FORCED} characters in a row")


def _used(bodies: Mapping[str, str]) -> dict[str, list[_Form]]:
    """The rules that `root` needs, and the brackets in them."""
    used, todo = dict[str, list[_Form]](), ["root"]
    while todo:
        name = todo.pop()
        if name in used:
            continue
        rules = _rules_in(name, bodies[name], bodies)
        used |= rules
        todo += {part for alternatives in rules.values() for form in alternatives for part in form.parts}
    return used


def _rules_in(name: str, body: str, names: Collection[str]) -> dict[str, list[_Form]]:
    """A rule, and each bracket in it as a rule of its own. A dispatch of tags may be without a tag."""
    if body.startswith(_DISPATCHES):
        tags = (token["name"] for token in _TOKEN.finditer(body))
        return {name: [_Form(), _Form(0, Counter(tag for tag in tags if tag in names))]}
    rules, opened = {name: [_Form()]}, [(name, 1)]
    tokens = [*_TOKEN.finditer(body)]
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        times, form = _least(after), rules[opened[-1][0]][-1]
        match token.lastgroup:
            case "text":
                form.characters += times * (len(_ESCAPE.sub("_", token[0])) - len('""'))
            case "class":
                form.characters += times * (len(_ESCAPE.sub("_", token[0])) == len("[_]"))
            case "choice":
                rules[opened[-1][0]].append(_Form())
            case "open" | "ahead":  # what is ahead is another rule's
                bracket = f"{name} ({len(rules)})"
                rules[bracket] = [_Form()]
                opened.append((bracket, int(token.lastgroup == "open")))
            case "close":
                bracket, counts = opened.pop()
                rules[opened[-1][0]][-1].parts[bracket] += counts * times
            case "name" if token[0] in names:
                form.parts[token[0]] += times
    return rules


def _least(after: re.Match[str] | None) -> int:
    """How often something stands there at least, by the token behind it."""
    if after is None or not after["repeat"]:
        return 1
    return int(after["least"] or 0) if after["least"] is not None else int(after["repeat"] == "+")


def _shortest(forms: Mapping[str, list[_Form]]) -> dict[str, float]:
    """Of each rule, the forced characters of the text that has the fewest; the shortest are found first
    (Knuth, A Generalization of Dijkstra's Algorithm, 1977).
    """
    shortest, missing = dict.fromkeys(forms, inf), Counter[int]()
    users, found = defaultdict[str, list[tuple[str, _Form]]](list), list[tuple[float, str]]()
    for name, alternatives in forms.items():
        for form in alternatives:
            needed = [part for part, times in form.parts.items() if times]
            missing[id(form)] = len(needed)
            for part in needed:
                users[part].append((name, form))
            if not needed:
                found.append((form.characters, name))
    heapify(found)
    while found:
        length, name = heappop(found)
        if shortest[name] < inf:
            continue
        shortest[name] = length
        for user, form in users[name]:
            missing[id(form)] -= 1
            if not missing[id(form)]:
                heappush(found, (form.shortest(shortest), user))
    return shortest


def _refuse(name: str, what: str) -> NoReturn:
    raise InvalidRequest(f"its rule {name.partition(' ')[0]:.40} {what}", param="grammar")
