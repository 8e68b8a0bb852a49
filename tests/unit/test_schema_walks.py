"""Random schemas of every keyword: what their masks let through fits them, as another judge says."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from eyas.common.config import NANO
from eyas.common.errors import InvalidRequest
from eyas.common.grammars.compiler import GrammarCompiler, library
from eyas.common.grammars.notations import Grammar

SIZE, END = 4096, 2
MOST = 80  # tokens of a walk
VALUES: list[Any] = [
    0,
    1,
    2,
    5,
    -3,
    1.5,
    "a",
    "b",
    "ab",
    "",
    None,
    True,
    False,
    [],
    [1],
    ["a", "a"],
    {},
    {"a": 1},
]
NAMES = ("a", "b", "c")


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Path(NANO), SIZE, (END,))


def some(pick: random.Random, depth: int) -> Any:
    """A schema of a few keywords."""
    if depth <= 0:
        return pick.choice([True, {"type": "integer"}, {"type": "string"}, {"const": 1}, {"enum": ["a", 1]}])
    below = lambda: some(pick, depth - 1)  # noqa: E731
    count = lambda: pick.randrange(3)  # noqa: E731
    kinds: dict[str, Any] = {
        "type": lambda: pick.choice(
            [
                "object",
                "object",
                "array",
                "array",
                "string",
                "integer",
                "number",
                ["string", "null", "integer"],
            ]
        ),
        "enum": lambda: pick.sample(VALUES, 6),
        "const": lambda: pick.choice(VALUES),
        "properties": lambda: {name: below() for name in pick.sample(NAMES, 2)},
        "required": lambda: pick.sample(NAMES, pick.randrange(1, 3)),
        "additionalProperties": below,
        "patternProperties": lambda: {pick.choice(["^a", "b", "c$"]): below()},
        "propertyNames": lambda: pick.choice([{"maxLength": 2}, {"enum": ["a", "b"]}, {"pattern": "^[a-c]"}]),
        "minProperties": count,
        "maxProperties": count,
        "dependentRequired": lambda: {"a": ["b"]},
        "dependentSchemas": lambda: {"b": below()},
        "unevaluatedProperties": below,
        "items": below,
        "prefixItems": lambda: [below(), below()],
        "minItems": count,
        "maxItems": count,
        "uniqueItems": lambda: True,
        "contains": below,
        "minContains": count,
        "maxContains": count,
        "unevaluatedItems": below,
        "minLength": count,
        "maxLength": lambda: pick.randrange(5),
        "pattern": lambda: pick.choice(["^a", "b$", "a|b", "^[a-c]{1,3}$"]),
        "minimum": lambda: pick.randrange(-9, 9),
        "exclusiveMaximum": lambda: pick.randrange(-9, 99),
        "multipleOf": lambda: pick.choice([2, 3, 0.5, 0.25]),
        "not": below,
        "anyOf": lambda: [below(), below()],
        "oneOf": lambda: [below(), below()],
        "allOf": lambda: [below(), below()],
        "if": below,
        "then": below,
        "else": below,
        "$ref": lambda: "#/$defs/" + pick.choice(["d", "e"]),
    }
    return {name: kinds[name]() for name in pick.sample(list(kinds), pick.randrange(1, 5))}


def walk(compiled: Any, pick: random.Random) -> str | None:
    """A text that the mask lets through; None: it did not end."""
    matcher, mask = library().GrammarMatcher(compiled), np.zeros((1, SIZE // 32), np.int32)
    tokens = list[int]()
    for _ in range(MOST):
        matcher.fill_next_token_bitmask(mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert len(allowed), b"".join(compiler().pieces[one] for one in tokens)
        short = [one for one in allowed if len(compiler().pieces[one]) == 1 or one == END]
        token = END if END in allowed and pick.random() < 0.7 else int(pick.choice(short or list(allowed)))
        if token == END:
            return b"".join(compiler().pieces[one] for one in tokens).decode()
        assert matcher.accept_token(token)
        tokens.append(token)
    return None


def judged(seed: int, schemas: int, walks: int) -> tuple[int, int]:
    """How many schemas were followed, and how many texts were judged."""
    pick, followed, texts = random.Random(seed), 0, 0
    for _ in range(schemas):
        schema = some(pick, 2)
        if isinstance(schema, dict):
            schema = {**schema, "$defs": {"d": some(pick, 1), "e": some(pick, 1)}}
        try:
            compiled = compiler().compile(Grammar.json_schema(schema))
        except InvalidRequest as refused:
            assert "at #" in refused.message, (schema, refused.message)
            continue
        followed += 1
        checker = jsonschema.Draft202012Validator(schema)
        for _ in range(walks):
            text = walk(compiled, pick)
            if text is not None:
                texts += 1
                assert checker.is_valid(json.loads(text)), (json.dumps(schema), text)
    return followed, texts


def test_what_masks_let_through_fits_the_schema() -> None:
    followed, texts = judged(11, 60, 4)
    assert followed > 20 and texts > 60
