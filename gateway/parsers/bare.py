"""Parameters whose values stand bare between tags: read as JSON, their grammar, and whole calls of them.

A value ends at its tag, where what may stand behind a value follows. A tag within a JSON value's strings is
theirs. What the grammar lets through is read back as the schema says, to the character: text that a schema
bounds holds no `<`, other text no tag that ends it; whatever else is JSON. Qwen3-Coder and MiniMax-M2 share
the calls whose arguments are tagged one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from eyas.common.errors import InvalidRequest
from eyas.common.grammars.notations import BareText
from eyas.common.grammars.regex_syntax import UnsupportedPattern
from eyas.common.grammars.string_rules import StringPattern
from eyas.common.grammars.text_formats import text_of
from gateway.parsers.calls import (
    NAME,
    Format,
    Tools,
    arguments,
    begin,
    either,
    optional,
    quoted,
    sequence,
    text,
)
from gateway.parsers.output import ParsedOutput
from gateway.parsers.parameters import (
    BRANCHES,
    OTHER_NAMES,
    ObjectParameters,
    ParameterKinds,
    ValueKind,
    constraint,
    kinds_of,
    only_text,
    parameters_of,
    standing,
    unfollowed,
    unheld,
)
from gateway.parsers.pythonic import as_json, literal
from gateway.parsers.source import CutShort, MalformedOutput, ParsedText, Sink, Wait, unbroken

_SAYS_NOTHING = frozenset("title description default examples deprecated readOnly writeOnly $comment".split())
_OPENS_TAGS = "<"


class ParameterFormat(NamedTuple):
    """How a format writes a parameter: what stands before (with {} for the name) and after a value, and the
    tag that ends it. `follow`: what may come behind that. `lines`: the value stands between line breaks that
    are no part of it. `name`: a regular expression of the names that it can write. `over`: the tags that end
    the call and its section, in their order.
    """

    before: str
    after: str
    end: str
    follow: tuple[str, ...]
    lines: bool
    name: str
    over: tuple[str, ...]


def bare(source: ParsedText, sink: Sink, written: ParameterFormat, kind: ValueKind) -> Wait[None]:
    """Reads a value up to the tag that ends it, and writes it as JSON; text goes on as it comes. A model may
    forget the tag.

    Raises Cut if the text ends before it does.
    """
    if kind.is_json and (value := (yield from _json(source, written, kind))):
        sink(value)
        return
    if written.lines:
        yield from source.accept("\n")
    words = _StringWriter(sink, "\n" if written.lines else "")
    if kind.is_text:
        words.open()
        yield from _upto_end(source, words.add, written)
        words.close()
        return
    parts: list[str] = []
    yield from _upto_end(source, parts.append, written, () if kind.may_be_text else written.follow)
    sink(_value("".join(parts).removesuffix("\n" if written.lines else ""), kind))


def _value(text: str, kind: ValueKind) -> str:
    """Reads the text as JSON; Python's words, which templates write, are read where the schema has them."""
    if kind.is_optional:
        return "null" if text in ("null", "None") else quoted(text)
    if _stands(text, kind):
        return text
    try:
        value = literal(text)
        is_meant = kind.names(value) and not isinstance(value, str)
        return as_json(value) if is_meant else quoted(text)
    except MalformedOutput:
        return quoted(text)


def _json(source: ParsedText, written: ParameterFormat, kind: ValueKind) -> Wait[str]:
    """Reads an object, an array or a string, and its end. "": what comes is none, and nothing is read."""
    space = yield from source.space()
    raw = yield from source.whole_json()
    value = unbroken(raw)
    if value and _stands(value, kind):
        space += raw + (yield from source.space())
        if (yield from source.accept(written.end)):
            if (yield from source.leads_to(written.follow)):
                return value
            space += written.end
    else:
        space += raw
    source.back(space)
    return ""


def _upto_end(
    source: ParsedText, sink: Sink, written: ParameterFormat, others: tuple[str, ...] = ()
) -> Wait[None]:
    """Reads a value up to its tag, to one of `others`, or to the end of the call if all ends with that."""
    over = written.over
    while tag := (yield from source.upto((written.end, *(others or over)), sink)):
        if tag in others:
            source.back(tag)
            return
        if tag in over:
            tag += yield from _sections(source, over[over.index(tag) + 1 :])
            if not (yield from source.peek()):
                source.back(tag)
                return
        elif (yield from source.leads_to(written.follow)):
            return
        sink(tag)
    raise CutShort


def _sections(source: ParsedText, tags: tuple[str, ...]) -> Wait[str]:
    """Reads white space and the tags that come, in their order."""
    parts = [(yield from source.space())]
    for tag in tags:
        if (yield from source.accept(tag)):
            parts += [tag, (yield from source.space())]
    return "".join(parts)


def _stands(text: str, kind: ValueKind) -> bool:
    """Whether it is JSON as it stands, and rather that than text."""
    try:
        return kind.takes(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> None:
    """NaN and the infinities are Python's, not JSON's."""
    raise ValueError(constant)


class _StringWriter:
    """Writes a JSON string piece by piece. What `ends` it is held back: it is none of the value."""

    def __init__(self, sink: Sink, ends: str) -> None:
        self._sink = sink
        self._ends = ends
        self._pending = ""

    def open(self) -> None:
        self._sink('"')

    def add(self, text: str) -> None:
        text = self._pending + text
        self._pending = self._ends if text.endswith(self._ends) else ""
        self._sink(quoted(text[: len(text) - len(self._pending)])[1:-1])

    def close(self) -> None:
        self._sink('"')


def parameters(tool: str, schema: Mapping[str, Any], written: ParameterFormat) -> Format:
    """The parameters of a call, in the order of the schema, each where it is required or not.

    Raises InvalidRequest for what cannot be held to.
    """
    branch = _ObjectBranch(tool, written, kinds_of(schema), schema)
    try:
        return either([branch.of(part) for part in parameters_of(schema)])
    except InvalidRequest as error:
        raise InvalidRequest(f"{unfollowed(tool)}{error.message}", param="tools") from None


class _ObjectBranch:
    """The grammar of an object's parameters; `root`: where references are looked up."""

    def __init__(self, tool: str, written: ParameterFormat, kinds: ParameterKinds, root: Any) -> None:
        self._tool = tool
        self._written = written
        self._kinds = kinds
        self._root = root

    def of(self, parameters: ObjectParameters) -> Format:
        lines = []
        for title, value in parameters.named.items():
            if not re.fullmatch(self._written.name, title):
                unheld(title, "the format of the model's calls cannot write this name")
            line = self._line(text(self._written.before.format(title)), title, value)
            if line is not None:
                lines.append(line if title in parameters.required else optional(line))
            elif title in parameters.required:
                unheld(title, "no value of it can be written")
        if parameters.others is not None:
            before, after = self._written.before.split("{}")
            name: Format = {"type": "regex", "pattern": OTHER_NAMES}
            line = self._line(sequence(text(before), name, text(after)), "", parameters.others)
            assert line is not None
            lines.append({"type": "star", "content": line})
        return sequence(*lines) if lines else text("")

    def _line(self, before: Format, title: str, value: Any) -> Format | None:
        """A parameter's line; None: it can have no value."""
        if value is False:
            return None
        kind = self._kinds.of(title) if title else self._kinds.others
        return sequence(before, self._value(title, value, kind), text(self._written.after))

    def _value(self, title: str, schema: Any, kind: ValueKind) -> Format:
        if schema is True or not set(schema) - _SAYS_NOTHING:
            return self._free()
        if kind.is_json:
            return arguments(standing(schema, self._root))
        only_text(schema, self._root, f"#/properties/{title[:100]}")
        try:
            return either(self._words(schema, f"{self._tool}#/properties/{title[:100]}"))
        except UnsupportedPattern as reason:
            unheld(title, str(reason))

    def _free(self) -> Format:
        return {"type": "any_text", "excludes": [self._written.end]}

    def _words(self, schema: Any, pointer: str) -> list[Format]:
        """The allowed texts: one of these; null stands as it is."""
        said = constraint(schema, self._root)
        for name in BRANCHES:
            if name in said:
                return [words for branch in said[name] for words in self._words(branch, pointer)]
        if "const" in said or "enum" in said:
            values = said["enum"] if "enum" in said else [said["const"]]
            return [text(self._constant(value)) for value in values]
        types = said.get("type")
        names = types if isinstance(types, list) else [types]
        return [text("null") if name == "null" else self._bounded(said, pointer) for name in names]

    def _constant(self, value: Any) -> str:
        if isinstance(value, str) and self._written.end in value:
            raise UnsupportedPattern(
                f"a value holds {self._written.end}, which ends it in the model's format"
            )
        return value if isinstance(value, str) else json.dumps(value)

    def _bounded(self, said: Mapping[str, Any], pointer: str) -> Format:
        """Text whose rules are made where it is compiled: that may take long."""
        text = text_of(said)
        if text == StringPattern():
            return self._free()
        bare = BareText(text.patterns, text.anchored, text.least, text.most, _OPENS_TAGS, pointer)
        form: Format = msgspec.to_builtins(bare)
        return form


@dataclass(frozen=True)
class CallTags:
    """How such a call is tagged: `parameter` opens an argument, `close` ends a tag with a name in it, and
    `end` ends the call. `title`: the name of an argument; `written`: its value.
    """

    parameter: str
    close: str
    end: str
    title: re.Pattern[str]
    written: ParameterFormat


def bare_call(source: ParsedText, out: ParsedOutput, tools: Tools, tags: CallTags) -> Wait[None]:
    """Reads a call behind the tag that opens it. Raises Cut if the text ends within it."""
    name = yield from source.run(NAME)
    if not (yield from source.accept("\n")):
        yield from source.expect(tags.close)
    begin(source, out, name)
    kinds = kinds_of(tools.get(name, {}))
    separator = "{"
    while True:
        yield from source.space()
        if not (yield from source.accept(tags.parameter)):
            break
        title = yield from source.run(tags.title)
        if not (yield from source.accept(tags.close)) and (yield from source.peek()) != "\n":
            break
        out.arguments(f"{separator}{quoted(title)}: ")
        separator = ", "
        yield from bare(source, out.arguments, tags.written, kinds.of(title))
    if not (yield from source.accept(tags.end)) and source.ends_within(tags.parameter, tags.end):
        raise CutShort
    out.arguments("{}" if separator == "{" else "}")
    out.done()
