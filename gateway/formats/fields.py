"""Reads the fields of a JSON body: strictly typed, null means absent, errors name the field.

An unknown field is ignored and named to the caller. A known field that is not supported and would change the
answer is an error that names it. The rules beyond the types of fields are given as JSON schema for
/openapi.json; the bodies' own validators refuse what breaks them. The types that several bodies share stand
at the end: every whole number is bounded by what protobuf can carry.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, NoReturn, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from eyas.common.errors import InvalidRequest
from eyas.common.logging import REQUEST_ID
from eyas.common.params import (
    ADAPTER_NAME,
    INT32_MAX,
    MAX_BIASED_TOKENS,
    MAX_TOP_LOGPROBS,
    MOST_ADAPTER_NAME,
    MOST_PRIORITY,
    MOST_SALT,
)
from gateway.http import long_ids

_REFUSED = "refused"
_MAX_QUOTED = 100  # characters of a name that an error repeats
# Words of the library that mean nothing to the caller: "List should have at least 1 item after validation".
_NOISE = re.compile(r"^Value error, |^\w+ (?=should )| after validation")
Rule = dict[str, Any]
_OUTSIDE = ("title", "description", "default")  # what is said of a field, not of its value
_HALF = re.compile(r"[\ud800-\udfff]")
MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_LENGTH = 512
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


class UnsupportedField(NamedTuple):
    """A known field that is not supported. `neutral`: its values that ask for nothing, beside null."""

    reason: str
    neutral: tuple[Any, ...] = ()

    def admits(self, value: Any) -> bool:
        """Whether the value asks for nothing."""
        # JSON knows true from 1, Python does not.
        return any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in self.neutral)


class RequestBody(BaseModel):
    """A JSON object. Undeclared fields are ignored, but for those in `unsupported`, which may be errors."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)
    unsupported: ClassVar[Mapping[str, UnsupportedField]] = {}
    rules: ClassVar[tuple[dict[str, Any], ...]] = ()  # JSON schemas of what more than one field must keep
    ids_field: ClassVar[str] = ""  # a field that may hold many token ids

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        for name, field in schema["properties"].items():
            if name not in schema.get("required", ()):
                schema["properties"][name] = or_null(field)
        if cls.rules:
            schema["allOf"] = list(cls.rules)
        for name, known in cls.unsupported.items():
            values = [None, *known.neutral]
            schema["properties"][name] = {"enum": values, "description": f"Not supported: {known.reason}."}
        return schema

    @property
    def skipped(self) -> tuple[str, ...]:
        """Parts of known fields that nothing reads: they are named to the caller as unknown fields are."""
        return ()

    def take_ids(self, ids: array[int]) -> None:
        """Puts the ids in the place of `ids_field`, where `long_ids.STAND_IN` stood while it was read."""
        raise NotImplementedError

    @model_validator(mode="wrap")
    @classmethod
    def _judge(cls, value: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        """Reads null as absent, and refuses unsupported fields that ask for something."""
        if isinstance(value, dict) and None in value.values():
            value = {name: field for name, field in value.items() if field is not None}
        body = read(value)
        for name, field in (body.model_extra or {}).items():
            known = cls.unsupported.get(name)
            if known is not None and not known.admits(field):
                refuse(name, f"is not supported: {known.reason}")
        return body


def refuse(field: str, reason: str) -> NoReturn:
    """Fails the validation of the body that holds `field`, with an error that names it."""
    raise PydanticCustomError(_REFUSED, "{reason}", {"field": field, "reason": reason})


def _request_id(value: str) -> str:
    if not REQUEST_ID.fullmatch(value):
        raise ValueError("must be 1 to 128 printable ASCII characters without spaces")
    return value


RequestId = Annotated[
    str, AfterValidator(_request_id), WithJsonSchema({"type": "string", "pattern": f"^{REQUEST_ID.pattern}$"})
]


def whole(value: Any) -> Any:
    """A whole number that is written with a fraction, as 2.0, as the integer that it is to JSON schemas."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(whole)
"""Stands behind the bounds of a whole number: what stands before them would keep them from the schema."""


def as_ids(value: Any) -> list[int] | None:
    """The token ids that it is, at least one; None if it is something else."""
    if not isinstance(value, list):
        return None
    kinds = set(map(type, value))  # a millisecond for a long prompt: once
    if kinds == {int}:
        return value
    if float not in kinds:
        return None
    ids = [whole(id) for id in value]
    return ids if set(map(type, ids)) == {int} else None


B = TypeVar("B", bound=RequestBody)


def parse(kind: type[B], body: bytes) -> B:
    """The JSON body as `kind`. Raises InvalidRequest naming the first field that is wrong.

    A byte order mark, which .NET and PowerShell may write, is left out. A long list of ids in
    `kind.ids_field` is an array of C integers.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    if kind.ids_field and (parts := long_ids.split(body, kind.ids_field)) is not None:
        rest, ids = parts
        with contextlib.suppress(ValidationError):  # the whole body's says where
            read = kind.model_validate_json(rest)
            read.take_ids(ids)
            return read
    try:
        return _read(lambda: kind.model_validate_json(body))
    except InvalidRequest as error:
        if error.param is None and (name := half_pair(body)):
            reason = f"{name} holds half of a surrogate pair, which is no text"
            raise InvalidRequest(reason, param=name) from None
        raise


def validated(kind: type[B], body: dict[str, Any]) -> B:
    """The object as `kind`. Raises as `parse` does."""
    return _read(lambda: kind.model_validate(body))


def _read(read: Callable[[], B]) -> B:
    try:
        return read()
    except ValidationError as error:
        raise _first_problem(error.errors(include_url=False, include_input=False)[0]) from None


def ignored(body: RequestBody, prefix: str = "") -> Iterator[str]:
    """The fields that nothing reads, of the body and of bodies in it, as messages[0].name."""
    if extra := body.model_extra:
        yield from (prefix + name for name in extra if name not in body.unsupported)
    yield from (prefix + name for name in body.skipped)
    for name, value in body.__dict__.items():
        if isinstance(value, RequestBody):
            yield from ignored(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], RequestBody):
            for i, item in enumerate(value):
                yield from ignored(item, f"{prefix}{name}[{i}].")


def _first_problem(error: ErrorDetails) -> InvalidRequest:
    kind, reason = error["type"], error["msg"]
    if kind == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {error['ctx']['error']}")
    if kind == _REFUSED:
        name = _path([*error["loc"], error["ctx"]["field"]])
        return InvalidRequest(f"{name} {reason}", param=name)
    name = _path(error["loc"])
    if not name:
        return InvalidRequest("the body must be a JSON object")
    if kind == "missing":
        return InvalidRequest(f"{name} is required", param=name)
    return InvalidRequest(f"{name}: {_NOISE.sub('', reason)}", param=name)


def _path(location: Sequence[str | int]) -> str:
    """("messages", 0, "content") as messages[0].content."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":  # what the library writes after a bad key of a dictionary
            part = part[:_MAX_QUOTED]
            path += f".{part}" if path else part
    return path


def or_null(field: Rule) -> Rule:
    """The schema of a field that may be null: it is then absent."""
    annotations = {name: part for name, part in field.items() if name in _OUTSIDE}
    kind = {name: part for name, part in field.items() if name not in _OUTSIDE}
    kinds = kind["anyOf"] if list(kind) == ["anyOf"] else [kind]
    if not kind or {"type": "null"} in kinds:
        return field
    return {"anyOf": [*kinds, {"type": "null"}], **annotations}


def given(name: str, kind: Rule | None = None) -> Rule:
    """A field is there, not null, and of this kind."""
    return {"required": [name], "properties": {name: kind or {"not": {"type": "null"}}}}


def exactly_one(*names: str) -> Rule:
    """One of the fields is given, and the others are not."""
    return {"oneOf": [given(name) for name in names]}


def at_most_one(*names: str) -> Rule:
    """The rule that at most one of the fields is given."""
    both = [[a, b] for i, a in enumerate(names) for b in names[i + 1 :]]
    return {"not": {"anyOf": [{"allOf": [given(a), given(b)]} for a, b in both]}}


def needs(when: Rule, then: Rule) -> Rule:
    """The rule that `then` holds where `when` does."""
    return {"if": when, "then": then}


def half_pair(body: bytes) -> str | None:
    """The first field with one, as messages[0].content; None where there is none, or the body is no JSON."""
    if b"\\u" not in body and b"\xed" not in body:
        return None
    try:
        return _place(json.loads(body), "")
    except (ValueError, RecursionError):
        return None


def _place(value: Any, path: str) -> str | None:
    if isinstance(value, str):
        return path if _HALF.search(value) else None
    if isinstance(value, list):
        parts = ((item, f"{path}[{i}]") for i, item in enumerate(value))
    elif isinstance(value, dict):
        if any(map(_HALF.search, value)):
            return path
        parts = ((item, f"{path}.{name}" if path else name) for name, item in value.items())
    else:
        return None
    return next((place for item, at in parts if (place := _place(item, at)) is not None), None)


def _bad_word(value: str) -> str:
    if not value.strip():
        raise ValueError("must have a character beside spaces")
    return value


def _stop_list(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS or not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise ValueError(f"must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
    return stops


def _prompt_list(value: Any) -> list[str | Sequence[int]]:
    """OpenAI's four forms (text, ids, and lists of either) as one list of prompts."""
    if isinstance(value, str):
        return [value]
    if (ids := as_ids(value)) is not None:
        return [ids]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of token ids, or a list of either")
    if isinstance(value[0], int | float):
        place = next(i for i, item in enumerate(value) if type(whole(item)) is not int)
        raise ValueError(f"must be a list of token ids: item {place} is no whole number")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"must be at most {MAX_PROMPTS} prompts")
    if all(isinstance(item, str) for item in value):
        return value
    lists = [ids for item in value if (ids := as_ids(item)) is not None]
    if len(lists) < len(value):
        raise ValueError("must be a list of strings, of token ids, or of lists with at least one token id")
    return list(lists)


def _id_keys(value: Any) -> Any:
    """JSON's keys are strings, if they were not read before."""
    if not isinstance(value, dict):
        return value
    for key in value:
        if not _TOKEN_ID.fullmatch(str(key)):
            refuse(str(key), "is no token id")
    return {int(key): bias for key, bias in value.items()}


TokenId = Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64), WHOLE]
Priority = Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY), WHOLE]
CacheSalt = Annotated[str, Field(max_length=MOST_SALT)]
AdapterName = Annotated[str, Field(max_length=MOST_ADAPTER_NAME)]
NewAdapterName = Annotated[str, Field(max_length=MOST_ADAPTER_NAME, pattern=f"^{ADAPTER_NAME}$")]
Count = Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE]
AtLeastOne = Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE]
AtLeastTwo = Annotated[int, Field(ge=2, le=INT32_MAX), WHOLE]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE]
LastTokens = Annotated[int, Field(ge=-1, le=INT32_MAX, json_schema_extra={"not": {"const": 0}}), WHOLE]
FromMinusOne = Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[
    list[str],
    BeforeValidator(
        _stop_list, json_schema_input_type=Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)]
    ),
]
BadWord = Annotated[
    str,
    Field(max_length=MAX_STOP_LENGTH, json_schema_extra={"pattern": r"\S"}),
    AfterValidator(_bad_word),
]
Bias = Annotated[float, Field(ge=-100, le=100)]
_IDS_AS_KEYS = {"propertyNames": {"pattern": f"^{_TOKEN_ID.pattern}$"}}
_BIASES = Annotated[dict[str, Bias], Field(max_length=MAX_BIASED_TOKENS, json_schema_extra=_IDS_AS_KEYS)]
Biases = Annotated[
    dict[TokenId, Bias],
    Field(max_length=MAX_BIASED_TOKENS),
    BeforeValidator(_id_keys, json_schema_input_type=_BIASES),
]
Ids = Annotated[list[TokenId], Field(min_length=1)]
P = TypeVar("P")
Many = Annotated[list[P], Field(min_length=1, max_length=MAX_PROMPTS)]
Prompts = Annotated[
    list[str | Sequence[int]],
    PlainValidator(_prompt_list, json_schema_input_type=str | Ids | Many[str] | Many[Ids]),
]
