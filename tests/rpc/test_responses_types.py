"""Every object and event of /v1/responses is of the openai package's types, to the letter."""

from __future__ import annotations

from typing import Any

import pytest
from http_client import client_of, refused
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import ValidationError
from tool_models import speaker

from eyas.common.errors import EyasError, InvalidRequest, Overloaded, Unavailable
from tests.clients.strictness import strictly
from tests.rpc.responses_requests import BODY, CALLS, EVERYTHING, FLAT, PATH, told

SCHEMA = {"type": "object", "properties": {"sky": {"type": "string"}}}
UNNAMED: dict[str, Any] = {"type": "json_schema", "schema": SCHEMA}
NAMED = UNNAMED | {"name": "sky", "description": "The sky.", "strict": True}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
ASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("plain", "Hello!", {}),
    ("plain", "", {}),
    ("plain", "Hello!", {"instructions": "Be brief.", "metadata": {"a": "b"}, "prompt_cache_key": "tea"}),
    ("plain", "Hello, world!", {"top_logprobs": 2}),
    ("plain", "Hello, world!", {"include": ["message.output_text.logprobs"]}),
    ("plain", "{}", {"text": {"format": {"type": "json_object"}}}),
    ("plain", "{}", {"text": {"format": NAMED}}),
    ("plain", "{}", {"text": {"format": UNNAMED}}),
    ("plain", "Hi", {"reasoning": {"effort": "medium", "summary": "auto"}, "truncation": "disabled"}),
    ("hermes", EVERYTHING, {"tools": FLAT}),
    ("hermes", EVERYTHING, {"tools": FLAT, "max_output_tokens": 40}),
    ("hermes", CALLS, {"tools": FLAT, "tool_choice": {"type": "function", "name": "weather"}}),
    ("hermes", CALLS, {"tools": FLAT, "tool_choice": ALLOWED}),
    ("hermes", CALLS, {"tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False}),
]


@pytest.mark.parametrize(("dialect", "text", "more"), ASKED)
async def test_objects_and_events_are_of_the_packages_types(
    dialect: str, text: str, more: dict[str, Any]
) -> None:
    async with client_of(speaker(dialect, text, 2)) as client:
        whole = await client.post(PATH, json=BODY | more)
        assert whole.status_code == 200, whole.text
        strictly(Response, whole.json())
        for event in told(await client.post(PATH, json=BODY | more | {"stream": True})):
            strictly(ResponseStreamEvent, event)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unavailable("the worker is gone"), "server_error"),
        (Overloaded("the queue is full"), "rate_limit_exceeded"),
        (InvalidRequest("the prompt is wrong"), "invalid_prompt"),
        (EyasError("internal error"), "server_error"),
    ],
)
async def test_failures_are_too(error: EyasError, code: str) -> None:
    backend = speaker("plain", "Hello, world!")
    backend.breaks_with = error
    async with client_of(backend) as client:
        events = told(await client.post(PATH, json=BODY | {"stream": True}))
    for event in events:
        strictly(ResponseStreamEvent, event)
    assert events[-1]["response"]["error"] == {"code": code, "message": str(error)}


async def test_the_check_sees_what_is_wrong() -> None:
    async with client_of(speaker("plain", "Hello!")) as client:
        whole = (await client.post(PATH, json=BODY)).json()
    strictly(Response, whole)
    with pytest.raises(AssertionError, match="Response does not know .*text.wordy"):
        strictly(Response, whole | {"text": whole["text"] | {"wordy": True}})
    for wrong in ({"usage": {"input_tokens": 1}}, {"status": "over"}, {"temperature": "1"}):
        with pytest.raises(ValidationError):
            strictly(Response, whole | wrong)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
        ({"input": []}, "input"),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]},
            "tools[0].parameters",
        ),
        ({"tools": [{"type": "function", "name": "f"}] * 2}, "tools"),
    ],
)
async def test_what_the_answer_could_not_repeat_is_refused(more: dict[str, Any], param: str) -> None:
    async with client_of(speaker("plain", "Hello!")) as client:
        reason = refused(await client.post(PATH, json=BODY | more), param)
        assert reason.startswith(param) and "List" not in reason
