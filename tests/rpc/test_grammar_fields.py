"""Every field that asks for a grammar becomes one value, over HTTP and gRPC; two of them are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_client import CHAT, GENERATE, TEXT, client_of, refused
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.client import AsyncClient, Grammar, InvalidRequest
from eyas.common.grammars.notations import MAX_GRAMMAR_BYTES, MAX_GRAMMAR_DEPTH, GrammarKind
from eyas.common.params import SamplingParams
from tests.rpc.sdk_front import served

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}}}'
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
RULES = 'root ::= "a"'
BY_SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)
SAME_EVERYWHERE: list[tuple[dict[str, Any], Grammar]] = [
    ({"json_schema": json.dumps(SCHEMA)}, BY_SCHEMA),
    ({"json_schema": SCHEMA}, BY_SCHEMA),
    ({"regex": "[0-9]+"}, Grammar.regex("[0-9]+")),
    ({"ebnf": RULES}, Grammar.ebnf(RULES)),
    ({"structural_tag": json.dumps(TAG)}, Grammar.structural_tag(TAG)),
]
OPENAI: list[tuple[dict[str, Any], Grammar]] = [
    ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
            }
        },
        BY_SCHEMA,
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, BY_SCHEMA),
    ({"response_format": TAG}, Grammar.structural_tag(TAG)),
    ({"guided_json": SCHEMA}, BY_SCHEMA),
    ({"guided_json": json.dumps(SCHEMA, indent=2)}, BY_SCHEMA),
    ({"guided_regex": "a|b"}, Grammar.regex("a|b")),
    ({"guided_grammar": RULES}, Grammar.ebnf(RULES)),
    ({"guided_choice": ["yes", "no"]}, Grammar(GrammarKind.CHOICE, '["yes","no"]')),
    ({"structured_outputs": {"json": SCHEMA}}, BY_SCHEMA),
    ({"structured_outputs": {"choice": ["é"]}}, Grammar(GrammarKind.CHOICE, '["é"]')),
    ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
]
ASKED = [
    *[("/v1/chat/completions", CHAT | field, grammar) for field, grammar in [*SAME_EVERYWHERE, *OPENAI]],
    *[("/v1/completions", TEXT | field, grammar) for field, grammar in [*SAME_EVERYWHERE, *OPENAI]],
    *[("/generate", GENERATE | {"sampling_params": field}, grammar) for field, grammar in SAME_EVERYWHERE],
]
DEEP = "(" * (MAX_GRAMMAR_DEPTH + 1)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": SCHEMA, "regex": "a"}, "guided_json"),
    ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": 5}, "guided_json"),
    ({"regex": DEEP}, "regex"),
    ({"ebnf": "a" * (MAX_GRAMMAR_BYTES + 1)}, "ebnf"),
    ({"regex": "a\0b"}, "regex"),
    ({"regex": "a", "bad_words": ["b"]}, "bad_words"),
]


@pytest.mark.parametrize(("path", "body", "grammar"), ASKED)
async def test_every_name_asks_for_the_same(path: str, body: dict[str, Any], grammar: Grammar) -> None:
    backend = ScriptedBackend(nano_tokenizer())
    async with client_of(backend) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert "x-eyas-ignored" not in response.headers
    assert [request.params.grammar for request in backend.requests] == [grammar]


@pytest.mark.parametrize(("field", "param"), REFUSED)
async def test_what_cannot_be_meant_is_refused_by_name(field: dict[str, Any], param: str) -> None:
    backend = ScriptedBackend(nano_tokenizer())
    async with client_of(backend) as client:
        message = refused(await client.post("/v1/chat/completions", json=CHAT | field), param)
    assert len(message) < 300 and not backend.requests


@pytest.mark.parametrize(
    "grammar",
    [BY_SCHEMA, Grammar.json_object(), Grammar.regex("a+"), Grammar.choice(["a", "b"]), Grammar.ebnf(RULES)],
)
async def test_the_sdk_asks_for_the_same(grammar: Grammar) -> None:
    backend = ScriptedBackend(nano_tokenizer())
    async with served(backend) as address, AsyncClient(address, retries=0) as client:
        await client.generate("x", grammar=grammar)
        with pytest.raises(InvalidRequest, match="grammar"):
            await client.generate("x", grammar="a+")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="empty"):
            await client.generate("x", grammar=Grammar.regex(""))
    assert [request.params.grammar for request in backend.requests] == [grammar]


def test_a_grammar_makes_its_rows_special() -> None:
    assert SamplingParams(grammar=Grammar.json_object()).reads_history
