"""LiteLLM, as a library."""

from __future__ import annotations

from typing import Any

import litellm
from told import MESSAGES, SCHEMA, TOOL, Server, check_arguments, refused, tell

FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}


def given(server: Server, key: str = "", model: str = "") -> dict[str, Any]:
    name = f"openai/{model or server.model}"
    return {"model": name, "api_base": server.url, "api_key": key or server.key, "num_retries": 0}


def ask(server: Server, key: str = "", model: str = "", **more: Any) -> Any:
    asked = {"messages": MESSAGES, "max_tokens": 300} | more
    return litellm.completion(**given(server, key, model), **asked)


def chat(server: Server) -> None:
    reply = ask(server)
    assert reply.choices[0].message.content and reply.usage.completion_tokens


def stream(server: Server) -> None:
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(server, stream=True))


def usage_in_stream(server: Server) -> None:
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens > 0
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content


def call(reply: Any) -> None:
    check_arguments(reply.choices[0].message.tool_calls[0].function.arguments)


def tools_required(server: Server) -> None:
    call(ask(server, tools=[TOOL], tool_choice="required"))


def tools_named(server: Server) -> None:
    call(ask(server, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}}))


def tools_streamed(server: Server) -> None:
    chunks = list(ask(server, tools=[TOOL], tool_choice="required", stream=True))
    call(litellm.stream_chunk_builder(chunks))


def structured_output(server: Server) -> None:
    check_arguments(ask(server, response_format=FORMAT).choices[0].message.content)


def log_probabilities(server: Server) -> None:
    assert ask(server, logprobs=True, top_logprobs=2).choices[0].logprobs.content[0].top_logprobs


def completions(server: Server) -> None:
    asked = given(server)
    asked["model"] = f"text-completion-openai/{server.model}"
    assert litellm.text_completion(**asked, prompt="a", max_tokens=5).choices[0].text


def responses(server: Server) -> None:
    reply = litellm.responses(**given(server), input="Hi", max_output_tokens=20)
    assert reply.output[0].content[0].text
    kinds = [
        event.type
        for event in litellm.responses(**given(server), input="Hi", max_output_tokens=9, stream=True)
    ]
    assert str(kinds[-1].value) == "response.completed", kinds


def embeddings_are_refused(server: Server) -> None:
    refused(lambda: litellm.embedding(**given(server), input=["x"]), litellm.BadRequestError)


def error_401(server: Server) -> None:
    refused(lambda: ask(server, key="wrong"), litellm.AuthenticationError)


def error_404(server: Server) -> None:
    refused(lambda: ask(server, model="other"), litellm.NotFoundError)


def error_400(server: Server) -> None:
    assert "temperature" in str(refused(lambda: ask(server, temperature=9), litellm.BadRequestError))


def error_429(server: Server) -> None:
    refused(lambda: [ask(server, server.poor, max_tokens=1) for _ in range(2)], litellm.RateLimitError)


if __name__ == "__main__":
    tell(
        {
            "chat": chat,
            "stream": stream,
            "usage in streams": usage_in_stream,
            "completions": completions,
            "logprobs": log_probabilities,
            "tools required": tools_required,
            "tools named": tools_named,
            "tools streamed": tools_streamed,
            "structured output": structured_output,
            "responses": responses,
            "embeddings refused": embeddings_are_refused,
            "401": error_401,
            "404": error_404,
            "400 names the field": error_400,
            "429": error_429,
        }
    )
