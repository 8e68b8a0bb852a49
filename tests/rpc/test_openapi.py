"""/openapi.json says what the server does: exactly the bodies that are taken, and every answer."""

from __future__ import annotations

import re
from typing import Any

import httpx
import jsonschema
import pytest
from http_client import CHAT, GENERATE, TEXT, client_of, refused
from scripted_backend import ScriptedBackend, nano_tokenizer
from tool_models import speaker

from eyas.common.config import GatewayConfig
from tests.chat_templates import TOOLS, called

CHATS, RESPONSES = "/v1/chat/completions", "/v1/responses"
ASKED = {"role": "user", "content": "Hi"}
ITEMS: dict[str, Any] = {"model": "eyas-nano", "input": "Hi"}
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
SCHEMA = {"type": "object"}

TAKEN: list[tuple[str, dict[str, Any]]] = [
    # A whole number may be written with a fraction: to JSON schema 3.0 is an integer.
    (CHATS, CHAT | {"max_tokens": 5.0, "n": 2.0, "seed": 3.0, "top_k": -1.0, "priority": 1.0}),
    (CHATS, CHAT | {"stop_token_ids": [7.0], "logit_bias": {"7": 1}, "logprobs": True, "top_logprobs": 2.0}),
    (CHATS, CHAT | {"speculative": {"steps": 2.0, "topk": 1.0, "draft_tokens": 3.0}}),
    ("/v1/completions", TEXT | {"prompt": [7.0, 8.0], "truncate_prompt_tokens": 1.0}),
    ("/v1/completions", TEXT | {"prompt": [[7.0], [8]], "min_tokens": 1.0}),
    ("/generate", {"input_ids": [7.0, 8], "sampling_params": {"max_new_tokens": 2.0}}),
    ("/generate", {"input_ids": [[7.0], [8.0]], "return_logprob": True, "logprob_start_len": 0.0}),
    ("/detokenize", {"tokens": [7.0, 8]}),
    (RESPONSES, ITEMS | {"max_output_tokens": 5.0, "logit_bias": {"7": 1.5}}),
    # null means absent.
    (CHATS, CHAT | {"n": None, "stream": None, "min_tokens": None, "presence_penalty": None, "stop": None}),
    (RESPONSES, ITEMS | {"stream": None, "tools": None, "parallel_tool_calls": None}),
    ("/generate", GENERATE | {"sampling_params": None, "input_ids": None}),
    # Rules over several fields.
    (CHATS, CHAT | {"messages": [ASKED, called({"city": "Oslo"}, "a")]}),
    (CHATS, CHAT | {"tools": TOOLS, "tool_choice": "required"}),
    (CHATS, CHAT | {"continue_final_message": True, "add_generation_prompt": False}),
    (CHATS, CHAT | {"stop": "x"}),
    ("/tokenize", {"prompt": "a", "messages": None}),
    (RESPONSES, ITEMS | {"input": [{"role": "user", "content": "Hi"}]}),
    (RESPONSES, ITEMS | {"input": [{"type": "reasoning"}, ASKED]}),
    (RESPONSES, ITEMS | {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHATS, CHAT | {"max_tokens": 5.5}, "max_tokens"),
    (CHATS, CHAT | {"n": 17.0}, "n"),
    (CHATS, CHAT | {"stop": ""}, "stop"),
    (CHATS, CHAT | {"stop": ["x"] * 17}, "stop"),
    (CHATS, CHAT | {"logit_bias": {"x": 1}}, "logit_bias.x"),
    (CHATS, CHAT | {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (CHATS, CHAT | {"top_logprobs": 2}, "top_logprobs"),
    (CHATS, CHAT | {"tool_choice": "required"}, "tool_choice"),
    (CHATS, CHAT | {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    (CHATS, CHAT | {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHATS, CHAT | {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (CHATS, CHAT | {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (
        CHATS,
        CHAT | {"messages": [called({}, "a") | {"role": "user", "content": "x"}]},
        "messages[0].tool_calls",
    ),
    (CHATS, CHAT | {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHATS, CHAT | {"response_format": {"type": "structural_tag"}}, "response_format.format"),
    (CHATS, CHAT | {"request_id": "a b"}, "request_id"),
    ("/v1/completions", TEXT | {"prompt": []}, "prompt"),
    ("/v1/completions", TEXT | {"prompt": [[]]}, "prompt"),
    ("/v1/completions", TEXT | {"prompt": [1.5]}, "prompt"),
    ("/v1/completions", TEXT | {"prompt": ["a", "b"], "timings": True}, "timings"),
    ("/generate", {}, "text"),
    ("/generate", GENERATE | {"input_ids": [1]}, "text"),
    ("/generate", {"text": ["a"] * 65}, "text"),
    ("/generate", GENERATE | {"sampling_params": {"seed": 1, "sampling_seed": 1}}, "sampling_params.seed"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [ASKED]}, "prompt"),
    (RESPONSES, ITEMS | {"input": []}, "input"),
    (RESPONSES, ITEMS | {"input": [{"content": "x"}]}, "input[0].role"),
    (RESPONSES, ITEMS | {"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
    (RESPONSES, ITEMS | {"input": [{"type": "other"}]}, "input[0].type"),
    (
        RESPONSES,
        ITEMS | {"input": [{"role": "user", "content": [{"type": "x"}]}]},
        "input[0].content[0].type",
    ),
    (RESPONSES, ITEMS | {"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    (RESPONSES, ITEMS | {"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
]


@pytest.fixture
async def api() -> dict[str, Any]:
    return await described(client_of(ScriptedBackend(nano_tokenizer()), GatewayConfig(api_keys=("k",))))


async def described(client: httpx.AsyncClient) -> dict[str, Any]:
    async with client:
        found: dict[str, Any] = (await client.get("/openapi.json")).json()
    return found


def allows(api: dict[str, Any], path: str, body: Any) -> bool:
    schema = api["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    whole = schema | {"components": api["components"]}
    return bool(jsonschema.Draft202012Validator(whole).is_valid(body))


@pytest.mark.parametrize(("path", "body"), TAKEN)
async def test_what_the_schema_allows_is_taken(api: dict[str, Any], path: str, body: dict[str, Any]) -> None:
    assert allows(api, path, body)
    async with client_of(speaker("hermes", "Hello!")) as client:
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
async def test_what_the_schema_forbids_is_refused(
    api: dict[str, Any], path: str, body: dict[str, Any], param: str
) -> None:
    assert not allows(api, path, body)
    async with client_of(speaker("hermes", "Hello!")) as client:
        response = await client.post(path, json=body)
        assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


async def test_a_format_that_cannot_go_with_another_is_named_as_it_was_asked_for() -> None:
    body = ITEMS | {"regex": "a+", "text": {"format": {"type": "json_object"}}}
    async with client_of(speaker("plain", "Hello!")) as client:
        refused(await client.post(RESPONSES, json=body), "text.format")


async def test_every_route_tells_its_parameters_and_its_errors(api: dict[str, Any]) -> None:
    error = {"$ref": "#/components/schemas/ErrorBody"}
    assert len(api["paths"]) >= 24
    for path, verbs in api["paths"].items():
        for operation in verbs.values():
            told = operation.get("parameters", ())
            assert [one["name"] for one in told if one["in"] == "path"] == re.findall(r"{(\w+)}", path)
            assert {one["name"] for one in told if one["in"] == "query"} <= {"timeout", "level"}
            responses = operation["responses"]
            assert "default" in responses and ("401" in responses) == ("security" in operation)
            for status, response in responses.items():
                if status != "200":
                    assert response["content"]["application/json"]["schema"] == error
    assert "200" not in api["paths"]["/v1/embeddings"]["post"]["responses"]
    assert {"400", "404", "408", "413", "429"} <= set(api["paths"][CHATS]["post"]["responses"])


async def test_a_server_without_keys_asks_for_none(api: dict[str, Any]) -> None:
    keyless = await described(client_of(ScriptedBackend(nano_tokenizer())))
    assert keyless["components"]["securitySchemes"] == {} and api["components"]["securitySchemes"]
    assert keyless["paths"].keys() == api["paths"].keys()
    for verbs in keyless["paths"].values():
        assert not any("security" in verb or "401" in verb["responses"] for verb in verbs.values())


async def test_errors_are_as_described_and_a_wrong_method_is_told_the_right_one(api: dict[str, Any]) -> None:
    schema = {"$ref": "#/components/schemas/ErrorBody", "components": api["components"]}
    async with client_of(ScriptedBackend(nano_tokenizer()), GatewayConfig(api_keys=("k",))) as client:
        wrong = await client.get(CHATS)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert set((await client.options("/ping")).headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}
        assert set((await client.delete("/v1/models")).headers["allow"].split(", ")) == {"GET", "HEAD"}
        keyless, nowhere = await client.get("/v1/models"), await client.get("/nowhere")
    for response, status in ((wrong, 405), (keyless, 401), (nowhere, 404)):
        assert response.status_code == status
        jsonschema.validate(response.json(), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"error": "x"}, schema)
