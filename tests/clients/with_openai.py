"""OpenAI's own SDK: every feature, and every wire shape against its types, strictly."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import openai
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel
from strictness import strictly
from told import CALL, MESSAGES, SCHEMA, TOOL, WEATHER, Server, check_arguments, refused, tell

FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
FLAT = {"type": "function", **WEATHER, "strict": True}


class Weather(BaseModel):
    city: Literal["Lima", "Oslo"]
    sunny: bool


def client(server: Server, key: str = "") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key=key or server.key, max_retries=0, timeout=120)


def ask(server: Server, **more: Any) -> Any:
    given = {"model": server.model, "messages": MESSAGES, "max_tokens": 300, "seed": 1} | more
    return client(server).chat.completions.create(**given)


def respond(server: Server, **more: Any) -> Any:
    given = {"model": server.model, "input": "Hi", "max_output_tokens": 300} | more
    return client(server).responses.create(**given)


# --- chats -------------------------------------------------------------------------------------------------


def chat(server: Server) -> None:
    reply = ask(server, n=2, stop=["###"])
    assert len(reply.choices) == 2 and reply.choices[0].message.content
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def stream(server: Server) -> None:
    chunks = list(ask(server, stream=True, temperature=0))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == ask(server, temperature=0).choices[0].message.content
    assert chunks[-1].choices[0].finish_reason and not any(chunk.usage for chunk in chunks)


def usage_in_stream(server: Server) -> None:
    *chunks, last = ask(server, stream=True, stream_options={"include_usage": True})
    assert not last.choices and last.usage.completion_tokens > 0 and not any(one.usage for one in chunks)


def stream_helper(server: Server) -> None:
    with client(server).chat.completions.stream(
        model=server.model, messages=MESSAGES, max_tokens=40
    ) as events:
        kinds = [event.type for event in events]
        assert events.get_final_completion().choices[0].message.content
    assert "content.delta" in kinds and "content.done" in kinds


def completions(server: Server) -> None:
    reply = client(server).completions.create(model=server.model, prompt=["a", "b"], max_tokens=5, logprobs=2)
    assert len(reply.choices) == 2 and reply.choices[1].logprobs
    echoed = client(server).completions.create(model=server.model, prompt="a b", max_tokens=0, echo=True)
    assert echoed.choices[0].text == "a b"


def log_probabilities(server: Server) -> None:
    scores = ask(server, logprobs=True, top_logprobs=3, max_tokens=5).choices[0].logprobs.content
    assert len(scores) == 5 and all(len(one.top_logprobs) == 3 and one.logprob <= 0 for one in scores)


# --- tools and formats -------------------------------------------------------------------------------------


def call_of(reply: Any) -> Any:
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "weather" and call.id
    check_arguments(call.function.arguments)
    return call


def tools_required(server: Server) -> None:
    call_of(ask(server, tools=[TOOL], tool_choice="required", parallel_tool_calls=False))


def tools_named(server: Server) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    reply = ask(server, tools=[TOOL], tool_choice=named)
    call_of(reply)
    assert reply.choices[0].finish_reason == "stop"


def tools_auto(server: Server) -> None:
    strict = {"type": "function", "function": WEATHER | {"strict": True}}
    reply = ask(server, tools=[strict], extra_body={"regex": CALL})
    call = call_of(reply)
    assert reply.choices[0].finish_reason == "tool_calls"
    said = reply.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    assert ask(server, messages=[*MESSAGES, said, result], tools=[TOOL]).choices[0].finish_reason


def tools_none(server: Server) -> None:
    assert ask(server, tools=[TOOL], tool_choice="none").choices[0].message.content


def tools_streamed(server: Server) -> None:
    with client(server).chat.completions.stream(
        model=server.model, messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=300
    ) as events:
        for _ in events:
            pass
        call_of_stream = events.get_final_completion().choices[0].message.tool_calls
    assert call_of_stream
    check_arguments(call_of_stream[0].function.arguments)


def structured_output(server: Server) -> None:
    check_arguments(ask(server, response_format=FORMAT).choices[0].message.content)
    parsed = client(server).chat.completions.parse(
        model=server.model, messages=MESSAGES, response_format=Weather, max_tokens=200
    )
    assert parsed.choices[0].message.parsed


def json_object(server: Server) -> None:
    assert ask(server, response_format={"type": "json_object"}).choices[0].message.content.startswith("{")


# --- other routes ------------------------------------------------------------------------------------------


def models(server: Server) -> None:
    assert [model.id for model in client(server).models.list()] == [server.model]
    assert client(server).models.retrieve(server.model).id == server.model


def embeddings_are_refused(server: Server) -> None:
    error = refused(
        lambda: client(server).embeddings.create(model=server.model, input="x"), openai.BadRequestError
    )
    assert error.param == "model" and error.type == "invalid_request_error"


def responses(server: Server) -> None:
    assert respond(server, instructions="Be brief.").output_text
    check_arguments(
        respond(server, text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}).output_text
    )
    call = next(
        item
        for item in respond(server, tools=[FLAT], tool_choice="required").output
        if item.type == "function_call"
    )
    check_arguments(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    history = [{"role": "user", "content": "Hi"}, call.model_dump(exclude_none=True), result]
    assert respond(server, input=history, tools=[FLAT]).status in ("completed", "incomplete")
    assert (
        client(server)
        .responses.parse(model=server.model, input="Hi", text_format=Weather, max_output_tokens=200)
        .output_parsed
    )


def responses_streamed(server: Server) -> None:
    with client(server).responses.stream(
        model=server.model, input="Hi", max_output_tokens=300, tools=[FLAT], tool_choice="required"
    ) as events:
        kinds = {event.type for event in events}
        final = events.get_final_response()
    assert "response.function_call_arguments.delta" in kinds and final.usage


# --- errors ------------------------------------------------------------------------------------------------


def error_401(server: Server) -> None:
    error = refused(lambda: client(server, "wrong").models.list(), openai.AuthenticationError)
    assert error.code == "invalid_api_key", error.code


def error_404(server: Server) -> None:
    error = refused(lambda: ask(server, model="other"), openai.NotFoundError)
    assert error.code == "model_not_found" and error.param == "model"
    refused(lambda: client(server).models.retrieve("other"), openai.NotFoundError)
    refused(lambda: client(server).files.list(), openai.NotFoundError)


def error_400(server: Server) -> None:
    assert refused(lambda: ask(server, temperature=9), openai.BadRequestError).param == "temperature"
    bad = [{"role": "user", "content": 5}]
    assert refused(lambda: ask(server, messages=bad), openai.BadRequestError).param == "messages[0].content"
    far = refused(lambda: ask(server, max_tokens=10**6), openai.BadRequestError)
    assert far.code == "context_length_exceeded" or far.param == "max_tokens"
    assert refused(lambda: respond(server, temperature=9), openai.BadRequestError).param == "temperature"


def error_429(server: Server) -> None:
    poor = client(server, server.poor)
    given: Any = {"model": server.model, "prompt": "a", "max_tokens": 1}
    error = refused(lambda: [poor.completions.create(**given) for _ in range(2)], openai.RateLimitError)
    assert error.code == "rate_limit_exceeded" and int(error.response.headers["retry-after"]) > 0


# --- shapes ------------------------------------------------------------------------------------------------


def raw(server: Server, path: str, **body: Any) -> Any:
    given = {"model": server.model, **body}
    return client(server).post(path, body=given, cast_to=object)


def raw_events(server: Server, path: str, **body: Any) -> list[Any]:
    given = {"model": server.model, "stream": True, **body}
    headers = {"authorization": f"Bearer {server.key}"}
    with httpx.stream("POST", f"{server.url}{path}", json=given, headers=headers, timeout=120) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def strict_types(server: Server) -> None:
    tools = {"tools": [TOOL], "tool_choice": "required"}
    chats: list[dict[str, Any]] = [{}, {"logprobs": True, "top_logprobs": 2}, tools, {"n": 2}]
    for more in chats:
        given = {"messages": MESSAGES, "max_tokens": 300} | more
        strictly(ChatCompletion, raw(server, "/chat/completions", **given))
        for event in raw_events(server, "/chat/completions", stream_options={"include_usage": True}, **given):
            strictly(ChatCompletionChunk, event)
    strictly(Completion, raw(server, "/completions", prompt="a", max_tokens=3, logprobs=1))
    # Events of /completions are left out: finish_reason is null until the last one, as OpenAI's own is, and
    # the SDK's type does not say so.
    flat = {"tools": [FLAT], "tool_choice": "required"}
    for more in ({}, {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}, flat):
        given = {"input": "Hi", "max_output_tokens": 300} | more
        strictly(Response, raw(server, "/responses", **given))
        for event in raw_events(server, "/responses", **given):
            strictly(ResponseStreamEvent, event)
    strictly(Model, client(server).get("/models", cast_to=object)["data"][0])  # type: ignore[index]


if __name__ == "__main__":
    tell(
        {
            "chat": chat,
            "stream": stream,
            "usage in streams": usage_in_stream,
            "stream helper": stream_helper,
            "completions": completions,
            "logprobs": log_probabilities,
            "tools required": tools_required,
            "tools named": tools_named,
            "tools auto": tools_auto,
            "tools none": tools_none,
            "tools streamed": tools_streamed,
            "structured output": structured_output,
            "JSON object": json_object,
            "models": models,
            "embeddings refused": embeddings_are_refused,
            "responses": responses,
            "responses streamed": responses_streamed,
            "401": error_401,
            "404": error_404,
            "400 names the field": error_400,
            "429": error_429,
            "strict types": strict_types,
        }
    )
