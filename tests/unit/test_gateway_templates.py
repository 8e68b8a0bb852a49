"""Chat templates as transformers renders them, within bounds, from all the places where folders keep them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_families import write_folder
from transformers import AutoTokenizer

from eyas import cli
from eyas.cluster.checks import check_model
from eyas.common.errors import ConfigError, InvalidRequest
from gateway.text.templates import MAX_LENGTH, MAX_STEPS, ChatTemplate, TooManySteps
from gateway.text.tokenizer import Tokenizer
from gateway.text.tokenizer_files import load_chat_template
from tests.chat_templates import ASKED, TEMPLATES, TOOLS, called, result

CHAT = [
    {"role": "system", "content": "Be <kind> & 'brief'."},
    {"role": "user", "content": "Größe?  "},
    {"role": "assistant", "content": "  so-so, and "},
]
TURNS = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m['content'] | trim }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SOURCES = [
    TURNS,
    "{% for m in messages %}\n    {%- if loop.first %}{% continue %}{% endif %}\n"
    "{{ loop.index }}/{{ loop.length }}{{ loop.previtem.role }} {{ loop.last }}\n"
    "    {%- generation %} {{ m.content }} {% endgeneration -%}\n"
    "{% if loop.index > 4 %}{% break %}{% endif %}{% endfor %}",
    "{{ messages | tojson }}",
    "{{ messages | tojson(ensure_ascii=true, indent=2, separators=(',', ' = '), sort_keys=true) }}",
    "{{ messages | tojson(indent=4) }}{{ {'b': 1, 'a': [none, true]} | tojson(sort_keys=true) }}",
    "{{ tools is none }}{{ documents is none }}{{ eos_token is defined }}{{ unk_token }}{{ nothing }}",
    "{% macro say(m) %}[{{ m.role }}: {{ caller() }}]{% endmacro %}"
    "{% for m in messages %}{% call say(m) %}{{ m.content }}{% endcall %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages recursive %}{% set ns.n = ns.n + 1 %}"
    "{% if ns.n == 2 %}{{ loop(messages) }}{% endif %}{{ ns.n }}{% endfor %}",
    "{{ strftime_now('%Y-%m-%d') }}{{ extra | default('none') }}",
]


def template(source: str, **special: str) -> ChatTemplate:
    return ChatTemplate(source, special)


@pytest.mark.parametrize("source", SOURCES)
def test_a_chat_is_rendered_as_transformers_does(source: str, tmp_path: Path) -> None:
    write_folder("gpt2", tmp_path, chat_template=source)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = template(source, bos_token="<s>", unk_token="<unk>")
    for prompt in (True, False):
        for more in ({}, {"extra": 3, "unk_token": "?"}):
            expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt, **more)
            assert ours.render(CHAT, add_generation_prompt=prompt, template_kwargs=more) == expected


async def test_a_chat_is_tokenized_as_transformers_does(tmp_path: Path) -> None:
    write_folder("llama2", tmp_path, chat_template=TURNS)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert list(await ours.encode_chat(CHAT)) == expected
    expected = theirs.apply_chat_template(CHAT, continue_final_message=True)["input_ids"]
    assert list(await ours.encode_chat(CHAT, continue_final_message=True)) == expected
    assert await ours.encode_prompt("a", add_special_tokens=False) == (await ours.encode_prompt("a"))[1:]


@pytest.mark.parametrize("content", ["m.content", "m.content | trim"])
def test_the_final_message_is_continued(content: str, tmp_path: Path) -> None:
    source = TURNS.replace("generation %}{{ m.content", "generation %}{{ " + content)
    write_folder("gpt2", tmp_path, chat_template=source)
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        CHAT, tokenize=False, continue_final_message=True
    )
    ours = template(source, bos_token="<s>")
    assert ours.render(CHAT, continue_final_message=True) == expected
    assert CHAT[-1]["content"] == "  so-so, and "


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ messages[-1].content | reverse }}"])
def test_a_final_message_that_is_not_there_cannot_be_continued(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        template(source).render(CHAT, continue_final_message=True)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CALLS = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
WRITES = "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{{ messages[0].nothing.more }}", "refused the messages: .* has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "failed on the messages: TypeError"),
        ("{{ nothing | tojson }}", "TypeError: .* not JSON serializable"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages.append(1) }}", "refused"),
        (LOOPS, f"more than {MAX_STEPS} steps"),
        (CALLS, f"more than {MAX_STEPS} steps"),
        (WRITES, f"more than {MAX_LENGTH} characters"),
        (
            "{% macro f() %}" + WRITES + "{% endmacro %}{{ f() | length }}",
            f"more than {MAX_LENGTH} characters",
        ),
        ("{% set x %}" + WRITES + "{% endset %}", f"more than {MAX_LENGTH} characters"),
    ],
)
def test_a_template_that_fails_is_a_bad_request(source: str, reason: str) -> None:
    with pytest.raises((InvalidRequest, TooManySteps), match=reason) as refused:
        template(source).render(CHAT)
    error = refused.value
    assert isinstance(error, TooManySteps) == ("steps" in reason)
    assert isinstance(error, TooManySteps) or (error.param, error.http_status) == ("messages", 400)


def test_each_rendering_has_its_own_bounds() -> None:
    half = "{% for i in range(" + str(MAX_STEPS // 6) + ") %}{% endfor %}"
    ours = template(half * 4)
    assert [ours.render(CHAT) for _ in range(3)] == ["", "", ""]


# --- where folders keep them -------------------------------------------------------------------------


def write(folder: Path, **texts: str) -> None:
    """Files by name: a double underscore is a folder's slash, a single one at the end a dot's."""
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_jinja", ".jinja").replace("_json", ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "listed"}]
PLACES: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("config", {"chat_template": "config"}, {}),
    ("listed", {"chat_template": NAMED}, {}),
    ("own", {"chat_template": "config"}, {"chat_template_jinja": "own"}),
    ("own", {}, {"chat_template_jinja": "own", "additional_chat_templates__tool_use_jinja": "tools"}),
    ("more", {}, {"chat_template_jinja": "own", "additional_chat_templates__default_jinja": "more"}),
]


@pytest.mark.parametrize(("expected", "config", "files"), PLACES)
def test_the_template_is_the_one_that_transformers_finds(
    expected: str, config: dict[str, Any], files: dict[str, str], tmp_path: Path
) -> None:
    write(write_folder("gpt2", tmp_path, **config), **files)
    found = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(CHAT, tokenize=False)
    loaded = Tokenizer.load(tmp_path).template
    assert loaded is not None and loaded.render(CHAT) == found == expected


def test_a_processors_template_counts_too(tmp_path: Path) -> None:
    write(
        write_folder("gpt2", tmp_path, chat_template="config"), chat_template_json='{"chat_template": "old"}'
    )
    loaded = Tokenizer.load(tmp_path).template
    assert loaded is not None and loaded.render(CHAT) == "old"


@pytest.mark.parametrize(
    ("config", "files", "complaint"),
    [
        ({"chat_template": "{% if %}"}, {}, r"tokenizer_config\.json does not compile: line 1"),
        (
            {},
            {"chat_template_jinja": "\n{{ a | nope }}"},
            r"chat_template\.jinja does not compile: line 2: No filter",
        ),
        ({}, {"chat_template_json": '{"chat_template": "{{"}'}, r"chat_template\.json does not compile"),
        ({}, {"chat_template_json": "[]"}, r"chat_template\.json does not hold a JSON object"),
        ({"chat_template": 5}, {}, "chat_template is 5"),
        ({"chat_template": [{"name": "default"}]}, {}, "template"),
        ({"added_tokens_decoder": {"1": 5}}, {}, "do not describe a tokenizer"),
        (
            {},
            {"generation_config_json": '{"temperature": "warm"}'},
            r"generation_config\.json: .*temperature",
        ),
        ({}, {"generation_config_json": '{"top_p": 1.5}'}, r"generation_config\.json: top_p 1.5: top_p must"),
    ],
)
def test_what_cannot_be_used_is_named_before_anything_starts(
    config: dict[str, Any], files: dict[str, str], complaint: str, tmp_path: Path
) -> None:
    write(write_folder("gpt2", tmp_path, **config), config_json="{}", **files)
    with pytest.raises(ConfigError, match=complaint):
        check_model(str(tmp_path), "dummy")
        Tokenizer.load(tmp_path)


TOKENS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"eos_token": "cat"}, {}),
    ({"eos_token": {"__type": "AddedToken", "content": "<end>"}, "additional_special_tokens": ["<x>"]}, {}),
    (
        {},
        {"special_tokens_map_json": '{"eos_token": {"content": "<e>"}, "bos_token": "<unk>"}'},
    ),
    ({"extra_special_tokens": ["<y>"], "image_token": "<img>"}, {}),
    ({"extra_special_tokens": {"image_token": "<img>"}}, {}),
    (
        {"added_tokens_decoder": {"420": {"content": "<d>", "special": True}, "0": {"content": "<s>"}}},
        {"special_tokens_map_json": '{"bos_token": "<not read>"}'},
    ),
]


@pytest.mark.parametrize(("config", "files"), TOKENS)
def test_special_tokens_are_those_of_transformers(
    config: dict[str, Any], files: dict[str, str], tmp_path: Path
) -> None:
    variables = "{{ bos_token }} {{ eos_token }} {{ sep_token }} {{ image_token }}"
    write(write_folder("gpt2", tmp_path, chat_template=variables, **config), **files)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    assert ours.template is not None
    assert ours.template.render(CHAT) == theirs.apply_chat_template(CHAT, tokenize=False)
    text = "the cat <s><end><x> s <e><unk><y><img><d> end<not read>"
    ids = theirs.encode(text)
    assert list(ours.encode(text)) == ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_a_folder_without_its_small_files_is_served(tmp_path: Path) -> None:
    write_folder("gpt2", tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<s>"}))
    assert Tokenizer.load(tmp_path).decode([0]) == ""


# --- templates as families of models have them ---------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be brief."}
TEXT_CALL = called('{"city": "Köln"}', content=None)
CHATS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "a question": ([ASKED], False),
    "a system": ([SYSTEM, ASKED, {"role": "assistant", "content": " Clear.\n"}, ASKED], False),
    "tools": ([ASKED], True),
    "a call": ([ASKED, called(content="Let me see."), result(), result()], True),
    "a call's text": ([ASKED, TEXT_CALL, result()], True),
    "reasoning": ([ASKED, called(content="", reasoning_content="\nHm\n"), result()], True),
}
MORE: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False, "thinking": True, "reasoning_effort": "low", "date_string": "1 May 2026"},
    {"documents": [{"title": "one", "text": "a\nb"}, {"text": "c"}]},
]


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_familys_template_is_rendered_as_transformers_does(family: str, tmp_path: Path) -> None:
    """Also where it refuses a chat: then both do."""
    write_folder("gpt2", tmp_path, chat_template=TEMPLATES[family], eos_token="</s>")
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path).template
    assert ours is not None
    rendered = 0
    for (chat, with_tools), more, prompt in itertools.product(CHATS.values(), MORE, (True, False)):
        tools = TOOLS if with_tools else None
        try:
            expected: Any = theirs.apply_chat_template(
                chat, tools=tools, tokenize=False, add_generation_prompt=prompt, **more
            )
        except Exception as error:
            expected = error
        try:
            found: Any = ours.render(chat, tools=tools, add_generation_prompt=prompt, template_kwargs=more)
        except InvalidRequest as refused:
            assert isinstance(expected, Exception) and str(expected)[:60] in str(refused)
            continue
        assert found == expected
        rendered += 1
    assert rendered >= 12


def test_the_template_for_tools_is_the_one_of_that_name(tmp_path: Path) -> None:
    write_folder("gpt2", tmp_path, chat_template=NAMED)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path).template
    assert ours is not None
    for tools, expected in ((None, "listed"), ([], "listed"), (TOOLS, "tools")):
        assert ours.render(CHAT, tools=tools) == expected
        if tools != []:
            assert theirs.apply_chat_template(CHAT, tools=tools, tokenize=False) == expected
    files = tmp_path / "additional_chat_templates"
    files.mkdir()
    (tmp_path / "chat_template.jinja").write_text("own")
    (files / "tool_use.jinja").write_text("own tools")
    ours = Tokenizer.load(tmp_path).template
    assert ours is not None and (ours.render(CHAT), ours.render(CHAT, tools=TOOLS)) == ("own", "own tools")


def test_named_templates_without_a_default_are_none(tmp_path: Path) -> None:
    assert Tokenizer.load(write_folder("gpt2", tmp_path, chat_template=NAMED[:1])).template is None


def test_a_file_takes_the_place_of_the_folders_template(tmp_path: Path) -> None:
    """Also of one that does not compile."""
    folder = write_folder("gpt2", tmp_path, chat_template="{% if %}")
    file = tmp_path / "own.jinja"
    file.write_text("{{ tools | tojson }}{{ messages[0].content }}")
    ours = Tokenizer.load(folder, template=str(file)).template
    assert ours is not None and ours.render([{"role": "user", "content": "Hi"}]) == "nullHi"
    file.write_text("{% for x in %}")
    with pytest.raises(ConfigError, match=f"--chat-template: {file} does not compile: line 1: "):
        load_chat_template(folder, str(file))
    lost = f"--chat-template: {tmp_path}/lost.jinja is neither a template .* nor a file .*: No such file"
    with pytest.raises(ConfigError, match=lost):
        load_chat_template(folder, str(tmp_path / "lost.jinja"))
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=f"--chat-template: {file} .*: it is not UTF-8"):
        load_chat_template(folder, str(file))


@pytest.mark.parametrize("given", ["{{ messages[0].content }}", "{% if true %}Hi{% endif %}", "{{\n'Hi' }}"])
def test_what_is_no_path_is_the_template_itself(tmp_path: Path, given: str) -> None:
    folder = write_folder("gpt2", tmp_path, chat_template="of the folder")
    ours = Tokenizer.load(folder, template=given).template
    assert ours is not None and ours.render([{"role": "user", "content": "Hi"}]) == "Hi"


@pytest.mark.parametrize("given", ["{% for x in %}", "{{ 'a' | no_such_filter }}", "{% if x %}\n\n{{"])
def test_one_that_does_not_parse_ends_a_command_with_one_line(
    capsys: pytest.CaptureFixture[str], given: str
) -> None:
    for args in (["serve", "--port", "0"], ["gateway", "--registry", "static:127.0.0.1:1"]):
        assert cli.main([*args, "--chat-template", given]) == 2
        told = capsys.readouterr().err
        assert told.startswith("eyas: --chat-template: the template does not compile: line "), told
        assert len(told.splitlines()) == 1
