"""Chats with several calls in a message, for templates that have room for one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from gateway.formats.chat_fields import ChatMessage
from gateway.formats.chat_request import template_messages
from gateway.text.dialect import dialect_of
from gateway.text.templates import ChatTemplate
from tests.chat_templates import ASKED, TEMPLATES, TOOLS


def _call(id: str, city: str) -> dict[str, Any]:
    return {
        "id": id,
        "type": "function",
        "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'},
    }


def _result(id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


CALLS = {
    "role": "assistant",
    "content": "Let me see.",
    "reasoning_content": "Which city?",
    "tool_calls": [_call("a", "Bonn"), _call("b", "Oslo")],
}
CHAT = [ASKED, CALLS, _result("b", "snow"), _result("a", "rain"), {"role": "user", "content": "So?"}]


def _rendered(name: str, chat: list[dict[str, Any]]) -> str:
    template = ChatTemplate(TEMPLATES[name], {})
    messages = template_messages([ChatMessage.model_validate(each) for each in chat], dialect_of(template))
    return template.render(messages, tools=TOOLS)


def _stand_in_order(text: str, *words: str) -> None:
    places = [text.rindex(word) for word in words]
    assert all(a < b for a, b in itertools.pairwise(places)), text


@pytest.mark.parametrize("name", ["gpt_oss", "llama3_json"])
def test_each_call_has_its_result_behind_it(name: str) -> None:
    _stand_in_order(_rendered(name, CHAT), "Bonn", "rain", "Oslo", "snow", "So?")


def test_words_follow_the_reasoning_where_there_is_room_for_one() -> None:
    text = _rendered("gpt_oss", CHAT)
    assert "<|channel|>analysis<|message|>Which city?\n\nLet me see.<|end|>" in text
    assert text.count("Let me see.") == 1


def test_a_result_of_no_call_is_not_lost() -> None:
    _stand_in_order(_rendered("gpt_oss", [*CHAT[:3], _result("c", "fog"), CHAT[3]]), "rain", "snow", "fog")


RESPONDS = """
{%- for m in messages %}{{ '<|turn>' + m.role + '\n' }}
{%- for c in m.tool_calls or [] %}{{ '<|tool_call>call:' + c.function.name + '{' }}
{%- for k, v in c.function.arguments | dictsort %}
{{- k + ':<|"|>' + v + '<|"|>' }}{% endfor %}{{ '}<tool_call|>' }}
{%- endfor %}
{%- for r in m.tool_responses or [] %}{{ '<|tool_response>' + r.name + (r.response | tojson) }}{% endfor %}
{{- (m.content or '') + ('' if m.tool_responses else '<turn|>') }}{% endfor %}
"""


def test_results_go_into_the_message_of_their_calls() -> None:
    template = ChatTemplate(RESPONDS, {})
    dialect = dialect_of(template)
    assert dialect.tool_responses and not dialect.lone_calls
    chat = [ASKED, CALLS, _result("b", '{"sky": "snow"}'), _result("a", "rain"), _result("z", "fog")]
    messages = template_messages([ChatMessage.model_validate(each) for each in chat], dialect)
    assert [message["role"] for message in messages] == ["user", "assistant", "assistant", "tool"]
    assert messages[1]["content"] == "Let me see." and not messages[2].get("content")
    text = template.render(messages)
    assert (
        '<tool_call|><|tool_response>weather{"sky": "snow"}<|tool_response>weather"rain"<|turn>tool' in text
    )


@pytest.mark.parametrize(
    ("where", "order"),
    [
        ("m.reasoning", ("Which city?", "Let me see.", "Bonn", "snow")),
        ("m.reasoning and m.tool_calls", ("Let me see.", "Which city?", "Bonn", "snow")),
    ],
)
def test_reasoning_stays_before_the_words_where_they_have_room_for_it(
    where: str, order: tuple[str, ...]
) -> None:
    """Gemma 4's last template has, those before it wrote reasoning beside calls alone."""
    thinks = "{%- if " + where + " %}{{ '<|channel>thought\n' + m.reasoning + '\n<channel|>' }}{% endif %}"
    template = ChatTemplate(RESPONDS.replace("m.role + '\n' }}", "m.role + '\n' }}" + thinks), {})
    dialect = dialect_of(template)
    messages = template_messages([ChatMessage.model_validate(each) for each in CHAT[:4]], dialect)
    text = template.render(messages)
    assert text.count("Which city?") == 1
    _stand_in_order(text, *order)


ONE_TURN = """
{%- for m in messages %}
{%- if loop.first or m.role != 'assistant' or messages[loop.index0 - 1].role != 'assistant' %}
{{- '<|turn>' + m.role + '\n' }}{% endif %}
{%- for c in m.tool_calls or [] %}{{ '<|tool_call>call:' + c.function.name + '{' }}
{%- for k, v in c.function.arguments | dictsort %}
{{- k + ':<|"|>' + v + '<|"|>' }}{% endfor %}{{ '}<tool_call|>' }}
{%- endfor %}
{%- for r in m.tool_responses or [] %}{{ '<|tool_response>' + r.name + (r.response | tojson) }}{% endfor %}
{{- (m.content or '') + ('' if m.tool_responses else '<turn|>\n') }}{% endfor %}
{%- if add_generation_prompt and not messages[-1].tool_responses %}{{ '<|turn>model\n' }}{% endif %}
"""


def test_words_before_calls_leave_no_turn_that_is_ended_and_not_begun() -> None:
    template = ChatTemplate(ONE_TURN.replace("m.role + '", "m.role.replace('assistant', 'model') + '"), {})
    dialect = dialect_of(template)
    assert dialect.words_role == "model"
    messages = template_messages([ChatMessage.model_validate(each) for each in CHAT[:4]], dialect)
    assert "Let me see.<turn|>\n<|turn>model\n<|tool_call>" in template.render(messages)
    for name in TEMPLATES:
        assert dialect_of(ChatTemplate(TEMPLATES[name], {})).words_role == "assistant"


@pytest.mark.parametrize("name", ["hermes", "glm45", "gemma4"])
def test_where_there_is_room_nothing_changes(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], {})
    dialect = dialect_of(template)
    assert not dialect.lone_calls and not dialect.lone_words
    messages = template_messages([ChatMessage.model_validate(each) for each in CHAT], dialect)
    assert [len(message.get("tool_calls") or ()) for message in messages] == [0, 2, 0, 0, 0]
