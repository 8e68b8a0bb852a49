"""Chat templates in the manner of well-known families of models, and chats to render with them."""

from __future__ import annotations

import json
from typing import Any

from tests.list_templates import SPEAKS
from tests.newer_templates import GLM45, GPT_OSS, KIMI_K2

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
    {{- 'Tools, one per line in <tools></tools>:\n<tools>' }}
    {%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\n</tools>\nCall one so:\n<tool_call>\n{"name": <its-name>, "arguments": <an-object>}\n</tool_call>' }}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.reasoning_content is string and (loop.last or loop.nextitem.role == 'tool') %}
            {{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content.split('</think>')[-1].lstrip('\n') }}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{ '\n' }}{% endif %}
            {%- set function = call.function if call.function else call %}
            {{- '<tool_call>\n{"name": "' }}{{ function.name }}{{ '", "arguments": ' }}
            {%- if function.arguments is string %}
                {{- function.arguments }}
            {%- else %}
                {{- function.arguments | tojson }}
            {%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""
QWEN3_CODER = """
{%- macro listed(items, tag) -%}
    {%- if items is sequence %}
        {%- for item in items %}{{ '\n<' ~ tag ~ '>' ~ item ~ '</' ~ tag ~ '>' }}{% endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\n<tools>' }}
    {%- for tool in tools %}
        {%- set tool = tool.function if tool.function is defined else tool %}
        {{- '\n<function>\n<name>' ~ tool.name ~ '</name>' }}
        {%- for name, field in (tool.parameters | default({'properties': {}})).properties | items %}
            {{- '\n<parameter>' ~ name ~ ' ' ~ field.type }}{{ listed(field.enum, 'enum') }}</parameter>
        {%- endfor %}
        {{- '\n</function>' }}
    {%- endfor %}
    {{- '\n</tools>\n<tool_call>\n<function=some_function>\n<parameter=one>\nvalue\n</parameter>\n' }}
    {{- '</function>\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls is defined and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content is string and message.content | trim %}{{ '\n' + message.content | trim }}{% endif %}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<parameter=' + name + '>\n' }}
                {%- set is_json = value is mapping or (value is sequence and value is not string) %}
                {{- value | tojson | safe if is_json else value | string }}
                {{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
LLAMA3 = """
{{- bos_token }}
{%- set date = date_string if date_string is defined else strftime_now('%d %b %Y') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools is not none %}{{ 'Environment: ipython\n' }}{% endif %}
{{- 'Today: ' + date + '\n\n' + system + '<|eot_id|>' }}
{%- if tools is not none %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nCall one of these functions:\n\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}
    {{- messages[0]['content'] | trim + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('this model makes one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{ '}<|eot_id|>' }}
    {%- elif message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {{- (message.content | tojson if message.content is mapping else message.content) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""
PYTHONIC = """
{{- bos_token }}
{%- if tools %}
    {{- '<|system|>Answer with [name(argument=value)] to call one of:\n' }}
    {%- for tool in tools %}{{ tool.function | tojson }}{{ '\n' }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- elif message.content %}
        {%- for part in message['content'] %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
    {%- endif %}
    {%- if message.tool_calls %}
        {{- '[' }}
        {%- for call in message.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- name + '=' + (value | tojson) }}{{ ', ' if not loop.last }}
            {%- endfor %}
            {{- ')' }}{{ ', ' if not loop.last }}
        {%- endfor %}
        {{- ']' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
MISTRAL = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and loop.index0 == ns.last %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}{{ tool | tojson }}{{ ', ' if not loop.last }}{% endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message['content'] + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception('ids of calls have 9 characters') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message['content'] | string + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
MISTRAL_V11 = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.first %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}
            {{- call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
DEEPSEEK_V3 = """
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_tool=false, system='') %}
{%- for message in messages %}{% if message['role'] == 'system' %}{% set ns.system = message['content'] %}{% endif %}{% endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% endif %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
        {%- for call in message['tool_calls'] %}
            {{- '\n' if not loop.first }}{{ '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' }}
            {{- call['function']['name'] + '\n```json\n' + call['function']['arguments'] + '\n```' }}
            {{- '<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'].split('</think>')[-1] %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}
"""
DEEPSEEK_V3_1 = """
{{- bos_token }}
{%- if tools %}{% for tool in tools %}{{ '### ' + tool.function.name + '\n' }}{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<｜User｜>' + message.content + '<｜Assistant｜>' }}{% endif %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '</think>' + (message.content or '') + '<｜tool▁calls▁begin｜>' }}
        {%- for call in message.tool_calls %}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}
            {{- '<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'assistant' %}{{ '</think>' + message.content + '<｜end▁of▁sentence｜>' }}{% endif %}
    {%- if message.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<think>' if thinking is defined and thinking else '</think>' }}{% endif %}
"""
GEMMA = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('there is no role system') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""
DOCUMENTS = """
{%- for document in documents or [] %}
{{ loop.index }}. {{ document.title | default('untitled') | upper }}: {{ document['text'] | replace('\n', ' ') }}
{% endfor -%}
{%- for message in messages if message.content %}
{{ message.role | capitalize }}: {% generation %}{{ message.content }}{% endgeneration %}

{% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}Assistant:{% endif %}
"""
EFFORT = """
{%- set effort = reasoning_effort | default('medium') -%}
{%- macro parts(content) -%}
    {%- if content is string %}{{ content }}
    {%- elif content is iterable %}{% for part in content %}{{ part.text }}{% if not loop.last %}|{% endif %}{% endfor %}{% endif -%}
{%- endmacro -%}
<|start|>system<|message|>Effort: {{ effort }}. {{ '%d tools' | format((tools or []) | length) }}<|end|>
{%- for message in messages %}
    {%- if message.thinking and loop.last %}{{ '<|channel|>analysis<|message|>' ~ message.thinking ~ '<|end|>' }}{% endif %}
    {{- '<|start|>' ~ message.role ~ '<|message|>' ~ parts(message.content) ~ '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}
"""
TEMPLATES = {
    "plain": PLAIN,
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "llama3_json": LLAMA3,
    "pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "mistral_v11": MISTRAL_V11,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3_1": DEEPSEEK_V3_1,
    "glm45": GLM45,
    "kimi_k2": KIMI_K2,
    "gpt_oss": GPT_OSS,
    "gemma": GEMMA,
    "documents": DOCUMENTS,
    "effort": EFFORT,
    **SPEAKS,
}

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What the sky does at <a place> & when.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "enum": [1, 3]}},
            "required": ["city"],
        },
    },
}
TOOLS = [WEATHER, {"type": "function", "function": {"name": "now", "description": "The time."}}]
ASKED = {"role": "user", "content": "Wie ist das Wetter in Köln?"}


def called(arguments: Any = None, id: str = "abc123XYZ", **more: Any) -> dict[str, Any]:
    """An assistant's message that calls `weather`."""
    given = {"city": "Köln"} if arguments is None else arguments
    call = {"id": id, "type": "function", "function": {"name": "weather", "arguments": given}}
    return {"role": "assistant", "tool_calls": [call], **more}


def result(id: str = "abc123XYZ") -> dict[str, Any]:
    """The result of that call."""
    return {"role": "tool", "tool_call_id": id, "content": json.dumps({"sky": "clear"})}
