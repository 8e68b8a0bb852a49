"""Chat templates in the manner of GLM-4.5, Kimi-K2 and gpt-oss: what `chat_templates` holds beside others."""

GLM45 = """
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\n<tools>\n' }}
    {%- for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}{{ '\n' }}{% endfor %}
    {{- '</tools>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<|user|>\n' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>\n<think>' + (message.reasoning_content or '') + '</think>' }}
        {%- if message.content %}{{ '\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>' + call.function.name + '\n' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '<arg_key>' + name + '</arg_key>\n<arg_value>' }}
                {{- value if value is string else value | tojson(ensure_ascii=False) }}{{ '</arg_value>\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<|observation|>\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- else %}{{ '<|system|>\n' + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '\n<think></think>' }}{% endif %}
{%- endif %}
"""
KIMI_K2 = """
{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_' + (message.role if message.role in ('user', 'assistant') else 'system') + '|>' }}
    {{- message.role + '<|im_middle|>' }}
    {%- if message.role == 'tool' %}{{ '## Return of ' + message.tool_call_id + '\n' }}{% endif %}
    {{- message.content or '' }}
    {%- if message.tool_calls %}
        {{- '<|tool_calls_section_begin|>' }}
        {%- for call in message.tool_calls %}
            {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
            {%- set given = call.function.arguments %}{{- given if given is string else given | tojson }}
            {{- '<|tool_call_end|>' }}
        {%- endfor %}
        {{- '<|tool_calls_section_end|>' }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}
"""
GPT_OSS = """
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') }}
{{- '\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\n\nnamespace functions {\n' }}
    {%- for tool in tools %}
        {{- '// ' + tool.function.description + '\ntype ' + tool.function.name + ' = (_: ' }}
        {{- (tool.function.parameters or {}) | tojson + ') => any;\n' }}
    {%- endfor %}
    {{- '}<|end|>' }}
{%- endif %}
{%- set ns = namespace(name='') %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.tool_calls and message.thinking and message.content %}
            {{- raise_exception('either thinking or content') }}
        {%- endif %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- set call = message.tool_calls[0].function %}{% set ns.name = call.name %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
            {{- call.arguments | tojson + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + ('developer' if message.role == 'system' else message.role) }}
        {{- '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
