"""What formats of calls share: names, attempts that may fail, and calls written as one JSON object.

It knows the keys that models write. It refuses to know what stands around a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from gateway.parsers.output import Output
from gateway.parsers.source import Cut, Malformed, Sink, Source, Wait, ignore

Tools = Mapping[str, Mapping[str, Any]]
"""The tools that an answer may call: JSON schemas of their parameters, by name."""

NAME = re.compile(r"[\w.:/-]+")
MAX_NAME = 256  # characters
_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("id", "type")  # keys that say nothing about the call


def attempt(source: Source, out: Output, reading: Wait[None]) -> Wait[bool]:
    """Whether `reading` found a call to its end. If it failed before one began, what it read is content."""
    source.keep()
    try:
        yield from reading
    except Malformed:
        if out.is_open:
            out.done()
            return True
        out.content(source.forget())
        return False
    except Cut:
        out.content(source.forget())  # nothing is kept once a call has begun
        return False
    source.forget()
    return True


def begin(source: Source, out: Output, name: str, known: Tools | None = None) -> None:
    """Begins a call: from here on what is read is its own. Raises Malformed for what is no name.

    `known`: the only names that there are; None: any.
    """
    if len(name) > MAX_NAME or not NAME.fullmatch(name) or (known is not None and name not in known):
        raise Malformed
    source.forget()
    out.begin(name)


def call_by_name(source: Source, out: Output, name: str) -> Wait[None]:
    """Reads the arguments of a call whose name is known: an object. Raises Malformed for anything else."""
    if (first := (yield from source.peek())) != "{":
        raise Malformed if first else Cut
    begin(source, out, name)
    yield from source.json(out.arguments)
    out.done()


def call_object(source: Source, out: Output, known: Tools | None = None) -> Wait[None]:
    """Reads {"name": ..., "arguments": {...}}, its keys in any order; "parameters" is another name of the
    arguments, which may also be the text of an object. Raises Malformed for anything else.
    """
    yield from source.expect("{")
    seen: set[str] = set()
    early: list[str] = []  # arguments that came before the name
    while True:
        yield from source.space()
        key = yield from _string(source)
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        kind = "arguments" if key in _ARGUMENTS else key
        if kind in seen or kind not in ("name", "arguments", *_BESIDE):
            raise Malformed
        seen.add(kind)
        if kind == "name":
            begin(source, out, (yield from _string(source)), known)
            out.arguments("".join(early))
        elif kind == "arguments":
            yield from _arguments(source, out.arguments if "name" in seen else early.append)
        else:
            yield from source.json(ignore)
        yield from source.space()
        if not (yield from source.accept(",")):
            break
    yield from source.expect("}")
    if "name" not in seen:
        raise Malformed
    out.done()


def _arguments(source: Source, sink: Sink) -> Wait[None]:
    """Reads arguments: an object as it is written, the text of one without its quotes, null as {}."""
    first = yield from source.peek()
    if first == "{":
        yield from source.json(sink)
    elif first == '"':
        sink((yield from _string(source)))
    else:
        parts: list[str] = []
        yield from source.json(parts.append)
        sink("{}" if parts == ["null"] else "".join(parts))


def _string(source: Source) -> Wait[str]:
    """Reads a JSON string, and gives what it says."""
    first = yield from source.peek()
    if first != '"':
        raise Malformed if first else Cut
    parts: list[str] = []
    yield from source.json(parts.append)
    try:
        text = json.loads("".join(parts), strict=False)
        text.encode()  # half a surrogate pair is no text
    except ValueError:
        raise Malformed from None
    return str(text)
