"""The grammar of a chat's answer: what its tools, its format and the model's reasoning make of it together.

A pure function of the request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from eyas.common.errors import InvalidRequest
from eyas.common.grammars.json_schema import types_of
from eyas.common.grammars.notations import BARE_TEXT, POINTER, Grammar, GrammarKind, renewed
from eyas.common.grammars.schemas.document import refuse
from gateway.formats.tool_fields import ChatTool, ToolFields
from gateway.parsers.calls import Format, Mark, either, optional, sequence, text
from gateway.parsers.message import MessageReading
from gateway.parsers.parameters import unfollowed
from gateway.parsers.reasoning import ReasoningTags
from gateway.parsers.table import ToolFormat

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_MOST_SCHEMAS = 128 << 10  # bytes of all that an answer must follow: twice what a grammar may have
_TYPES_S = 0.1  # seconds of a processor to find out the types of all: streams wait meanwhile
_ANY_TYPES = {"null", "boolean", "number", "string", "array", "object"}
_SPACE: Format = {"type": "regex", "pattern": r"[ \n]{0,4}"}  # between the reasoning and the answer


def answer_grammar(
    body: ToolFields,
    reading: MessageReading,
    requested: Grammar | None,
    special_id: Callable[[str], int | None],
) -> Grammar | None:
    """Returns the grammar of the whole answer; None if the answer is free.

    `requested`: the grammar of the answer's content. `special_id`: the id of a special token, None for any
    other text. Raises InvalidRequest for calls that no grammar can describe.
    """

    def mark(marker: str) -> Format:
        id = special_id(marker)
        return text(marker) if id is None else {"type": "token", "token": id}

    answer = _answer(body, reading.calls, requested, mark)
    if answer is None or (reading.calls is None and reading.reasoning is None):
        return requested
    if reading.reasoning is not None and (reading.calls is None or reading.calls.frame is None):
        answer = sequence(*_thought(reading.reasoning, reading.is_open, mark), answer)
    return Grammar.structural_tag({"type": "structural_tag", "format": answer})


def as_format(grammar: Grammar) -> Format:
    """The grammar as a part of another."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return {"type": "json_schema", "json_schema": json.loads(grammar.text), POINTER: "#"}
        case GrammarKind.JSON_OBJECT:
            return {"type": "json_schema", "json_schema": dict(_ANY_OBJECT)}
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": grammar.text}
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": grammar.text}
        case GrammarKind.CHOICE:
            return either([text(choice) for choice in json.loads(grammar.text)])
    tag = json.loads(grammar.text)
    if isinstance(tag, dict) and "structures" in tag and "format" not in tag:
        tag = renewed(tag)
    if not isinstance(tag, dict) or "format" not in tag:
        raise InvalidRequest("structural tags must have a format", param="response_format")
    inner: Format = tag["format"]
    return inner


def _answer(
    body: ToolFields, calls: ToolFormat | None, requested: Grammar | None, mark: Mark
) -> Format | None:
    """The answer after its reasoning; None if it may be any text."""
    content = None if requested is None else as_format(requested)
    if calls is None:
        return content
    frame = calls.frame
    if content is not None and frame is not None:
        content = frame.content(content, mark)
    if not body.callable_tools:
        return content
    must = body.must_call
    strict = any(tool.function.strict for tool in body.callable_tools)
    if not (must or strict or content):
        return None
    calls_format = _calls(body, calls, must, mark)
    if must:
        return calls_format
    if content is not None:
        return either([content, calls_format])
    if frame is not None:
        return either([frame.content(frame.free(mark), mark), calls_format])
    if calls.opener:
        openers = "".join(f"\\{character}" for character in calls.opener)
        return either([calls_format, {"type": "regex", "pattern": rf"([^{openers}\s][\s\S]*)?"}])
    begin = mark(calls.markers[0])
    free = {"type": "any_text", "excludes": [begin["value"]] if begin["type"] == "const_string" else []}
    return sequence(free, optional(calls_format))


def _calls(body: ToolFields, format: ToolFormat, must: bool, mark: Mark) -> Format:
    """The calls that the answer must follow. `must`: it must be calls."""
    name = body.named_tool
    may = {name} if name else {tool.function.name for tool in body.callable_tools}
    tools = [(f"{body.tool_field(i)}.parameters", tool) for i, tool in enumerate(body.tools or ())]
    fields = {tool.function.name: field for field, tool in tools}
    offered = {tool.function.name: _schema_of(tool, must) for _, tool in tools if tool.function.name in may}
    if (size := len(json.dumps(offered))) > _MOST_SCHEMAS:
        said = f"the parameters of {body.tools_field} have {size} bytes, and {_MOST_SCHEMAS} is the most"
        raise InvalidRequest(said, param=body.tools_field)
    until = time.thread_time() + _TYPES_S
    schemas = {title: _of_objects(schema, fields[title], until) for title, schema in offered.items()}
    try:
        grammar = format.grammar(schemas, mark, body.parallel_tool_calls and name is None)
    except InvalidRequest as error:
        for title, field in fields.items():
            if error.message.startswith(unfollowed(title)):
                message = f"{field} cannot be followed: {error.message.removeprefix(unfollowed(title))}"
                raise InvalidRequest(message, param=field) from None
        raise
    _point(grammar, schemas, fields)
    return grammar


def _point(format: Any, schemas: Mapping[str, Mapping[str, Any]], fields: Mapping[str, str]) -> None:
    """Says in the format where the caller wrote what it holds to, for errors that compiling meets."""
    of_values = {_values(schema): fields[name] for name, schema in schemas.items()}
    todo = [format]
    while todo:
        part = todo.pop()
        if isinstance(part, dict) and part.get("type") == BARE_TEXT:
            tool, _, at = part[POINTER].partition("#")  # once: a part may be there twice
            part[POINTER] = f"{fields[tool]}{at}" if tool in fields else part[POINTER]
        elif isinstance(part, dict) and part.get("type") == "json_schema":
            if isinstance(schema := part["json_schema"], dict) and (field := of_values.get(_values(schema))):
                part.setdefault(POINTER, field)
        elif isinstance(part, dict | list):
            todo += part.values() if isinstance(part, dict) else part


def _values(schema: Mapping[str, Any]) -> frozenset[tuple[str, int]]:
    """What a schema and its copies in a format share: the very same values."""
    return frozenset((name, id(value)) for name, value in schema.items())


def _schema_of(tool: ChatTool, must: bool) -> Mapping[str, Any]:
    """The schema of a call's arguments. Where calls are required that is the tool's schema, unless it says
    `"strict": false`; else only if it says true.
    """
    function = tool.function
    if not (function.strict if function.strict is not None else must):
        return _ANY_OBJECT
    return _NO_ARGUMENTS if function.parameters is None else function.parameters


def _of_objects(schema: Mapping[str, Any], field: str, until: float) -> Mapping[str, Any]:
    """The schema of its objects. The search for other values ends at `until` (see `types_of`).

    Raises InvalidRequest, which names the field, for a schema that cannot be followed.
    """
    try:
        types = types_of(schema, until)
        if types is None and ("$ref" in schema or schema.get("type", "object") != "object"):
            refuse("#", "the parameters of a tool must be an object that is easier to tell from other values")
        if types is not None and not types:
            refuse("#", "no value that can be written fits the schema")
        if types not in (None, {"object"}) and ("type" in schema or types != _ANY_TYPES):
            refuse("#", "the parameters of a tool must be an object")
    except InvalidRequest as error:
        raise InvalidRequest(f"{field} cannot be followed: {error.message}", param=field) from None
    return schema if types == {"object"} else {"type": "object", **schema}


def _thought(tags: ReasoningTags, is_open: bool, mark: Mark) -> list[Format]:
    """The reasoning before an answer, which the prompt may have begun."""
    inside: Format = {"type": "any_text"}
    if is_open:
        return [{"type": "tag", "begin": "", "content": inside, "end": _edge(mark(tags.end))}, _SPACE]
    begin, end = _edge(mark(tags.begin)), _edge(mark(tags.end))
    return [optional(sequence({"type": "tag", "begin": begin, "content": inside, "end": end}, _SPACE))]


def _edge(marker: Format) -> Any:
    """A marker at either end of a tag: its text, or its token."""
    return marker["value"] if marker["type"] == "const_string" else marker
