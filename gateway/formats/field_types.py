"""The types that several fields of bodies share: numbers within bounds, prompts, stop strings, biases.

Every whole number is bounded by what protobuf can carry.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from eyas.common.params import INT32_MAX, MAX_BIASED_TOKENS, MAX_TOP_LOGPROBS, MOST_PRIORITY
from gateway.formats.fields import WHOLE, as_ids, refuse, whole

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_LENGTH = 512

_TOKEN_ID = re.compile(r"[0-9]{1,10}")


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
