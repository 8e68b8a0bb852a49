"""Pydantic AI: an agent with an output type and a tool, over chats and over responses."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from told import Server, tell


class Weather(BaseModel):
    city: Literal["Lima", "Oslo"]
    sunny: bool


def agent(server: Server, kind: Any, **more: Any) -> Agent[Any, Any]:
    provider = OpenAIProvider(base_url=server.url, api_key=server.key)
    return Agent(kind(server.model, provider=provider), model_settings={"max_tokens": 300}, **more)


def chat(server: Server) -> None:
    result = agent(server, OpenAIChatModel).run_sync("What is the capital of France?")
    assert result.output and result.usage.output_tokens


def stream(server: Server) -> None:
    async def follow() -> str:
        async with agent(server, OpenAIChatModel).run_stream("What is the capital of France?") as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    assert asyncio.run(follow())


def outputs(server: Server, kind: Any) -> None:
    for output in (Weather, NativeOutput(Weather)):  # by a tool that must be called, and by a schema
        found = agent(server, kind, output_type=output).run_sync("How is it in Lima?")
        assert isinstance(found.output, Weather)


if __name__ == "__main__":
    tell(
        {
            "chat": chat,
            "stream": stream,
            "structured output": lambda server: outputs(server, OpenAIChatModel),
            "responses": lambda server: outputs(server, OpenAIResponsesModel),
        }
    )
