"""The bodies that the HTTP API accepts: OpenAI's chat and text completions, and this server's extensions.

Shapes and ranges of single fields only, strictly typed. What needs the model (lengths, token ids) is
checked in `admission`. A field that would change the answer but cannot be honoured is an error that names
it; a short list of harmless ones is accepted and ignored, and so is any unknown field that is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from eyas.common.errors import InvalidRequest
from eyas.common.params import MAX_TOP_LOGPROBS

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_LENGTH = 512

HARMLESS = frozenset(
    "user store metadata service_tier parallel_tool_calls prompt_cache_key safety_identifier name "
    "include_obfuscation".split()
)
UNSUPPORTED = frozenset(
    "tools tool_choice tool_calls tool_call_id functions function_call response_format modalities audio "
    "prediction web_search_options reasoning_effort verbosity suffix best_of guided_json refusal".split()
)


_REFUSED = "refused"


def _text_content(value: Any) -> Any:
    """A string, or a list of text parts joined by newlines."""
    if not isinstance(value, list):
        return value
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"part {i} has type {kind!r}: only text parts are supported")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {i} has no text")
    return "\n".join(part["text"] for part in value)


def stop_list(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS or not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise ValueError(f"must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
    return stops


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def _prompt_list(value: Any) -> list[str | list[int]]:
    """OpenAI's four shapes (text, ids, and lists of either) as one list of prompts."""
    if isinstance(value, str) or is_ids(value):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of token ids, or a list of either")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"must be at most {MAX_PROMPTS} prompts")
    if not all(isinstance(item, str) for item in value) and not all(map(is_ids, value)):
        raise ValueError("must be a list of strings or a list of lists of token ids")
    return value


def _system_role(role: str) -> str:
    """Chat templates know the older name of the developer's voice."""
    return "system" if role == "developer" else role


def refuse(field: str, reason: str) -> NoReturn:
    """Fails the validation of the model around `field`, naming it."""
    raise PydanticCustomError(_REFUSED, "{reason}", {"field": field, "reason": reason})


class Body(BaseModel):
    """Strict types; extra fields are read, judged by name, and dropped."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="after")
    def _judge_extras(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in HARMLESS:
                continue
            refuse(name, "is not supported" if name in UNSUPPORTED else "is not a known field")
        return self


class Message(Body):
    role: Annotated[Literal["system", "developer", "user", "assistant"], AfterValidator(_system_role)]
    content: Annotated[str, BeforeValidator(_text_content)]

    def as_dict(self) -> dict[str, str]:
        """What chat templates read."""
        return {"role": self.role, "content": self.content}


class StreamOptions(Body):
    include_usage: bool = False


class GenerationBody(Body):
    """What chat and text completions share. None means: the server's default."""

    endpoint: ClassVar[str]

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=0)
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[list[str], BeforeValidator(stop_list)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    speculative: bool = True
    timings: bool = False
    timeout: float | None = Field(None, gt=0)  # seconds

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "is only allowed with stream")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(GenerationBody):
    endpoint = "chat"

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            refuse("top_logprobs", "is only allowed with logprobs")
        return self


class TextBody(GenerationBody):
    endpoint = "completions"

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompt_list)]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False

    @model_validator(mode="after")
    def _what_goes_together(self) -> Self:
        if self.timings and len(self.prompt) > 1:
            refuse("timings", "is only told of a single prompt")
        return self


class TokenizeBody(Body):
    """Exactly one of `prompt` (text) and `messages` (a chat)."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            refuse("prompt", "must be given, or messages, and not both")
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


B = TypeVar("B", bound=Body)


def parse(kind: type[B], body: bytes) -> B:
    """The body as `kind`. Raises InvalidRequest naming the first field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _first_problem(error.errors(include_url=False, include_input=False)[0]) from None


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
    reason = reason.removeprefix("Value error, ").replace("Input should", "should", 1)
    return InvalidRequest(f"{name}: {reason}", param=name)


def _path(location: Sequence[str | int]) -> str:
    """("messages", 0, "content") as messages[0].content."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":  # the library's mark for a bad key of a dictionary
            path += f".{part}" if path else part
    return path
