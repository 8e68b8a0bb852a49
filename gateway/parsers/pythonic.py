"""Calls as Llama 4 and others write them: `[f(a=1), g(b="x")]`, Python with literals only, and their grammar.

An answer that opens with a bracket only holds calls if it names the tools. Arguments are given out call by
call, since a literal is only known at its end. Nothing but literals, and JSON's three words among them, is
evaluated. What the grammar lets through is read as arguments that follow the tool's schema.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from eyas.common.errors import InvalidRequest
from eyas.common.grammars.notations import PYTHON
from gateway.parsers.calls import (
    NAME,
    Format,
    Mark,
    Schemas,
    Tools,
    begin,
    either,
    listed,
    optional,
    quoted,
    repeated,
    sequence,
    text,
)
from gateway.parsers.output import ParsedOutput
from gateway.parsers.parameters import (
    OTHER_NAMES,
    ObjectParameters,
    parameters_of,
    standing,
    unfollowed,
    unheld,
)
from gateway.parsers.source import CutShort, MalformedOutput, ParsedText, Wait

MARKERS = BEGIN, END = "<|python_start|>", "<|python_end|>"
MAX_CALL = 1 << 16  # characters of one call's arguments
MAX_DEPTH = 100  # brackets within brackets
TITLE = re.compile(r"[^\W\d][\w.-]*")
"""Names of arguments: Python's, its keywords too, and those with dots and dashes, which models write too."""
_PIECE = re.compile(r"[^\"'()\[\]{}\\]+")
_OPENERS, _CLOSERS = "([{", ")]}"
_SEPARATOR = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[()\[\]{},]""", re.DOTALL)
_KEYWORD = re.compile(rf"({TITLE.pattern})\s*=\s*(\S.*)", re.DOTALL)
MAX_LITERAL = 1 << 16  # characters
_JSON_NAMES = {"true": True, "false": False, "null": None}  # models mix the two languages
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_COMMA: Format = text(", ")
_PARTS = 6


def read(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
    """Reads an answer to its end."""
    out.content((yield from source.space()))
    if (yield from source.peek()) == "[":
        yield from calls(source, out, tools)
    while marker := (yield from source.upto(MARKERS, out.content, out.cut)):
        if marker == BEGIN:
            yield from source.space()
            yield from calls(source, out, None)


def calls(source: ParsedText, out: ParsedOutput, known: Tools | None) -> Wait[None]:
    """Reads a list of calls; whatever is none goes to the caller as content, with all that follows."""
    yield from listed(source, out, lambda before: _call(source, out, before, known))


def _call(source: ParsedText, out: ParsedOutput, before: str, known: Tools | None) -> Wait[None]:
    yield from source.expect(before)
    yield from source.space()
    yield from call(source, out, known)


def call(source: ParsedText, out: ParsedOutput, known: Tools | None) -> Wait[None]:
    """Reads one call. Raises MalformedOutput for anything else."""
    name = yield from source.run(NAME)
    if known is not None and name not in known:
        raise MalformedOutput
    yield from source.expect("(")
    arguments = _keywords((yield from _enclosed(source)))
    begin(source, out, name, known)
    out.arguments(arguments)
    out.done()


def _enclosed(source: ParsedText) -> Wait[str]:
    """Reads up to the bracket that closes the one before, and gives what stands before it."""
    parts: list[str] = []
    length, depth, quote = 0, 1, ""
    while True:
        parts.append((yield from source.run(_PIECE)))
        character = yield from source.peek()
        if not character:
            raise CutShort
        yield from source.expect(character)
        parts.append(character)
        if character == "\\" and quote:
            escaped = yield from source.peek()
            yield from source.expect(escaped)
            parts.append(escaped)
        elif character in "\"'":
            quote = "" if character == quote else quote or character
        elif not quote and character in _OPENERS:
            depth += 1
        elif not quote and character in _CLOSERS:
            depth -= 1
        length += len(parts[-1]) + len(parts[-2])
        if depth == 0:
            return "".join(parts[:-1])
        if length > MAX_CALL or depth > MAX_DEPTH:
            raise MalformedOutput


def _keywords(text: str) -> str:
    """The JSON object of Python's keyword arguments, whose names may be any. Of two of a name the later one
    counts. Raises MalformedOutput if they are anything but literals.
    """
    values = dict(map(_pair, _parts(text)))
    return "{" + ", ".join(f"{quoted(name)}: {value}" for name, value in values.items()) + "}"


def _parts(text: str) -> Iterator[str]:
    """Splits at the commas outside of brackets and strings."""
    depth = begin = 0
    for separator in _SEPARATOR.finditer(text):
        depth += (separator.group() in _OPENERS) - (separator.group() in _CLOSERS)
        if separator.group() == "," and depth == 0:
            yield text[begin : separator.start()]
            begin = separator.end()
    if rest := text[begin:].strip():
        yield rest


def _pair(part: str) -> tuple[str, str]:
    """A name, and its value as JSON."""
    keyword = _KEYWORD.fullmatch(part.strip())
    if not keyword:
        raise MalformedOutput
    return keyword[1], as_json(literal(keyword[2]))


def literal(text: str) -> Any:
    """The value of a literal, whose strings may span lines. Raises MalformedOutput for anything else."""
    if len(text) > MAX_LITERAL:
        raise MalformedOutput
    try:
        return _value(ast.parse(f"({_STRING.sub(_on_a_line, text)}\n)", mode="eval").body)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise MalformedOutput from None


def as_json(value: Any) -> str:
    """The value as JSON. Raises MalformedOutput for what JSON does not have."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # half a surrogate pair is no text
    except (ValueError, TypeError, RecursionError):
        raise MalformedOutput from None
    return text


def _on_a_line(string: re.Match[str]) -> str:
    return string.group().replace("\\\n", "\n").replace("\n", "\\n").replace("\r", "\\r")


def _value(node: ast.expr) -> Any:
    """The value of a literal. Raises ValueError for anything else."""
    match node:
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            if None in keys:
                raise ValueError
            return {
                ast.literal_eval(key): _value(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
        case _:
            return ast.literal_eval(node)


def grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """Calls of these tools, and nothing else."""
    return sequence(text("["), repeated(call_format(tools), _COMMA, many), text("]"))


def call_format(tools: Schemas) -> Format:
    """A call of one of these tools."""
    return either([_call_rules(name, schema) for name, schema in tools.items()])


def _call_rules(tool: str, schema: Mapping[str, Any]) -> Format:
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

    The last few are listed twice. To have one at a time would nest too deep, half would say too much.
    """
    if len(items) == 1:
        return items[0]
    few = max(1, len(items) // _PARTS)
    first, last = _some(items[:-few], comma), _some(items[-few:], comma)
    return either([sequence(first, optional(sequence(comma, last))), last])


def _argument(before: Format, schema: Any, root: Any) -> Format:
    value = {} if schema is True else standing(schema, root)
    return sequence(before, {"type": "json_schema", "json_schema": value, "style": PYTHON})
