"""Whole loops of agents over each API: the model is made to call a tool, the client runs it, it answers.

Without a folder the server's model thinks, and its thoughts must arrive too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from told import SCHEMA, Server, tell

QUESTION = "How is the weather in Lima?"
RAN: list[dict[str, Any]] = []


def weather(city: str, sunny: bool) -> str:
    """The weather in a city."""
    RAN.append({"city": city, "sunny": sunny})
    return f"It rains in {city}."


def door(server: Server) -> str:
    """The address without a version."""
    return server.url.removesuffix("/v1")


def check(server: Server, answer: Any, thoughts: Any) -> None:
    """The tool ran once or more, there is an answer, and thoughts if the model has them."""
    assert RAN and isinstance(answer, str) and answer, (RAN, answer)
    if not server.folder:
        assert answer == "It rains in Lima." and "I must look." in str(thoughts), (answer, thoughts)


# --- Anthropic's SDK ---------------------------------------------------------------------------------------


def with_sdk(server: Server, stream: bool) -> None:
    import anthropic

    client = anthropic.Anthropic(api_key=server.key, base_url=door(server), max_retries=0)
    tool = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: dict[str, Any] = {
        "model": server.model,
        "max_tokens": 1100,
        "tools": [tool],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tool_choice": {"type": "any"},
    }
    said: list[Any] = []
    for _ in range(4):
        if stream:
            with client.messages.stream(**asked, messages=turns) as events:
                reply = events.get_final_message()
        else:
            reply = client.messages.create(**asked, messages=turns)
        said += reply.content
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            break
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": [{"type": "text", "text": weather(**call.input)}],
            }
            for call in calls
        ]
        turns += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
        asked["tool_choice"] = {"type": "auto"}
    check(server, said[-1].text, [block.thinking for block in said if block.type == "thinking"])


# --- OpenAI's agents ---------------------------------------------------------------------------------------


def with_agents(server: Server, api: str, stream: bool) -> None:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    kinds: dict[str, Any] = {
        "chat": agents.OpenAIChatCompletionsModel,
        "responses": agents.OpenAIResponsesModel,
    }
    model = kinds[api](server.model, AsyncOpenAI(base_url=server.url, api_key=server.key))
    settings = agents.ModelSettings(tool_choice="required", max_tokens=400, parallel_tool_calls=False)
    tool = agents.function_tool(weather)
    agent = agents.Agent(
        name="a", instructions="Be brief.", model=model, tools=[tool], model_settings=settings
    )

    async def run() -> Any:
        if not stream:
            return await agents.Runner.run(agent, QUESTION, max_turns=4)
        result = agents.Runner.run_streamed(agent, QUESTION, max_turns=4)
        assert [event async for event in result.stream_events()]
        return result

    found = asyncio.run(run())
    thoughts = [item.raw_item for item in found.new_items if item.type == "reasoning_item"]
    check(server, found.final_output, thoughts)


# --- pydantic-ai -------------------------------------------------------------------------------------------


def pydantic_model(server: Server, api: str) -> Any:
    if api == "anthropic":
        import anthropic
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        client = anthropic.AsyncAnthropic(api_key=server.key, base_url=door(server))
        return AnthropicModel(server.model, provider=AnthropicProvider(anthropic_client=client))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind: Any = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[api]
    return kind(server.model, provider=OpenAIProvider(base_url=server.url, api_key=server.key))


def with_pydantic_ai(server: Server, api: str, stream: bool) -> None:
    from pydantic_ai import Agent

    def settings(context: Any) -> Any:
        return {"max_tokens": 400} if RAN else {"max_tokens": 400, "tool_choice": "required"}

    agent: Any = Agent(pydantic_model(server, api), tools=[weather], model_settings=settings)

    async def run() -> tuple[Any, Any]:
        if not stream:
            result = await agent.run(QUESTION)
            return result.output, result.all_messages()
        async with agent.run_stream(QUESTION) as result:
            text = "".join([piece async for piece in result.stream_text(delta=True)])
            return text, result.all_messages()

    answer, messages = asyncio.run(run())
    parts = [part for message in messages for part in message.parts]
    check(server, answer, [part for part in parts if part.part_kind == "thinking"])


# --- LangChain ---------------------------------------------------------------------------------------------


def langchain_model(server: Server, api: str) -> Any:
    given: dict[str, Any] = {"model": server.model, "api_key": server.key, "max_tokens": 400}
    if api == "anthropic":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(**given, base_url=door(server))
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(**given, base_url=server.url, use_responses_api=api == "responses")


def with_langchain(server: Server, api: str, stream: bool) -> None:
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_model_call

    @wrap_model_call
    def forced(request: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(request if RAN else request.override(tool_choice="any"))

    agent: Any = create_agent(langchain_model(server, api), tools=[weather], middleware=[forced])
    asked = {"messages": [{"role": "user", "content": QUESTION}]}
    if stream:
        pieces = list(agent.stream(asked, stream_mode=["messages", "values"]))
        assert sum(kind == "messages" for kind, _ in pieces) > 2
        messages = pieces[-1][1]["messages"]
    else:
        messages = agent.invoke(asked)["messages"]
    thoughts = [block for message in messages for block in message.content_blocks]
    drops = api == "chat" or (api == "responses" and stream)  # it reads summaries alone
    check(server, messages[-1].text, "I must look." if drops else thoughts)


def loop(run: Callable[..., None], server: Server, **given: Any) -> None:
    RAN.clear()
    run(server, **given)


if __name__ == "__main__":
    features: dict[str, Callable[[Server], None]] = {}
    for way in ("", " streamed"):
        given: dict[str, Any] = {"stream": bool(way)}
        features[f"anthropic{way}"] = partial(loop, with_sdk, **given)
        for api in ("chat", "responses"):
            features[f"openai-agents, {api}{way}"] = partial(loop, with_agents, api=api, **given)
        for api in ("chat", "responses", "anthropic"):
            features[f"pydantic-ai, {api}{way}"] = partial(loop, with_pydantic_ai, api=api, **given)
            features[f"langchain, {api}{way}"] = partial(loop, with_langchain, api=api, **given)
    tell(features)
