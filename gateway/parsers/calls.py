"""Shared parts of formats of calls: names, attempts that may fail, calls as one JSON object, and grammars.

Grammars of calls are in the notation that grammars of text with structured parts have (structural tags).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.parsers.output import ParsedOutput
from gateway.parsers.source import CutShort, MalformedOutput, ParsedText, Wait, ignore, unbroken

Tools = Mapping[str, Mapping[str, Any]]
"""The tools that an answer may call: JSON schemas of their parameters, by name."""
NAME = re.compile(r"[\w.:/-]+")
MAX_NAME = 256  # characters
MAX_UNDECIDED = 512
"""How many characters of a call are looked at before it is given out: so long it may prove to be none."""
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_EXTRA = re.compile(r"[\s}]+")  # brackets that models write once too often
Format = dict[str, Any]
Mark = Callable[[str], Format]
"""The format of a marker: the text of its name, or its token where the vocabulary has one for it alone."""
Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schemas that calls' arguments follow, by name of the tool."""


def attempt(source: ParsedText, out: ParsedOutput, reading: Wait[None]) -> Wait[bool]:
    """Whether `reading` found a call to its end. If it failed before one began, what it read is content."""
    source.keep()
    try:
        yield from reading
    except MalformedOutput:
        if out.is_open:
            out.done()
            return True
        out.content(source.forget())
        return False
    except CutShort:
        source.rest()
        out.cut(source.forget())  # nothing is kept once a call has begun
        return False
    source.forget()
    return True


def begin(source: ParsedText, out: ParsedOutput, name: str, known: Tools | None = None) -> None:
    """Begins a call: from here on what is read is its own. Raises MalformedOutput for what is no name.

    `known`: the only names that there are; None: any.
    """
    _check(name, known)
    source.forget()
    out.begin(name)


def call_by_name(source: ParsedText, out: ParsedOutput, name: str, ends: tuple[str, ...]) -> Wait[None]:
    """Reads the arguments of a call whose name is known: an object, the text of one, or nothing where one of
    `ends` follows or the text ends. Raises MalformedOutput for anything else.
    """
    first = yield from source.peek()
    if first == "{":
        yield from _ArgumentsReader(source, out, name).read()
    elif first == '"':
        arguments = yield from _whole(source)
        begin(source, out, name)
        out.arguments(arguments)
    elif not (yield from source.leads_to(ends)):
        raise MalformedOutput
    else:
        begin(source, out, name)
    out.done()
    yield from source.run(_EXTRA)


def call_object(source: ParsedText, out: ParsedOutput, known: Tools | None = None) -> Wait[None]:
    """Reads {"name": ..., "arguments": {...}}, its keys in any order; others are skipped. "parameters" is
    another name of the arguments, which may also be the text of an object. Of a key that comes twice the
    first counts. Raises MalformedOutput for anything else.
    """
    call = _CallObject(source, out, known)
    try:
        yield from call.read()
    except CutShort:
        call.cut()
        raise


def listed(source: ParsedText, out: ParsedOutput, item: Callable[[str], Wait[None]]) -> Wait[None]:
    """Reads calls in an array. `item`: what reads one of them, behind a text that must stand before."""
    before = "["
    while (yield from attempt(source, out, item(before))):
        yield from source.space()
        if (yield from source.accept("]")):
            return
        before = ","


class _CallObject:
    """A call that is written as one object, as it is read."""

    def __init__(self, source: ParsedText, out: ParsedOutput, known: Tools | None) -> None:
        self._source, self._out, self._known = source, out, known
        self._name = ""
        self._early = ""  # arguments that came before the name
        self._has_arguments = False

    def read(self) -> Wait[None]:
        source = self._source
        yield from source.expect("{")
        while True:
            yield from source.space()
            key = yield from _string(source)
            yield from source.space()
            yield from source.expect(":")
            yield from source.space()
            yield from self._value(key)
            yield from source.space()
            if not (yield from source.accept(",")):
                break
        yield from source.expect("}")
        self._begin()
        self._out.done()
        yield from source.run(_EXTRA)

    def cut(self) -> None:
        """The text ends here: a call whose name is known has begun."""
        if self._name:
            self._begin()

    def _value(self, key: str) -> Wait[None]:
        if key in _NAMES and not self._name:
            self._name = yield from _string(self._source)
            _check(self._name, self._known)
            if self._has_arguments:
                self._begin()
        elif key in _ARGUMENTS and not self._has_arguments:
            yield from self._arguments()
        else:
            yield from self._source.json(ignore, None if self._out.is_open else MAX_UNDECIDED)

    def _arguments(self) -> Wait[None]:
        first = yield from self._source.peek()
        if first == "{" and self._name:
            yield from _ArgumentsReader(self._source, self._out, self._name, self._known).read()
        else:
            self._early = yield from _whole(self._source)
            if self._name:
                self._begin()
        self._has_arguments = True

    def _begin(self) -> None:
        if not self._out.is_open:
            begin(self._source, self._out, self._name, self._known)
            self._out.arguments(self._early)


class _ArgumentsReader:
    """A call's object of arguments as it is read. The call begins once it is whole, or longer than HELD."""

    def __init__(self, source: ParsedText, out: ParsedOutput, name: str, known: Tools | None = None) -> None:
        self._source, self._out, self._name, self._known = source, out, name, known
        self._pending: list[str] = []
        self._length = 0

    def read(self) -> Wait[None]:
        try:
            yield from self._source.json(self._add)
        except CutShort:
            self._begin()
            raise
        if not self._out.is_open:
            check_object("".join(self._pending))
            self._begin()

    def _add(self, text: str) -> None:
        if self._out.is_open:
            self._out.arguments(text)
            return
        self._pending.append(text)
        self._length += len(text)
        if self._length > MAX_UNDECIDED:
            self._begin()

    def _begin(self) -> None:
        if not self._out.is_open:
            begin(self._source, self._out, self._name, self._known)
            self._out.arguments("".join(self._pending))


def check_object(text: str) -> None:
    """Raises MalformedOutput unless the text is a JSON object."""
    try:
        is_object = isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        raise MalformedOutput from None
    if not is_object:
        raise MalformedOutput


def _refuse(constant: str) -> None:
    """NaN and the infinities are Python's, not JSON's."""
    raise ValueError(constant)


def _check(name: str, known: Tools | None) -> None:
    if len(name) > MAX_NAME or not NAME.fullmatch(name) or (known is not None and name not in known):
        raise MalformedOutput


def _whole(source: ParsedText) -> Wait[str]:
    """Reads arguments to their end: an object, the text of one, or null, which is an empty one."""
    if (yield from source.peek()) == '"':
        text = unbroken((yield from _string(source)).strip())
    else:
        parts: list[str] = []
        yield from source.json(parts.append)
        text = "".join(parts)
    if text in ("", "null"):
        return "{}"
    check_object(text)
    return text


def _string(source: ParsedText) -> Wait[str]:
    """Reads a JSON string, and gives what it says."""
    first = yield from source.peek()
    if first != '"':
        raise MalformedOutput if first else CutShort
    parts: list[str] = []
    yield from source.json(parts.append)
    try:
        text = json.loads("".join(parts), strict=False)
        text.encode()  # half a surrogate pair is no text
    except ValueError:
        raise MalformedOutput from None
    return str(text)


def text(value: str) -> Format:
    """The format of a literal text."""
    return {"type": "const_string", "value": value}


def quoted(value: str) -> str:
    """The text as a JSON string."""
    return json.dumps(value, ensure_ascii=False)


def sequence(*elements: Format) -> Format:
    """One after the other."""
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Sequence[Format]) -> Format:
    """One of them."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def optional(content: Format) -> Format:
    """The format of this or nothing."""
    return {"type": "optional", "content": content}


def repeated(item: Format, between: Format | None, many: bool) -> Format:
    """One, or if `many` one after the other, with `between` in between if given."""
    if not many:
        return item
    following = item if between is None else sequence(between, item)
    return sequence(item, {"type": "star", "content": following})


def arguments(schema: Mapping[str, Any]) -> Format:
    """A JSON value that the schema describes."""
    return {"type": "json_schema", "json_schema": dict(schema)}


def call_objects(tools: Schemas, key: str) -> Format:
    """`{"name": ..., key: {...}}`, as `calls.call_object` reads it."""
    return either(
        [
            sequence(
                text(f'{{"name": {quoted(name)}, "{key}": '),
                arguments(schema),
                text("}"),
            )
            for name, schema in tools.items()
        ]
    )
