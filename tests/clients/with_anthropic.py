"""Anthropic's own SDK, and LangChain, LiteLLM and pydantic-ai by their packages for it."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
from told import MESSAGES, SCHEMA, WEATHER, Server, refused, tell

TOOL = {"name": WEATHER["name"], "description": WEATHER["description"], "input_schema": SCHEMA}
FORCED = {"type": "tool", "name": "weather"}


def client(server: Server, key: str = "") -> anthropic.Anthropic:
    return anthropic.Anthropic(
        api_key=key or server.key, base_url=server.url.removesuffix("/v1"), max_retries=0
    )


def ask(server: Server, key: str = "", **more: Any) -> Any:
    asked = {"model": server.model, "max_tokens": 200, "messages": MESSAGES} | more
    return client(server, key).messages.create(**asked)


def check_call(block: Any) -> None:
    assert block.name == "weather" and block.input["city"] in ("Lima", "Oslo"), block


def chat(server: Server) -> None:
    greedy = {"temperature": 0}  # a body's own field: newer releases have no parameter for it
    briefly = ask(server, system="Be brief.", extra_body=greedy)
    reply = ask(server, extra_body=greedy)
    assert briefly.usage.input_tokens > reply.usage.input_tokens
    assert reply.content[0].text and reply.usage.output_tokens > 0 and reply.stop_reason == "end_turn"


def stream(server: Server) -> None:
    with client(server).messages.stream(model=server.model, max_tokens=100, messages=MESSAGES) as events:
        text = "".join(events.text_stream)
        assert text and events.get_final_message().usage.output_tokens > 0


def tools_named(server: Server) -> None:
    reply = ask(server, tools=[TOOL], tool_choice=FORCED)
    assert reply.stop_reason == "tool_use"
    check_call(reply.content[-1])


def tools_required(server: Server) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    check_call(ask(server, tools=[TOOL], tool_choice=choice).content[-1])


def tools_streamed(server: Server) -> None:
    asked: Any = {"model": server.model, "max_tokens": 200, "messages": MESSAGES}
    with client(server).messages.stream(**asked, tools=[TOOL], tool_choice=FORCED) as events:
        check_call(events.get_final_message().content[-1])


def tool_round_trip(server: Server) -> None:
    """The call, its result, and what the model says then."""
    first = ask(server, tools=[TOOL], tool_choice=FORCED)
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "sunny"}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    assert ask(server, tools=[TOOL], messages=turns).content


def structured_output(server: Server) -> None:
    reply = ask(server, extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}})
    assert '"city"' in reply.content[0].text


def counting(server: Server) -> None:
    counted = client(server).messages.count_tokens(model=server.model, messages=MESSAGES)
    assert counted.input_tokens == ask(server, max_tokens=1).usage.input_tokens or counted.input_tokens > 0


def langchain(server: Server) -> None:
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(
        model=server.model, api_key=server.key, base_url=server.url.removesuffix("/v1"), max_tokens=200
    )
    assert model.invoke("Hi").content and list(model.stream("Hi"))
    (call,) = model.bind_tools([TOOL], tool_choice="weather").invoke("Lima?").tool_calls
    assert call["args"]["city"] in ("Lima", "Oslo")


def litellm(server: Server) -> None:
    import litellm

    base = server.url.removesuffix("/v1")
    asked: Any = {"model": f"anthropic/{server.model}", "api_base": base, "api_key": server.key}
    assert litellm.completion(**asked, messages=MESSAGES, max_tokens=50).choices[0].message.content


def pydantic_ai(server: Server) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    base = anthropic.AsyncAnthropic(api_key=server.key, base_url=server.url.removesuffix("/v1"))
    agent = Agent(AnthropicModel(server.model, provider=AnthropicProvider(anthropic_client=base)))
    assert asyncio.run(agent.run("Hi")).output


def errors(server: Server) -> None:
    refused(lambda: ask(server, key="wrong"), anthropic.AuthenticationError)
    refused(lambda: ask(server, model="other"), anthropic.NotFoundError)
    wrong = refused(lambda: ask(server, extra_body={"temperature": 9}), anthropic.BadRequestError)
    assert "temperature" in str(wrong)
    refused(lambda: [ask(server, server.poor, max_tokens=1) for _ in range(2)], anthropic.RateLimitError)


if __name__ == "__main__":
    tell(
        {
            "chat": chat,
            "stream": stream,
            "tools required": tools_required,
            "tools named": tools_named,
            "tools streamed": tools_streamed,
            "tool round trip": tool_round_trip,
            "structured output": structured_output,
            "counting": counting,
            "langchain-anthropic": langchain,
            "litellm": litellm,
            "pydantic-ai": pydantic_ai,
            "401, 404, 400, 429": errors,
        }
    )
