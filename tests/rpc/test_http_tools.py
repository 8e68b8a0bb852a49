"""Tools and reasoning through /v1/chat/completions: what is asked, what comes back whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from http_client import client_of, events, refused
from openai import AsyncOpenAI
from tool_models import speaker, tokenizer_of

from eyas.common.config import GatewayConfig
from tests.chat_templates import ASKED, TOOLS, called, result
from tests.rpc.tool_requests import BODY, CALL, PATH, SAYS, allowed

SHOWN = {"messages": [{"role": "system", "content": "You may call weather and now."}, ASKED]}
"""Where a template does not show tools."""


async def ask(dialect: str, text: str, stride: int = 2, **more: Any) -> dict[str, Any]:
    """The choice of a whole answer; a streamed one must hold the same."""
    backend = speaker(dialect, text, stride)
    async with client_of(backend) as client:
        response = await client.post(PATH, json=BODY | more)
        assert response.status_code == 200, response.text
        asked = BODY | more | {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = events(await client.post(PATH, json=asked))
    choice: dict[str, Any] = response.json()["choices"][0]
    assert without_ids(joined(chunks)) == without_ids(choice)
    assert last["usage"]["completion_tokens_details"] == response.json()["usage"]["completion_tokens_details"]
    return choice | {"usage": response.json()["usage"]}


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole choice of a stream's chunks, put together as OpenAI's SDK does: texts are joined."""
    message: dict[str, Any] = {"role": None, "content": None, "refusal": None}
    finish, calls = None, list[dict[str, Any]]()
    for choice in (chunk["choices"][0] for chunk in chunks):
        assert finish is None
        finish, delta = choice["finish_reason"], choice["delta"]
        for name in ("role", "content", "reasoning_content"):
            if name in delta:
                message[name] = (message.get(name) or "") + delta[name]
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                assert (
                    set(part) == {"index", "id", "type", "function"} and part["function"]["arguments"] == ""
                )
                calls.append({"id": part["id"], "type": part["type"], "function": part["function"]})
            else:
                assert part["index"] == len(calls) - 1 and set(part) == {"index", "function"}
                assert set(part["function"]) == {"arguments"}
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None and "reasoning_content" not in message:
        message["content"] = ""
    return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """The choice with its calls' ids cut out: each answer has its own."""
    ids = [call.pop("id") for call in choice["message"].get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    assert all(len(id) in (9, 29) or id.startswith("functions.") for id in ids)
    return choice


def reasoning_tokens(choice: dict[str, Any]) -> int:
    return int(choice["usage"]["completion_tokens_details"]["reasoning_tokens"])


@pytest.mark.parametrize("dialect", SAYS)
@pytest.mark.parametrize("stride", [1, 3, 1000])
async def test_calls_come_back_as_calls(dialect: str, stride: int) -> None:
    choice = await ask(dialect, SAYS[dialect], stride)
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [function["name"] for function in functions] == ["weather", "now"]
    assert [json.loads(function["arguments"]) for function in functions] == [{"city": "Köln"}, {}]


async def test_calls_are_counted_where_the_model_counts_them() -> None:
    earlier = [ASKED, called(id="functions.weather:0"), result("functions.weather:0"), ASKED]
    for messages, first in (([ASKED], 0), (earlier, 1)):
        async with client_of(speaker("kimi_k2", SAYS["kimi_k2"])) as client:
            response = await client.post(PATH, json=BODY | {"messages": messages})
        calls = response.json()["choices"][0]["message"]["tool_calls"]
        assert [call["id"] for call in calls] == [f"functions.weather:{first}", f"functions.now:{first + 1}"]


@pytest.mark.parametrize("stride", [1, 7, 1000])
async def test_channels_are_read_without_tools_too(stride: int) -> None:
    text = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes, 1 < 2."
    for tools in ([], TOOLS):
        choice = await ask("gpt_oss", text, stride, tools=tools)
        assert (
            choice["message"]["reasoning_content"] == "Hm" and choice["message"]["content"] == "Yes, 1 < 2."
        )
        assert choice["finish_reason"] == "stop" and 0 < reasoning_tokens(choice) < 60


async def test_an_answer_without_calls_is_content() -> None:
    choice = await ask("hermes", "Just words.\n")
    assert choice["message"] == {"role": "assistant", "content": "Just words.\n", "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_reasoning_content_and_calls_come_in_this_order() -> None:
    text = f"<think>\nIs it far?\n</think>\n\nLet me look.\n{SAYS['hermes']}"
    choice = await ask("hermes", text, 1)
    message = choice["message"]
    assert message["reasoning_content"] == "Is it far?" and message["content"] == "Let me look."
    assert len(message["tool_calls"]) == 2
    for stride in (1, 2, 7, 1000):
        assert reasoning_tokens(await ask("hermes", text, stride)) == reasoning_tokens(choice)
    reasoned = tokenizer_of("hermes").encode("<think>\nIs it far?\n</think>", special=False)
    told = reasoning_tokens(choice)
    assert abs(told - len(reasoned)) <= 1  # a token may hold the last bracket and a line's end


async def test_the_prompt_says_whether_the_model_reasons() -> None:
    choice = await ask("deepseek_v3", "Hm.\n</think>\n\nYes.", tools=[])
    assert choice["message"]["reasoning_content"] == "Hm." and choice["message"]["content"] == "Yes."
    text = "1 < 2 </think> is no tag"
    off = await ask("hermes", text, enable_thinking=False, tools=[])
    assert off["message"]["content"] == text and "reasoning_content" not in off["message"]
    assert reasoning_tokens(off) == 0
    on = await ask("deepseek_v3_1", "Hm</think>Yes", chat_template_kwargs={"thinking": True}, tools=[])
    assert on["message"]["reasoning_content"] == "Hm" and on["message"]["content"] == "Yes"
    only = await ask("hermes", "<think>\nnever ends", tools=[])
    assert only["message"]["content"] is None and only["message"]["reasoning_content"] == "never ends"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, "tool_calls"),
        ({"tool_choice": "auto"}, "tool_calls"),
        ({"tool_choice": "required"}, "tool_calls"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "stop"),
        ({"max_tokens": 12}, "length"),
        ({"stop": ["Köln"]}, "stop"),
    ],
)
async def test_why_an_answer_ends(more: dict[str, Any], reason: str) -> None:
    choice = await ask("hermes", SAYS["hermes"], 1, **more)
    assert choice["finish_reason"] == reason
    if "stop" in more:  # nothing of what came before it is lost
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'


async def test_one_call_at_most() -> None:
    for more in (
        {"parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ):
        choice = await ask("hermes", SAYS["hermes"], **more)
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]


async def test_the_choice_none_shows_no_tools() -> None:
    backend = speaker("hermes", SAYS["hermes"])
    async with client_of(backend) as client:
        response = await client.post(PATH, json=BODY | {"tool_choice": "none"})
        plain = await client.post(PATH, json={k: v for k, v in BODY.items() if k != "tools"})
    message = response.json()["choices"][0]["message"]
    assert message["content"] == SAYS["hermes"] == plain.json()["choices"][0]["message"]["content"]
    assert backend.requests[0].prompt_ids == backend.requests[1].prompt_ids


async def test_tools_and_the_history_are_part_of_the_prompt() -> None:
    backend = speaker("hermes", "Clear.")
    history = [ASKED, called('{"city": "Köln"}', content=None, reasoning_content="Hm"), result()]
    async with client_of(backend) as client:
        await client.post(PATH, json=BODY | {"messages": history})
        told = await client.post("/tokenize", json={"messages": history, "tools": TOOLS})
    (request,) = backend.requests
    assert told.json()["tokens"] == list(request.prompt_ids)
    prompt = backend.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
    assert json.dumps(TOOLS[0]) in prompt or json.dumps(TOOLS[0], ensure_ascii=False) in prompt
    assert "<think>\nHm\n</think>" in prompt and '{"sky": "clear"}' in prompt


async def test_special_tokens_are_shown_to_the_parser_alone() -> None:
    backend = speaker("mistral", "a[TOOL_CALLS] [" + CALL + "]")
    async with client_of(backend) as client:
        plain = await client.post(PATH, json=BODY | {"tools": None})
        read = await client.post(PATH, json=BODY)
    assert plain.json()["choices"][0]["message"]["content"] == "a [" + CALL + "]"
    message = read.json()["choices"][0]["message"]
    assert message["content"] == "a" and len(message["tool_calls"][0]["id"]) == 9


def strict(properties: Any, definitions: Any) -> Any:
    schema = {"type": "object", "properties": properties, "$defs": definitions}
    return {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs tools"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "sing"}}},
        "tool_choice",
        "'sing', which is none of tools",
    ),
    ({"tool_choice": "sometimes"}, "tool_choice", "must be none, auto, required"),
    ({"tool_choice": {"type": "custom"}}, "tool_choice.type", "function"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "required"),
    ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools", "at least 1"),
    ({"tool_choice": allowed("never", "now")}, "tool_choice.allowed_tools.mode", "auto"),
    ({"tool_choice": allowed("auto", "now", "sing")}, "tool_choice", "'sing', which is none of tools"),
    ({"tools": None, "tool_choice": allowed("auto", "now")}, "tool_choice", "needs tools"),
    ({"tools": [{"type": 5}]}, "tools[0].type", "function"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "required"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
    ({"tools": [TOOLS[1], TOOLS[0], TOOLS[1]]}, "tools", "'now' twice"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools[0].function.parameters",
        "its type must be 'object'",
    ),
    (
        {"tools": [TOOLS[0], strict({"a": {"$ref": "#/$defs/a"}}, {"a": {"$ref": "#/$defs/a"}})]},
        "tools[1].function.parameters",
        "at #/properties/a/$ref: the references go round",
    ),
    ({"functions": [{"name": "f"}]}, "functions", "older name of tools"),
    ({"tools": None, "functions": [{"name": "a b"}]}, "functions[0].name", "pattern"),
    ({"tools": None, "functions": [{"name": "f"}] * 2}, "functions", "'f' twice"),
    (
        {"tools": None, "functions": [{"name": "f"}], "function_call": {"name": "g"}},
        "function_call",
        "'g', which is none of functions",
    ),
    ({"tools": None, "function_call": {"name": "g"}}, "function_call", "none of functions"),
    ({"function_call": "required"}, "function_call", "must be none, auto"),
    (
        {
            "tools": None,
            "functions": [strict({"a": {"$ref": "#/$defs/a"}}, {"a": {"$ref": "#/$defs/a"}})["function"]],
        },
        "functions[0].parameters",
        "the references go round",
    ),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name", "required"),
    ({"messages": [ASKED | {"function_call": {"name": "f"}}]}, "messages[0].function_call", "assistant"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "required"),
    (
        {"messages": [ASKED | {"tool_calls": [{"function": {"name": "f"}}]}]},
        "messages[0].tool_calls",
        "assistant",
    ),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "refusal": "No."}]}, "messages[0].content", "required"),
    ({"messages": [ASKED | {"refusal": "No."}]}, "messages[0].refusal", "assistant"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "refusal", "text": "No."}]}]},
        "messages[0].content[0].refusal",
        "required",
    ),
    ({"chat_template": "{{ x }}"}, "chat_template", "own template"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "own template"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "field of its own"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "knows no effort"),
    ({"documents": [{"text": "x"}]}, "documents", "reads no documents"),
]


@pytest.mark.parametrize(("more", "param", "reason"), REFUSED)
async def test_what_has_no_meaning_is_refused_by_name(more: dict[str, Any], param: str, reason: str) -> None:
    async with client_of(speaker("hermes", "Hi")) as client:
        assert reason in refused(await client.post(PATH, json=BODY | more), param)


async def test_a_model_without_calls_refuses_tools() -> None:
    async with client_of(speaker("plain", "Hi")) as client:
        assert "writes no calls" in refused(await client.post(PATH, json=BODY), "tools")
        refused(
            await client.post(PATH, json=BODY | {"tools": [], "enable_thinking": True}), "enable_thinking"
        )
        fine = await client.post(PATH, json=BODY | {"tools": [], "enable_thinking": False})
        assert fine.status_code == 200
    backend = speaker("plain", SAYS["llama3_json"])
    async with client_of(backend, GatewayConfig(tool_call_parser="llama3_json")) as client:
        message = (await client.post(PATH, json=BODY | SHOWN)).json()["choices"][0]["message"]
        assert len(message["tool_calls"]) == 2


async def test_tools_that_the_template_does_not_show_are_refused() -> None:
    """The question has the name of one by chance."""
    asked = {"messages": [{"role": "user", "content": "How is the weather now?"}]}
    async with client_of(speaker("silent", "Hi")) as client:
        reason = refused(await client.post(PATH, json=BODY | asked), "tools")
        assert "does not show 'weather' to the model (--chat-template gives another one)" in reason
        assert (await client.post(PATH, json=BODY | asked | {"tool_choice": "none"})).status_code == 200
        assert (await client.post(PATH, json=BODY | SHOWN)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "functions"),
    [
        (PATH, BODY, TOOLS),
        ("/v1/responses", {"model": "eyas-nano", "input": "Hi"}, [{"type": "function", "name": "now"}]),
    ],
)
async def test_tools_of_other_kinds_are_skipped_and_named(
    path: str, body: dict[str, Any], functions: list[dict[str, Any]]
) -> None:
    others = [{"type": "web_search", "user_location": None}, {"type": "custom", "name": "c"}]
    backend = speaker("hermes", "Hi")
    async with client_of(backend) as client:
        reply = await client.post(path, json=body | {"tools": [others[0], *functions, others[1]]})
        alone = await client.post(path, json=body | {"tools": [{"type": "local_shell"}]})
    assert (reply.status_code, alone.status_code) == (200, 200)
    ignored = f"tools[0]:web_search, tools[{len(functions) + 1}]:custom"
    assert reply.headers["x-eyas-ignored"] == ignored
    assert alone.headers["x-eyas-ignored"] == "tools[0]:local_shell"
    shown, none = (backend.tokenizer.decode(request.prompt_ids) for request in backend.requests)
    assert '"now"' in shown and "web_search" not in shown
    assert "now" not in none


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, "messages[0].content"),
        ({"chat_template_kwargs": {"a": [1, {"b": "\udfff"}]}}, "chat_template_kwargs.a[1].b"),
        ({"chat_template_kwargs": {"\udfff": 1}}, "chat_template_kwargs"),
        ({"stop": ["x", "\ud800\ud800"]}, "stop[1]"),
    ],
)
async def test_half_a_surrogate_pair_is_named(fields: dict[str, Any], param: str) -> None:
    headers = {"content-type": "application/json"}
    async with client_of(speaker("hermes", "Hi")) as client:
        whole = await client.post(PATH, content=json.dumps(BODY | {"stop": ["\U0001f426"]}), headers=headers)
        half = await client.post(PATH, content=json.dumps(BODY | fields), headers=headers)
    assert whole.status_code == 200
    assert "half of a surrogate pair" in refused(half, param)


async def test_a_prefill_may_be_parts() -> None:
    """Where the template joins them, and where it goes through them itself."""
    for dialect in ("hermes", "gemma"):
        parts = [{"type": "text", "text": "It is"}, {"type": "text", "text": "fine and"}]
        messages = [ASKED, {"role": "assistant", "content": parts}]
        backend = speaker(dialect, " warm")
        asked = {"model": "eyas-nano", "messages": messages, "continue_final_message": True}
        async with client_of(backend) as client:
            reply = await client.post(PATH, json=asked | {"add_generation_prompt": False})
        assert reply.status_code == 200, reply.text
        assert backend.tokenizer.decode(backend.requests[0].prompt_ids).endswith("fine and")


async def test_variables_reach_the_template() -> None:
    backend = speaker("effort", "Hi")
    async with client_of(backend) as client:
        await client.post(PATH, json=BODY | {"tools": None, "reasoning_effort": "high"})
    assert "Effort: high" in backend.tokenizer.decode(backend.requests[0].prompt_ids)
    backend = speaker("documents", "Hi")
    async with client_of(backend) as client:
        await client.post(PATH, json=BODY | {"tools": None, "documents": [{"title": "t", "text": "a\nb"}]})
    assert "1. T: a b" in backend.tokenizer.decode(backend.requests[0].prompt_ids)


def sdk(client: httpx.AsyncClient) -> AsyncOpenAI:
    return AsyncOpenAI(api_key="none", base_url="http://gateway/v1", http_client=client, max_retries=0)


async def test_the_sdk_reads_streamed_calls() -> None:
    async with client_of(speaker("hermes", f"<think>Hm</think>{SAYS['hermes']}", 1)) as client:
        asked: Any = BODY | {"tools": [TOOLS[0] | {"function": TOOLS[0]["function"] | {"strict": True}}]}
        async with sdk(client).chat.completions.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert [call.function.name for call in calls] == ["weather", "now"]
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.model_extra == {"reasoning_content": "Hm"}
