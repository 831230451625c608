"""Chat templates in the manner of well-known models: short, and alike in what they drop, refuse, cut and quote."""

from __future__ import annotations

#: Any role, as SmolLM2's: what ChatML is.
CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""

#: Drops roles that it does not know; tools stand in the system message; arguments are written as JSON.
QWEN2_5 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- else %}{{- 'You are Q.' }}{%- endif %}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are Q.<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- set is_said = m.role == 'assistant' and not m.tool_calls %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) or is_said %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
        {%- for call in m.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

#: As before, and leaves the thoughts of earlier turns out; `enable_thinking` false writes empty ones.
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'user' or m.role == 'system' %}
        {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thoughts = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if not thoughts and '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- content }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>' + call.name + ' ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

#: Writes a date; one tool call a message, whose content it leaves out; a tool's answer as JSON; contents trimmed.
LLAMA3_2 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|system|>\\nToday Date: " + date_string + "\\n" + system + "<|eot|>" }}
{%- if tools is not none and tools %}
    {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- "<|user|>" }}{%- for t in tools %}{{- t | tojson(indent=4) + "\\n" }}{%- endfor %}{{- first + "<|eot|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("One tool call at once!") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|assistant|>{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot|>" }}
    {%- else %}
        {{- "<|ipython|>" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

#: A fixed date unless it is given one.
LLAMA3_1 = LLAMA3_2.replace("strftime_now is defined", "false").replace('strftime_now("%d %b %Y")', '""')

#: Writes the arguments' keys one by one; drops roles that it does not know.
GLM4 = """\
[gMASK]<sop>
{%- if tools %}<|system|>\\n# Tools
{%- for tool in tools %}\\n{{ tool | tojson(ensure_ascii=False) }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>\\n{{ m.content }}
{%- elif m.role == 'assistant' %}<|assistant|>
{%- if m.content %}\\n{{ m.content.strip() }}{% endif %}
{%- for tc in m.tool_calls or [] %}
{%- if tc.function %}{% set tc = tc.function %}{% endif %}\\n<tool_call>{{ tc.name }}
{%- for k, v in tc.arguments.items() %}<arg>{{ k }}={{ v if v is string else v | tojson }}</arg>{% endfor %}</tool_call>
{%- endfor %}
{%- elif m.role == 'tool' %}<|observation|>\\n{{ m.content }}
{%- elif m.role == 'system' %}<|system|>\\n{{ m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}""".replace("\\n", "\n")

#: Refuses system messages and turns that do not alternate; trims; the assistant is called model.
GEMMA2 = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

#: The system message moves into the last user message.
MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system is defined %}{{- '[INST] ' + system + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}
    {%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] | trim + eos_token }}
    {%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}{%- endif %}
{%- endfor %}"""

#: Joins arguments as text; of an answer only what stands behind its thoughts.
DEEPSEEK = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}{% endif %}\
{% if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{% endif %}\
{% if message['role'] == 'assistant' and 'tool_calls' in message %}{% for tool in message['tool_calls'] %}\
{{ '<|call|>' + tool['function']['name'] + '\n' + tool['function']['arguments'] }}{% endfor %}\
{% elif message['role'] == 'assistant' %}{% set content = message['content'].split('</think>')[-1] %}\
{{ '<|Assistant|>' + content + eos_token }}{% endif %}\
{% if message['role'] == 'tool' %}{{ '<|output|>' + message['content'] }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""

#: Joins calls to the content beside them, and so needs one, if an empty one; arguments are text, as in `DEEPSEEK`.
DEEPSEEK_V3 = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}\
{% elif message['role'] == 'tool' %}{{ '<|output|>' + message['content'] }}\
{% elif message['tool_calls'] is defined %}{% for tool in message['tool_calls'] %}\
{{ message['content'] + '<|call|>' + tool['function']['name'] + '<|sep|>' + tool['function']['arguments'] }}\
{% endfor %}{% else %}{{ '<|Assistant|>' + message['content'] + eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""

#: For tools alone: nothing is rendered without one. Drops roles that it does not know.
TOOLS_ALONE = """\
{%- for tool in tools %}{{- tool.function.name + ' ' + tool.function.description }}
{%- for name, field in tool.function.parameters.properties | items %}{{- name + ' ' + field.type }}{%- endfor %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role in ('system', 'user', 'assistant') %}{{- '<' + m.role + '>' + m.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"""

#: Has a place for developers and none for system messages.
DEVELOPER = """\
{%- for m in messages %}{%- if m.role in ('developer', 'user', 'assistant') %}<{{ m.role }}>{{ m.content }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}<assistant>{%- endif %}"""
