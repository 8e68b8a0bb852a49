"""What real clients send, in the shapes they send it, is answered unchanged: a line for each client.

`ignored` are the fields that the header names, because nothing here reads them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import openai
import pytest
from http_client import client_of, events
from scripted_backend import ScriptedBackend, nano_tokenizer

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MODEL = {"model": "eyas-nano"}
USER = [{"role": "user", "content": "Hi"}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


class Payload(NamedTuple):
    client: str
    path: str
    body: dict[str, Any]
    ignored: tuple[str, ...] = ()


PAYLOADS = [
    Payload("openai: chat", CHAT, {"messages": USER, "max_completion_tokens": 8, "n": 1, **MODEL}),
    Payload(
        "openai: a history of dumped messages",
        CHAT,
        {
            "messages": [
                *USER,
                {
                    "content": "Hello.",
                    "refusal": None,
                    "role": "assistant",
                    "annotations": [],
                    "audio": None,
                    "function_call": None,
                    "tool_calls": None,
                },
                {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
            ],
            **MODEL,
        },
    ),
    Payload("openai: completions", TEXT, {"prompt": "Hi", "max_tokens": 8, "echo": False, **MODEL}),
    Payload(
        "LiteLLM",
        CHAT,
        {
            "messages": USER,
            "temperature": 0.2,
            "user": "u-1",
            "metadata": {"team": "a"},
            "tools": [],
            **MODEL,
        },
        ("metadata", "user"),
    ),
    Payload("LangChain: ChatOpenAI", CHAT, {"messages": USER, "temperature": 0.7, "n": 1, **USAGE, **MODEL}),
    Payload(
        "LangChain: OpenAI",
        TEXT,
        {
            "prompt": ["Hi"],
            "temperature": 0.7,
            "max_tokens": 16,
            "top_p": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "n": 1,
            "logit_bias": {},
            "logprobs": None,
            "seed": None,
            "best_of": 1,
            **MODEL,
        },
    ),
    Payload("llm", CHAT, {"messages": [{"role": "system", "content": "Be brief."}, *USER], **USAGE, **MODEL}),
    Payload(
        "aiperf: chat",
        CHAT,
        {
            "messages": [{"role": "user", "name": "", "content": "Hi"}],
            "max_completion_tokens": 8,
            "min_tokens": 8,
            "ignore_eos": True,
            **USAGE,
            **MODEL,
        },
    ),
    Payload(
        "genai-perf: completions",
        TEXT,
        {"prompt": ["Hi"], "max_tokens": 8, "min_tokens": 8, "ignore_eos": True, **USAGE, **MODEL},
    ),
    Payload(
        "vLLM bench serve: completions",
        TEXT,
        {
            "prompt": "Hi",
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": 8,
            "logprobs": None,
            "ignore_eos": True,
            **USAGE,
            **MODEL,
        },
    ),
    Payload(
        "vLLM bench serve: completions with log-probabilities",
        TEXT,
        {
            "prompt": "Hi",
            "repetition_penalty": 1.0,
            "max_tokens": 8,
            "logprobs": 2,
            "ignore_eos": True,
            "frequency_penalty": 0.5,
            "presence_penalty": 0.5,
            **USAGE,
            **MODEL,
        },
    ),
    Payload(
        "vLLM benchmark_serving, older: completions",
        TEXT,
        {
            "prompt": "Hi",
            "temperature": 0.0,
            "best_of": 1,
            "use_beam_search": False,
            "max_tokens": 8,
            "stream": True,
            **MODEL,
        },
    ),
    Payload(
        "vLLM bench serve: chat",
        CHAT,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            "temperature": 0.0,
            "max_completion_tokens": 8,
            "ignore_eos": True,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            **USAGE,
            **MODEL,
        },
    ),
    Payload(
        "SGLang bench_serving: sglang",
        GENERATE,
        {
            "text": "Hi",
            "sampling_params": GREEDY,
            "stream": True,
            "lora_path": "",
            "return_logprob": False,
            "return_routed_experts": False,
            "logprob_start_len": -1,
        },
    ),
    Payload(
        "SGLang bench_serving: sglang with ids and log-probabilities",
        GENERATE,
        {
            "input_ids": [5, 6, 7],
            "sampling_params": GREEDY,
            "stream": True,
            "lora_path": None,
            "return_logprob": True,
            "return_routed_experts": False,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
        },
    ),
    Payload(
        "SGLang bench_serving: sglang-oai",
        TEXT,
        {
            "prompt": "Hi",
            "temperature": 0.0,
            "best_of": 1,
            "max_tokens": 8,
            "stream": True,
            "ignore_eos": True,
            **MODEL,
        },
    ),
    Payload(
        "SGLang bench_serving: sglang-oai-chat",
        CHAT,
        {
            "messages": USER,
            "temperature": 0.0,
            "max_completion_tokens": 8,
            "stream": True,
            "ignore_eos": True,
            **MODEL,
        },
    ),
    Payload(
        "SGLang's own language: RuntimeEndpoint",
        GENERATE,
        {
            "text": "Hi",
            "sampling_params": {
                "max_new_tokens": 8,
                "min_new_tokens": 0,
                "stop": (),
                "stop_token_ids": (),
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "ignore_eos": False,
                "regex": None,
                "json_schema": None,
                "skip_special_tokens": True,
                "spaces_between_special_tokens": True,
            },
            "return_logprob": None,
            "logprob_start_len": None,
            "top_logprobs_num": None,
            "return_text_in_logprobs": None,
        },
    ),
    Payload(
        "lm-eval: local-chat-completions",
        CHAT,
        {
            "messages": [{"role": "user", "content": "Hi", "type": "text"}],
            "max_tokens": 8,
            "temperature": 0,
            "stop": [],
            "seed": 1234,
            **MODEL,
        },
        ("messages[0].type",),
    ),
]


@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda payload: payload.client)
async def test_a_client_is_answered(payload: Payload) -> None:
    async with client_of(ScriptedBackend(nano_tokenizer())) as client:
        response = await client.post(payload.path, json=payload.body)
        assert response.status_code == 200, response.text
        if payload.body.get("stream"):
            told = events(response)
            assert ("usage" in told[-1]) == ("stream_options" in payload.body)
        named = response.headers.get("x-eyas-ignored", "")
        assert tuple(sorted(filter(None, named.split(", ")))) == payload.ignored


async def test_openais_client_reads_what_it_gets() -> None:
    """Its own types for the extensions: they come with the answer and no field is lost."""
    backend = ScriptedBackend(nano_tokenizer())
    async with client_of(backend) as http:
        client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="unused", http_client=http)
        answer = await client.chat.completions.create(
            model="eyas-nano",
            messages=[{"role": "user", "content": "Hi"}],
            extra_body={"return_token_ids": True, "request_id": "r-1", "top_k": -1},
        )
        assert answer.id == "chatcmpl-r-1" and answer.choices[0].message.content == "Hello, world!"
        assert answer.model_extra and answer.model_extra["prompt_token_ids"]
        again = await client.chat.completions.create(
            model="eyas-nano",
            messages=[
                {"role": "user", "content": "Hi"},
                answer.choices[0].message.model_dump(),  # type: ignore[list-item]
                {"role": "user", "content": "And now?"},
            ],
        )
        assert again.choices[0].finish_reason == "stop"
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.chat.completions.create(
                model="eyas-nano",
                messages=[{"role": "user", "content": "Hi"}],
                temperature=9,
            )
        assert refusal.value.param == "temperature"
