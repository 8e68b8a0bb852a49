"""Which formats a chat template writes, found by asking it, and the messages that it wants."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gateway.formats.chat_fields import ChatMessage
from gateway.formats.chat_request import template_messages
from gateway.parsers.table import REASONING, TOOL_FORMATS
from gateway.text.dialect import ABSENT, TemplateDialect, dialect_of
from gateway.text.templates import ChatTemplate
from tests.chat_templates import ASKED, TEMPLATES, TOOLS, called, result
from tests.list_templates import ALSO

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], SPECIAL)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_of_calls_is_the_one_that_the_template_writes(name: str) -> None:
    dialect = dialect_of(template(name))
    assert dialect.calls == TOOL_FORMATS.get(name)
    assert dialect.text_arguments == name.startswith(("deepseek", "functionary", "phi4"))
    assert dialect.no_content == (None if name == "deepseek_v3" else ABSENT)
    thinks = name in ("hermes", "deepseek_v3", "deepseek_v3_1", "glm45")
    frame = dialect.calls.frame if dialect.calls else None
    assert (frame is not None) == (name == "gpt_oss")
    own = REASONING.get(name) if name in ("command_r", "seed_oss") else None
    assert dialect.reasoning == (frame.reasoning if frame else REASONING["qwen3"] if thinks else own)
    assert dialect.lists_parts == (name == "pythonic")


@pytest.mark.parametrize("name", ALSO)
def test_a_template_may_write_or_tell_a_format_of_others(name: str) -> None:
    source, format = ALSO[name]
    assert dialect_of(ChatTemplate(source, SPECIAL)).calls is TOOL_FORMATS[format]


def test_flags_name_the_formats() -> None:
    dialect = dialect_of(template("plain"), "llama3_json", "mistral")
    assert dialect.calls is TOOL_FORMATS["llama3_json"] and dialect.reasoning == REASONING["mistral"]
    dialect = dialect_of(template("deepseek_v3"), "deepseek_v3", "none")
    assert dialect.text_arguments and dialect.no_content is None and dialect.reasoning is None
    assert dialect_of(template("hermes"), "none").calls is None
    assert dialect_of(None) == TemplateDialect()


def test_a_template_that_fails_has_no_format() -> None:
    assert dialect_of(ChatTemplate("{{ raise_exception('no') }}", {})).calls is None


def rendered(name: str, *messages: dict[str, Any]) -> str:
    ours = template(name)
    chat = [ChatMessage.model_validate(message) for message in messages]
    return ours.render(template_messages(chat, dialect_of(ours)), tools=TOOLS)


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@pytest.mark.parametrize(
    ("arguments", "content"), [({"city": "Köln"}, {}), ('{"city": "Köln"}', {"content": None})]
)
def test_calls_in_the_history_mean_what_they_say(name: str, arguments: Any, content: dict[str, Any]) -> None:
    text = rendered(name, ASKED, called(arguments, **content), result())
    expected = rendered(name, ASKED, called({"city": "Köln"}), result())
    assert text == expected and "Köln" in text and '{"sky": "clear"}' in text
    assert "None" not in text and '\\"' not in text


def test_templates_with_short_ids_get_them() -> None:
    text = rendered("mistral", ASKED, called(id="call_0123456789abcdef"), result("call_0123456789abcdef"))
    id = text.split('"id": "')[1][:9]
    assert id.isalnum() and f'"call_id": "{id}"' in text
    other = rendered("mistral", ASKED, called(id="call_1"), result("call_1"))
    assert id not in other and "abc123XYZ" in rendered("mistral", ASKED, called(), result())


def test_templates_that_count_calls_get_them_counted() -> None:
    again = called({"city": "Bonn"}, "functions.weather:7")
    text = rendered(
        "kimi_k2", ASKED, called(id="call_1"), result("call_1"), again, result("functions.weather:7")
    )
    for id in ("functions.weather:0", "functions.weather:1"):
        assert text.count(f"<|tool_call_begin|>{id}<|") == 1 and text.count(f"## Return of {id}\n") == 1
    assert "call_1" not in text and ":7" not in text
    assert "## Return of other\n" in rendered("kimi_k2", ASKED, called(id="call_1"), result("other"))


def test_arguments_with_half_a_character_stay_as_they_are() -> None:
    """Models write such calls, and no template could render what is read from them."""
    text = rendered("hermes", ASKED, called('{"city": "\\ud83d"}'), result())
    assert "ud83d" in text and text.encode()


def test_arguments_that_are_no_object_stay_as_they_are() -> None:
    assert '"arguments": {"city": }' in rendered("hermes", ASKED, called('{"city": '), result())
    assert '"arguments": {}}' in rendered("hermes", ASKED, called(""), result())
    assert rendered("llama3_json", ASKED, called("[1]")).count('"parameters": "[1]"}') == 1


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic"])
def test_templates_that_need_an_object_get_one(name: str) -> None:
    for arguments, inner in (('{"city": ', "city"), ("[1]", "1")):
        text = rendered(name, ASKED, called(arguments), result())
        assert re.search(rf"arguments\W+(arg_key\W+arg_value\W+)?{inner}\W", text), text


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_the_history_is_read_under_each_of_its_names(field: str) -> None:
    text = rendered("hermes", ASKED, called(**{field: "Let me see"}), result())
    assert "<think>\nLet me see\n</think>\n\n<tool_call>" in text
    answer = {"role": "assistant", "content": "Clear.", field: "Hm"}
    assert "analysis<|message|>Hm<|end|>" in rendered("effort", ASKED, answer)


def test_parts_are_joined_unless_the_template_reads_them() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert "user\na\nb<|im_end|>" in rendered("hermes", parts)
    assert "<|user|>ab<|end|>" in rendered("pythonic", parts)
