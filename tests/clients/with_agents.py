"""OpenAI's agents: a loop with a tool, over chats and over responses."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from told import Server, tell

ASKED: list[str] = []


class Weather(BaseModel):
    sunny: bool


@function_tool
def weather(sunny: bool) -> str:
    """Says what the weather is."""
    ASKED.append("weather")
    return "It rains."


def agent(server: Server, kind: Any, **more: Any) -> Agent[Any]:
    client = AsyncOpenAI(base_url=server.url, api_key=server.key)
    return Agent(name="a", instructions="Be brief.", model=kind(server.model, client), **more)


def run(server: Server, kind: Any, stream: bool) -> None:
    settings = ModelSettings(tool_choice="required", max_tokens=400, parallel_tool_calls=False)
    asked = agent(server, kind, tools=[weather], model_settings=settings)
    ASKED.clear()
    if not stream:
        found: Any = Runner.run_sync(asked, "What is the weather?", max_turns=4)
    else:

        async def follow() -> Any:
            result = Runner.run_streamed(asked, "What is the weather?", max_turns=4)
            assert [event async for event in result.stream_events()]
            return result

        found = asyncio.run(follow())
    assert ASKED and found.final_output


def structured(server: Server, kind: Any) -> None:
    settings = ModelSettings(max_tokens=300)
    found = Runner.run_sync(agent(server, kind, output_type=Weather, model_settings=settings), "Is it sunny?")
    assert isinstance(found.final_output, Weather)


CHAT, RESPONSES = OpenAIChatCompletionsModel, OpenAIResponsesModel

if __name__ == "__main__":
    set_tracing_disabled(True)
    tell(
        {
            "tools required": lambda server: run(server, CHAT, stream=False),
            "tools streamed": lambda server: run(server, CHAT, stream=True),
            "structured output": lambda server: structured(server, CHAT),
            "responses": lambda server: (run(server, RESPONSES, stream=False), structured(server, RESPONSES))[
                0
            ],
            "responses streamed": lambda server: run(server, RESPONSES, stream=True),
        }
    )
