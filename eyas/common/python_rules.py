"""Rules of JSON values, made rules of the same values as Python's literals.

It knows how xgrammar writes its rules for JSON, and where the two languages differ: names of constants,
escapes in strings, and numbers that a float cannot hold. What these rules let through, Python reads as the
value that JSON would have. It refuses to know JSON schemas and what stands around a value.
"""

from __future__ import annotations

import json
import re
from typing import Any

from eyas.common.errors import InvalidRequest
from eyas.common.patterns import RULES
from eyas.common.rule_text import IN_STRINGS, PARTS, in_json

_OURS = {
    "basic_escape": r'[\"\\bfnrt] | "u" ([0-9A-CE-Fa-ce-f] [0-9A-Fa-f]{3} | [Dd] [0-7] [0-9A-Fa-f]{2})',
    "basic_string_sub": rf'"\"" | {IN_STRINGS} basic_string_sub | "\\" basic_escape basic_string_sub',
    "basic_number": '"-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+\\-]? [0-9]{1,2})?',
}
"""Rules by name. JSON's escapes `\\/` and of half a surrogate pair mean something else in Python."""
_TOKEN = re.compile(rf'Regex\("(?:[^"\\]|\\.)*"|{PARTS.pattern}', re.DOTALL)
_RULE = re.compile(r"^(\w+) ::= ", re.MULTILINE)
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.))", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "0": "\0"}
_VALUE = re.compile(r'[{\["]|(?:true|false|null)\Z')  # a constant that Python may write otherwise


def of_python(rules: str) -> str:
    """Rules of JSON values, as the library prints them, made rules of literals.

    Raises InvalidRequest for a constant that Python cannot write.
    """
    return "\n".join(map(_rule, in_json(rules).splitlines()))


def literal(value: Any) -> str:
    """A JSON value as a literal; its strings are in double quotes, without characters that need an escape.

    Raises InvalidRequest for text with half a surrogate pair, and for numbers that are none.
    """
    match value:
        case None | bool():
            return str(value)
        case list():
            return f"[{', '.join(map(literal, value))}]"
        case dict():
            return "{" + ", ".join(f"{literal(key)}: {literal(part)}" for key, part in value.items()) + "}"
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        raise InvalidRequest("a value of it cannot be written in Python", param="grammar") from None
    return text


def _rule(line: str) -> str:
    named = _RULE.match(line)
    if named and named[1] in _OURS:
        return named[0] + _OURS[named[1]]
    return _TOKEN.sub(lambda part: _part(part[0]), line)


def _part(part: str) -> str:
    """A text or a class; or an expression, whose text is no constant."""
    if part[0] != '"' or not _VALUE.match(text := _ESCAPED.sub(_character, part[1:-1])):
        return part
    try:
        value = json.loads(text)
    except ValueError:
        return part  # a bracket or a quote by itself
    return RULES.literal(literal(value))


def _character(escape: re.Match[str]) -> str:
    number = escape[1] or escape[2] or escape[3]
    return chr(int(number, 16)) if number else _NAMED.get(escape[4], escape[4])
