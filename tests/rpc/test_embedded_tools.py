"""Everyone's first call of a tool: the embedded model, forced by a grammar, through OpenAI's SDK."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from real_cluster import real_cluster

from eyas.common.config import EngineConfig
from eyas.common.types import Role

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Oslo", "Bergen"]},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now", "description": "The time."}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.slow
async def test_a_forced_call_of_the_embedded_model_is_valid(tmp_path: Path) -> None:
    asked: Any = {
        "model": "eyas-nano",
        "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
        "tools": [WEATHER, NOW],
        "max_tokens": 200,
        "parallel_tool_calls": False,
    }
    roles = [(Role.PREFILL, Role.DECODE, Role.DRAFT)]
    async with real_cluster(EngineConfig(num_pages=128), tmp_path, roles) as cluster:
        sdk = AsyncOpenAI(
            api_key="none", base_url="http://gateway/v1", http_client=cluster.http, max_retries=0
        )
        whole = (await sdk.chat.completions.create(tool_choice=NAMED, **asked)).choices[0]
        calls = whole.message.tool_calls or []
        assert [call.function.name for call in calls] == ["get_weather"]
        arguments = json.loads(calls[0].function.arguments)
        assert arguments["city"] in ("Oslo", "Bergen") and set(arguments) <= {"city", "unit"}
        assert whole.message.content is None and whole.finish_reason == "stop"

        async with sdk.chat.completions.stream(tool_choice="required", **asked) as stream:
            choice = (await stream.get_final_completion()).choices[0]
        [call] = choice.message.tool_calls or []
        assert call.function.name in ("get_weather", "now") and choice.finish_reason == "tool_calls"
        assert isinstance(json.loads(call.function.arguments), dict)

        said = whole.message.model_dump(exclude_none=True)
        told = {"role": "tool", "tool_call_id": calls[0].id, "content": '{"sky": "clear"}'}
        more = asked | {"messages": [*asked["messages"], said, told], "max_tokens": 8}
        assert (await sdk.chat.completions.create(**more)).choices[0].message.role == "assistant"
