"""Requests with tools, and how each dialect writes two calls."""

from __future__ import annotations

from typing import Any

from tests.chat_templates import ASKED, TOOLS

PATH = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "eyas-nano", "messages": [ASKED], "tools": TOOLS, "max_tokens": 400}
CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
SAYS = {
    "hermes": f'<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{{"name": "now"}}\n</tool_call>',
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "glm45": (
        "<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call>"
    ),
    "gpt_oss": (
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Köln"}<|call|><|start|>assistant<|channel|>commentary '
        "to=functions.now <|constrain|>json<|message|>{}<|call|>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Köln"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "llama3_json": '{"name": "weather", "parameters": {"city": "Köln"}}; {"name": "now", "parameters": {}}',
    "pythonic": '[weather(city="Köln"), now()]',
    "mistral": f'[TOOL_CALLS] [{CALL}, {{"name": "now", "arguments": {{}}}}]',
    "mistral_v11": '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}[TOOL_CALLS]now[CALL_ID]a[ARGS]{}',
    "deepseek_v3": (
        "</think>\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Köln"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v3_1": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Köln"}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
