"""Grammars of every notation with judges of texts, random JSON schemas, requests to the embedded model."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from eyas.common.config import NANO
from eyas.common.grammars.notations import Grammar
from eyas.common.params import SamplingParams
from eyas.common.tokenizers.vocabulary import pieces
from eyas.common.types import GenerationRequest, RequestChoice
from gateway.text.tokenizer import Tokenizer

EOS = 2
ENDS = (0, EOS)  # of the embedded model
Judge = Callable[[str], bool]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"city": {"type": "string"}}}]},
    },
    "required": ["name", "age", "tags", "home"],
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
        }
    },
    "$ref": "#/$defs/node",
}
EXPRESSION = """\
root ::= sum
sum ::= term (("+" | "-") term)?
term ::= [0-9] [0-9]? | "(" sum ")"
"""


def by_schema(schema: Any) -> tuple[Grammar, Judge]:
    def judge(text: str) -> bool:
        try:
            jsonschema.validate(json.loads(text), schema, format_checker=None)
        except (ValueError, jsonschema.ValidationError):
            return False
        return True

    return Grammar.json_schema(schema), judge


def matching(pattern: str) -> Judge:
    return lambda text: re.fullmatch(pattern, text) is not None


CASES: list[tuple[Grammar, Judge]] = [
    by_schema(PERSON),
    by_schema(TREE),
    (Grammar.json_object(), lambda text: isinstance(json.loads(text), dict)),
    (Grammar.regex(r"[A-Z][a-z]{2,8} is [0-9]{1,3}\."), matching(r"[A-Z][a-z]{2,8} is [0-9]{1,3}\.")),
    (Grammar.choice(["Paris", "Rome", "Par"]), lambda text: text in ("Paris", "Rome", "Par")),
    (Grammar.ebnf(EXPRESSION), matching(r"[0-9()+-]+")),
    (Grammar.regex("(é|è|ü){1,4}"), matching("(é|è|ü){1,4}")),
]
PROMPTS = (
    "What is the capital of France?",
    "Tell me about Anna, who is 31, as JSON.",
    "List three fruits.",
    "What is 17 plus 25?",
)


@cache
def table() -> list[bytes]:
    return pieces(Path(NANO))


@cache
def prompt(text: str) -> tuple[int, ...]:
    tokenizer = Tokenizer.load(NANO)
    chat = tokenizer.template
    assert chat is not None
    messages = [{"role": "user", "content": text}]
    return tokenizer.encode(chat.render(messages, add_generation_prompt=True), special=False)


def text_of(tokens: list[int]) -> str:
    """Of a whole output. Raises UnicodeDecodeError if it ends inside a character."""
    kept = tokens[:-1] if tokens and tokens[-1] in ENDS else tokens
    return b"".join(table()[token] for token in kept).decode()


def request(
    name: str, grammar: Grammar, asked: str = PROMPTS[0], n: int = 1, **params: Any
) -> GenerationRequest:
    wanted = SamplingParams(**({"max_tokens": 32, "temperature": 0.0} | params), grammar=grammar)
    return GenerationRequest(name, prompt(asked), wanted, tuple(map(RequestChoice, range(n))))


def some_params(pick: random.Random) -> dict[str, Any]:
    """Parameters of every kind that a grammar must work with."""
    chosen: dict[str, Any] = {"temperature": pick.choice((0.0, 0.7, 1.0)), "seed": pick.getrandbits(64)}
    extras: list[dict[str, Any]] = [
        {"top_k": 5},
        {"top_p": 0.8, "min_p": 0.05},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"logit_bias": {pick.randrange(4096): pick.uniform(-5, 5) for _ in range(20)}},
        {"logprobs": 2},
        {"min_tokens": 10},
        {"ignore_eos": True},
        {"stop_token_ids": (pick.randrange(3, 4096),)},
        {},
    ]
    return chosen | pick.choice(extras) | pick.choice(extras)


def random_schema(pick: random.Random, depth: int = 0) -> Any:
    """A schema that can be followed, of any kind of part."""
    leaves: list[Any] = [
        {"type": "integer", "minimum": -5, "maximum": pick.randrange(5, 500)},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": pick.randrange(1, 10)},
        {"type": "string", "minLength": 2, "maxLength": 8},
        {"type": "string", "pattern": pick.choice(("[a-c]{1,5}", "[0-9]{3}-[0-9]{2}", "(yes|no)"))},
        {"type": "string", "format": pick.choice(("date", "time", "uuid", "ipv4", "email"))},
        {"enum": pick.sample([1, "a", None, True, "bc", -2.5, "é"], 3)},
        {"const": pick.choice((7, "word", None))},
    ]
    if depth == 3 or (depth and pick.random() < 0.5):
        return pick.choice(leaves)
    below = [random_schema(pick, depth + 1) for _ in range(pick.randrange(1, 4))]
    match pick.randrange(4):
        case 0:
            return {"type": "array", "items": below[0], "minItems": pick.randrange(2), "maxItems": 3}
        case 1:
            return {"anyOf": below}
        case 2:
            return {"type": "array", "prefixItems": below, "minItems": len(below)}
    names = [f"p{i}" for i in range(len(below))]
    return {
        "type": "object",
        "properties": dict(zip(names, below, strict=True)),
        "required": pick.sample(names, pick.randrange(len(names) + 1)),
        "additionalProperties": False,
    }
