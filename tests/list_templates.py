"""Chat templates in the manner of MiniMax-M2, Gemma 3 and 4, Functionary, Command R, Granite, LFM2, Phi-4,
SmolLM3 and Llama 4: how they write calls is as published.
"""

MINIMAX_M2 = """
{{- ']~!b[]~b]system\\n' }}
{%- for tool in tools or [] %}{{ '<tool>' + (tool.function | tojson) + '</tool>\\n' }}{% endfor %}
{%- if tools %}{{ 'Call:\\n<minimax:tool_call>\\n<invoke name="tool">\\n</invoke>\\n</minimax:tool_call>' }}{% endif %}
{{- '[e~[\\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- ']~b]ai\\n' + (message.content or '') }}
        {%- if message.tool_calls %}
            {{- '\\n<minimax:tool_call>\\n' }}
            {%- for call in message.tool_calls %}
                {{- '<invoke name="' + call.function.name + '">\\n' }}
                {%- for name, value in call.function.arguments | items %}
                    {{- '<parameter name="' + name + '">' }}
                    {{- value if value is string else value | tojson }}{{ '</parameter>\\n' }}
                {%- endfor %}
                {{- '</invoke>\\n' }}
            {%- endfor %}
            {{- '</minimax:tool_call>' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}{{ ']~b]tool\\n<response>' + message.content + '</response>' }}
    {%- else %}{{ ']~b]' + message.role + '\\n' + message.content }}{% endif %}
    {{- '[e~[\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}
"""
GEMMA4 = """
{%- macro written(value) -%}
    {%- if value is string %}{{ '<|"|>' + value + '<|"|>' }}
    {%- elif value is boolean %}{{ 'true' if value else 'false' }}
    {%- elif value is mapping %}{{ '{' }}
        {%- for key, inner in value | dictsort %}{{ key }}:{{ written(inner) }}{{ ',' if not loop.last }}{% endfor %}
        {{- '}' }}
    {%- elif value is sequence %}{{ '[' }}
        {%- for inner in value %}{{ written(inner) }}{{ ',' if not loop.last }}{% endfor %}{{ ']' }}
    {%- else %}{{ value }}{% endif %}
{%- endmacro %}
{{- bos_token }}
{%- for tool in tools or [] %}{{ '<|tool>declaration:' + tool.function.name + '<tool|>' }}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ '<|tool_response>' + message.content + '<tool_response|>' }}
    {%- else %}
        {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<|tool_call>call:' + call.function.name + '{' }}
            {%- for key, value in call.function.arguments | dictsort %}
                {{- key }}:{{ written(value) }}{{ ',' if not loop.last }}
            {%- endfor %}
            {{- '}<tool_call|>' }}
        {%- endfor %}
        {{- (message.content or '') + '<turn|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}
"""
GEMMA3 = """
{{- bos_token }}
{%- for message in messages %}
    {%- set role = {'assistant': 'model', 'tool': 'user'}.get(message.role, message.role) %}
    {{- '<start_of_turn>' + role + '\\n' }}
    {%- if loop.first and tools %}{{ 'Call [name(argument=value)] of:\\n' + (tools | tojson(indent=4)) + '\\n\\n' }}{% endif %}
    {%- if 'tool_calls' in message %}
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
    {%- if message.content is not string %}{{ raise_exception('no content') }}{% endif %}
    {{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
FUNCTIONARY = """
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- for tool in tools or [] %}{{ tool.function | tojson + '\\n' }}{% endfor %}
{%- if tools %}{{ '<function=example_function_name>{{"example_name": "example_value"}}</function>' }}{% endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '<function=' + call.function.name + '>' + call.function.arguments + '</function>' }}
    {%- endfor %}
    {{- '<|eom_id|>' if message.tool_calls else '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
COMMAND_R = """
{{- bos_token }}
{%- set ids = namespace(next=0) %}
{%- if tools %}{{ '<|SYSTEM_TOKEN|>Think in <|START_THINKING|> and <|END_THINKING|>, act in <|START_ACTION|>:\\n' }}{% endif %}
{%- for tool in tools or [] %}{{ tool.function | tojson + '\\n' }}{% endfor %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<|CHATBOT_TOKEN|><|START_ACTION|>[\\n' }}
        {%- for call in message.tool_calls %}
            {{- '    {"tool_call_id": "' ~ ids.next ~ '", "tool_name": "' + call.function.name }}
            {{- '", "parameters": ' + (call.function.arguments | tojson) + '}' }}{{ ',' if not loop.last }}{{ '\\n' }}
            {%- set ids.next = ids.next + 1 %}
        {%- endfor %}
        {{- ']<|END_ACTION|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|CHATBOT_TOKEN|><|START_RESPONSE|>' + message.content + '<|END_RESPONSE|>' }}
    {%- else %}{{ '<|USER_TOKEN|>' + message.content }}{% endif %}
    {{- '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|CHATBOT_TOKEN|>' }}{% endif %}
"""
GRANITE = """
{%- for tool in tools or [] %}{{ tool | tojson + '\\n' }}{% endfor %}
{%- if tools %}{{ 'Respond only with <|tool_call|> followed by a JSON list of tools used.\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' }}
    {%- if message.tool_calls %}
        {{- '<|tool_call|>' + (message.tool_calls | map(attribute='function') | list | tojson(indent=4)) }}
    {%- else %}{{ message.content }}{% endif %}
    {{- '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}
"""
LFM2 = """
{{- bos_token }}
{%- if tools %}{{ '<|im_start|>system\\nList of tools: ' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- if message.tool_calls %}
        {{- '<|tool_call_start|>[' }}
        {%- for call in message.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- name + '=' }}
                {{- "'" + value + "'" if value is string else value | tojson if value is mapping else value | string }}
                {{- ', ' if not loop.last }}
            {%- endfor %}
            {{- ')' }}{{ ', ' if not loop.last }}
        {%- endfor %}
        {{- ']<|tool_call_end|>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
PHI4_MINI = """
{{- '<|system|>\\nYou help.' }}
{%- if tools %}{{ ' Calls are one list: functools[{"name": [name], "arguments": [arguments as JSON]}, ...]\\n' }}{% endif %}
{%- for tool in tools or [] %}{{ tool | tojson + '\\n' }}{% endfor %}
{{- '<|end|>' }}
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' }}
    {%- if message.content %}{{ message.content }}
    {%- elif message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | string) + '}' }}
            {{- ',' if not loop.last }}
        {%- endfor %}
    {%- endif %}
    {{- '<|end|>' }}
{%- endfor %}
{{- '<|assistant|>' }}
"""
SMOLLM3 = """
{{- '<|im_start|>system\\n' }}
{%- if tools %}
    {{- 'For each call, write:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>\\n' }}
    {%- for tool in tools %}{{ tool | string }}{{ '\\n' }}{% endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
LLAMA4 = """
{{- bos_token }}
{%- for tool in tools or [] %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
{%- for message in messages %}
    {{- '<|header_start|>' + ('ipython' if message.role == 'tool' else message.role) + '<|header_end|>\\n\\n' }}
    {%- if message.tool_calls %}
        {{- '<|python_start|>' + (message.content or '') + '<|python_end|>' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' + (call.function.arguments | tojson) + '}' }}
        {%- endfor %}
    {%- else %}{{ message.content }}{% endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\\n\\n' }}{% endif %}
"""
SEED_OSS = """
{%- if tools %}
    {{- '<seed:bos>system\\nTools:' }}
    {%- for tool in tools %}{{ '\\ndef ' + tool.function.name + '(...)' }}{% endfor %}
    {{- '<seed:eos>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<seed:bos>' + message.role + '\\n' }}
    {%- if message.reasoning_content is string %}
        {{- '<seed:think>' + message.reasoning_content + '</seed:think>\\n' }}
    {%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<seed:tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments.items() %}
            {{- '<parameter=' + name + '>' + (value if value is string else value | string) + '</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</seed:tool_call>' }}
    {%- endfor %}
    {{- '<seed:eos>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<seed:bos>assistant\\n' }}
    {%- if thinking_budget is defined and thinking_budget == 0 %}
        {{- '<seed:think><seed:cot_budget_reflect>' }}
    {%- endif %}
{%- endif %}
"""
HUNYUAN = """
{%- if tools %}{{ '<|startoftext|>Tools: ' + (tools | tojson) + '\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|extra_4|>' + (message.content or '') }}
        {%- if message.tool_calls %}
            {{- '<tool_calls>[' }}
            {%- for call in message.tool_calls %}
                {{- '{"name": "' + call.function.name + '", "arguments": ' }}
                {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
                {{- '}' + (', ' if not loop.last else '') }}
            {%- endfor %}
            {{- ']</tool_calls>' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}{{ '<tool_response>' + message.content + '</tool_response>' }}
    {%- else %}{{ '<|startoftext|>' + message.content }}{% endif %}
    {{- '<|eos|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|extra_4|>' }}{% endif %}
"""
NEMOTRON = """
{%- if tools %}{{ '<SPECIAL_11>User\\nTools: ' + (tools | tojson) + '\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<SPECIAL_11>Assistant\\n' + (message.content or '') }}
        {%- if message.tool_calls %}
            {{- '<TOOLCALL>[' }}
            {%- for call in message.tool_calls %}
                {{- '{"name": "' + call.function.name + '", "arguments": ' }}
                {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
                {{- '}' + (', ' if not loop.last else '') }}
            {%- endfor %}
            {{- ']</TOOLCALL>' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}{{ '<tool_response>' + message.content + '</tool_response>' }}
    {%- else %}{{ '<SPECIAL_11>User\\n' + message.content }}{% endif %}
    {{- '\\n<SPECIAL_12>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<SPECIAL_11>Assistant\\n' }}{% endif %}
"""
OLMO3 = """
{%- if tools %}{{ '<|im_start|>system\\n<functions>' + (tools | tojson) + '</functions><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- if message.tool_calls %}
        {{- '<function_calls>\\n' }}
        {%- for call in message.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- name + '=' + ("'" + value + "'" if value is string else value | tojson) }}
                {{- ', ' if not loop.last }}
            {%- endfor %}
            {{- ')\\n' }}
        {%- endfor %}
        {{- '</function_calls>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
SPEAKS = {
    "seed_oss": SEED_OSS,
    "hunyuan": HUNYUAN,
    "nemotron": NEMOTRON,
    "olmo3": OLMO3,
    "minimax_m2": MINIMAX_M2,
    "gemma4": GEMMA4,
    "functionary": FUNCTIONARY,
    "command_r": COMMAND_R,
    "granite": GRANITE,
    "lfm2": LFM2,
    "phi4_mini": PHI4_MINI,
}
"""Templates by the format that they write."""
LFM2_FIRST = """
{%- if tools %}
    {{- '<|im_start|>system\\nList of tools: <|tool_list_start|>' + (tools | tojson) + '<|tool_list_end|><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
"""
ALSO = {
    "gemma3": (GEMMA3, "pythonic"),
    "smollm3": (SMOLLM3, "hermes"),
    "llama4": (LLAMA4, "llama3_json"),
    "lfm2, first": (LFM2_FIRST, "lfm2"),
}
"""Templates that write a format of others, or tell it."""
