"""LangChain, by its package for OpenAI."""

from __future__ import annotations

from typing import Any

import openai
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from told import SCHEMA, TOOL, WEATHER, Server, refused, tell

QUESTION = "What is the capital of France?"


def model(server: Server, **more: Any) -> ChatOpenAI:
    asked: dict[str, Any] = {"model": server.model, "base_url": server.url, "api_key": server.key}
    return ChatOpenAI(**(asked | {"max_tokens": 300, "max_retries": 0} | more))


def chat(server: Server) -> None:
    reply = model(server).invoke(QUESTION)
    assert reply.content and reply.usage_metadata["output_tokens"] > 0


def stream(server: Server) -> None:
    assert "".join(str(chunk.content) for chunk in model(server).stream(QUESTION))


def usage_in_stream(server: Server) -> None:
    chunks = list(model(server, stream_usage=True).stream(QUESTION))
    assert any(chunk.usage_metadata for chunk in chunks)


def call(message: Any) -> None:
    (one,) = message.tool_calls
    assert one["name"] == "weather" and one["args"]["city"] in ("Lima", "Oslo")


def tools_required(server: Server) -> None:
    call(model(server).bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False).invoke(QUESTION))


def tools_named(server: Server) -> None:
    call(model(server).bind_tools([TOOL], tool_choice="weather").invoke(QUESTION))


def tools_streamed(server: Server) -> None:
    total: Any = None
    for chunk in model(server).bind_tools([TOOL], tool_choice="weather").stream(QUESTION):
        total = chunk if total is None else total + chunk
    call(total)


def structured_output(server: Server) -> None:
    schema = SCHEMA | {"title": "weather"}
    for method in ("json_schema", "function_calling"):
        found = model(server).with_structured_output(schema, method=method).invoke(QUESTION)
        assert found["city"] in ("Lima", "Oslo"), method


def log_probabilities(server: Server) -> None:
    assert (
        model(server, logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    )


def completions(server: Server) -> None:
    text = OpenAI(model=server.model, base_url=server.url, api_key=server.key, max_tokens=9)
    assert text.invoke("Once") and "".join(text.stream("Once"))


def responses(server: Server) -> None:
    newer = model(server, use_responses_api=True)
    assert newer.invoke(QUESTION).content and list(newer.stream(QUESTION))
    call(newer.bind_tools([WEATHER], tool_choice="weather").invoke(QUESTION))


def embeddings_are_refused(server: Server) -> None:
    asked = OpenAIEmbeddings(
        model=server.model, base_url=server.url, api_key=server.key, check_embedding_ctx_length=False
    )
    refused(lambda: asked.embed_query("x"), openai.BadRequestError)


def error_401(server: Server) -> None:
    refused(lambda: model(server, api_key="wrong").invoke(QUESTION), openai.AuthenticationError)


def error_404(server: Server) -> None:
    refused(lambda: model(server, model="other").invoke(QUESTION), openai.NotFoundError)


def error_400(server: Server) -> None:
    wrong = refused(lambda: model(server, temperature=9).invoke(QUESTION), openai.BadRequestError)
    assert wrong.param == "temperature"


def error_429(server: Server) -> None:
    poor = model(server, api_key=server.poor, max_tokens=1)
    refused(lambda: [poor.invoke(QUESTION) for _ in range(2)], openai.RateLimitError)


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
