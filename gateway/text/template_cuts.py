"""The changes that a chat template makes to texts: words that it cuts out, ends that it strips, case.

A caller can hide a control token behind such a change: cutting `/think` out of `<|im_/thinkend|>` makes one.
The changes are read off jinja2's syntax trees; `caller_text` looks for tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jinja2 import nodes

_CUT = {"replace", "split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix"}
_CUT_ANYWHERE = {"splitlines", "striptags"}
_STRIP = {"strip", "lstrip", "rstrip", "trim"}
_CASES = {"upper", "lower", "title", "capitalize", "swapcase", "casefold"}
_SPACES = "".join(chr(code) for code in range(0x3001) if chr(code).isspace())


@dataclass(frozen=True)
class TemplateCuts:
    """`words`: what is cut out or split at; an empty one is anywhere. `looked_for`: all texts that the
    template could look for. `ends`: characters that it strips. `changes_case`: it writes other letters.
    """

    words: frozenset[str] = frozenset()
    looked_for: frozenset[str] = frozenset()
    ends: str = _SPACES
    changes_case: bool = False


def cuts_of(trees: Iterable[nodes.Template]) -> TemplateCuts:
    """Returns how these templates cut texts, by the functions that they call."""
    words: set[str] = set()
    looked_for: set[str] = set()
    ends, changes_case = set(_SPACES), False
    for tree in trees:
        looked_for |= {const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)}
        for name, args in _used(tree):
            first = args[0].value if args and isinstance(args[0], nodes.Const) else ""
            changes_case |= name in _CASES
            if name in _CUT_ANYWHERE or name in _CUT:
                words.add(first if name in _CUT and isinstance(first, str) else "")
            elif name in _STRIP and isinstance(first, str):
                ends |= set(first)
    return TemplateCuts(frozenset(words), frozenset(looked_for), "".join(sorted(ends)), changes_case)


def _used(tree: nodes.Template) -> Iterator[tuple[str, list[nodes.Expr]]]:
    """Names and arguments of all methods and filters, also of filters that `map` is given."""
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr):
            yield call.node.attr, call.args
    for filter in tree.find_all(nodes.Filter):
        name, args = filter.name, filter.args
        if name == "map" and args and isinstance(args[0], nodes.Const):
            name, args = str(args[0].value), args[1:]
        yield name, args
