"""Values of modules by patterns of their names, as adapter_config.json has them.

Patterns are followed by automata: `re` may take any time for a short text, and holds the interpreter's lock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Generic, TypeVar

from eyas.common.grammars import automata
from eyas.common.grammars.regex_syntax import UnsupportedPattern, read

ValueT = TypeVar("ValueT")

MOST_AUTOMATA = 64  # each takes a quarter of a second at most
_NAME = re.compile(r"\^?[\w.-]*\$?")  # what most patterns are: `re` is as good for these, and made sooner


class ModulePatterns(Generic[ValueT]):
    """Values by patterns; the first that names a module counts, as PEFT's `get_pattern_key` finds it."""

    def __init__(self, values: Mapping[str, ValueT]) -> None:
        """Raises UnsupportedPattern for what is no regular expression, and for what no automaton follows."""
        if sum(not _NAME.fullmatch(pattern) for pattern in values) > MOST_AUTOMATA:
            raise UnsupportedPattern(f"has more than {MOST_AUTOMATA} patterns that are no names")
        self._values = [(_reader(pattern), value) for pattern, value in values.items()]

    def value(self, module: str, default: ValueT) -> ValueT:
        """The value of a module; `default` where no pattern names it."""
        return next((value for names, value in self._values if names(module)), default)


def _reader(pattern: str) -> Callable[[str], object]:
    """Whether a pattern names a module: one that begins with `^` its beginning, others whole last parts."""
    whole = f"({pattern}).*" if pattern.startswith("^") else rf"(.*\.)?({pattern})"
    if _NAME.fullmatch(pattern):
        return re.compile(whole).fullmatch
    try:
        return partial(automata.reads, automata.of_pattern(read(whole), search=False))
    except UnsupportedPattern as error:
        raise UnsupportedPattern(f"{pattern[:100]!r}: {error}") from None
