"""Random JSON schemas, walked through, each text judged by `jsonschema`: `python -m tests.fuzz.schemas`.

Where a name comes twice, either value must fit. Beside what the schema says, each character is spelled as a
printer does, and white space is what a printer writes.
"""

from __future__ import annotations

import datetime
import json
import random
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import jsonschema

from eyas.common.errors import InvalidRequest
from eyas.common.grammars.compiler import rules_of_schema
from eyas.common.grammars.json_rules import JsonStyle
from tests.fuzz.grammars import random_pattern
from tests.fuzz.walks import Walker, campaign

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_RUN = re.compile(r"(?: |\n *|\n\t*)?")
_FORMATS = ("date", "time", "date-time", "ipv4", "ipv6", "email", "uuid", "hostname", "duration")
FORMATS = jsonschema.FormatChecker(formats=("date", "ipv4", "ipv6", "email", "uuid"))


@FORMATS.checks("date-time", raises=ValueError)
def _is_date_time(value: object) -> bool:
    return bool(datetime.datetime.fromisoformat(str(value)).tzinfo)


@FORMATS.checks("time", raises=ValueError)
def _is_time(value: object) -> bool:
    return bool(datetime.time.fromisoformat(str(value)).tzinfo)


def random_string(rng: random.Random) -> dict[str, Any]:
    """A schema of strings."""
    said: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.5:
        said["pattern"] = random_pattern(rng, 2)  # `re` takes for ever on deep ones
    elif rng.random() < 0.4:
        said["format"] = rng.choice(_FORMATS)
    if rng.random() < 0.3:
        said["minLength"] = rng.randrange(4)
    if rng.random() < 0.3:
        said["maxLength"] = said.get("minLength", 0) + rng.randrange(1, 6)
    return said


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    """A schema of any kind of part."""
    draw = rng.random()
    if depth == 3 or draw < 0.35:
        return random_string(rng)
    if draw < 0.5:
        return rng.choice(
            ({"type": "integer"}, {"type": "boolean"}, {"const": "é\n"}, {"enum": [1, "a", None]}, {})
        )
    below = [random_schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))]
    match rng.randrange(5):
        case 0:
            return {"type": "array", "items": below[0], "maxItems": rng.randrange(1, 4)}
        case 1:
            return {"anyOf": below}
        case 2:
            return {
                "type": "object",
                "patternProperties": {random_pattern(rng, 2): below[0]},
                "additionalProperties": False,
            }
        case 3:
            return {"type": "object", "propertyNames": random_string(rng), "additionalProperties": below[0]}
    names = rng.sample(["a", "ab", "b", 'q"', "é", "ê", "x\n", ""], len(below))
    return {
        "type": "object",
        "properties": dict(zip(names, below, strict=True)),
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": rng.choice((True, False, {"type": "null"})),
    }


def fault_of(schema: Any, text: str) -> str | None:
    """What is wrong with a text; None: nothing."""
    judge = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    try:
        judge.validate(json.loads(text))
        judge.validate(json.loads(text, object_pairs_hook=lambda pairs: dict(reversed(pairs))))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    for written in _STRING.findall(text):
        if json.dumps(json.loads(written), ensure_ascii=False) != written:
            return f"{written} is not as a printer writes it"
    between = re.split(r"[^\s]+", _STRING.sub("s", text))
    return next((f"white space {run!r}" for run in between if not _RUN.fullmatch(run)), None)


def faults(walks: int, seed: int) -> Iterator[str]:
    """What went wrong, in words."""
    rng = random.Random(f"schemas/{seed}")
    walker, left = Walker(rng), walks
    while left > 0:
        schema = random_schema(rng)
        try:
            style = rng.choice((JsonStyle.JSON, JsonStyle.COMPACT))
            compiled = walker.compile(rules_of_schema(deepcopy(schema), style=style))
            jsonschema.Draft202012Validator(schema).is_valid("")
        except (InvalidRequest, re.error):
            continue
        for _ in range(12):
            left -= 1
            text = walker.walk(compiled, 80)
            if text is not None and (fault := fault_of(schema, text)):
                yield f"{json.dumps(schema)} lets {text!r} through: {fault}"


if __name__ == "__main__":
    campaign(faults, __doc__)
