"""The grammar of calls written as Python: `[f(a=1), g(b="x")]`.

What it lets through, `pythonic` reads as arguments that follow the tool's schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eyas.common.errors import InvalidRequest
from eyas.common.grammars.notations import PYTHON
from gateway.parsers.parameters import (
    OTHER_NAMES,
    ObjectParameters,
    parameters_of,
    standing,
    unfollowed,
    unheld,
)
from gateway.parsers.pythonic import TITLE
from gateway.parsers.tags import Format, Mark, Schemas, either, optional, repeated, sequence, text

_COMMA: Format = text(", ")
_PARTS = 6


def grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools, and nothing else."""
    call = either([_call(name, schema) for name, schema in tools.items()])
    return sequence(text("["), repeated(call, _COMMA, many), text("]"))


def _call(tool: str, schema: Mapping[str, Any]) -> Format:
    def argument(title: str, value: Any) -> Format:
        if not title:
            return _argument({"type": "regex", "pattern": f"{OTHER_NAMES}="}, value, schema)
        if not TITLE.fullmatch(title):
            unheld(title, "the format of the model's calls cannot write this name")
        return _argument(text(f"{title}="), value, schema)

    return sequence(text(f"{tool}("), in_order(tool, schema, argument, _COMMA), text(")"))


def in_order(
    tool: str, schema: Mapping[str, Any], argument: Callable[[str, Any], Format], comma: Format
) -> Format:
    """Arguments in the order of the schema, each where it is required or not, with commas in between.

    `argument`: the grammar of one with its name; without a name it is of any. Raises InvalidRequest, which
    names the tool, for what cannot be held to.
    """
    try:
        return either([_arguments(part, argument, comma) for part in parameters_of(schema)])
    except InvalidRequest as error:
        raise InvalidRequest(f"{unfollowed(tool)}{error.message}", param="tools") from None


def _arguments(parameters: ObjectParameters, argument: Callable[[str, Any], Format], comma: Format) -> Format:
    if parameters.others is not None:
        return optional(repeated(argument("", parameters.others), comma, True))
    needed, items = list[bool](), list[Format]()
    for title, value in parameters.named.items():
        if not title:
            unheld(title, "the format of the model's calls cannot write this name")
        written = argument(title, {} if value is False else value)
        if value is not False:
            needed.append(title in parameters.required)
            items.append(written)
        elif title in parameters.required:
            unheld(title, "no value of it can be written")
    if True not in needed:
        return optional(_some(items, comma)) if items else text("")
    first = needed.index(True)
    before = [optional(sequence(item, comma)) for item in items[:first]]
    after = [sequence(comma, item) for item in items[first + 1 :]]
    behind = [item if must else optional(item) for item, must in zip(after, needed[first + 1 :], strict=True)]
    return sequence(*before, items[first], *behind)


def _some(items: Sequence[Format], comma: Format) -> Format:
    """One or more of them in their order: some of the first, some of both, or some of the last few.

    The last few are told twice. To have one at a time would nest too deep, half of them would tell too much.
    """
    if len(items) == 1:
        return items[0]
    few = max(1, len(items) // _PARTS)
    first, last = _some(items[:-few], comma), _some(items[-few:], comma)
    return either([sequence(first, optional(sequence(comma, last))), last])


def _argument(before: Format, schema: Any, root: Any) -> Format:
    value = {} if schema is True else standing(schema, root)
    return sequence(before, {"type": "json_schema", "json_schema": value, "style": PYTHON})
