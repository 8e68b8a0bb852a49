"""Notations other than JSON schemas, what errors say, what a vocabulary's ids write, and who loads torch."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from eyas.common.config import NANO
from eyas.common.errors import InvalidRequest
from eyas.common.grammars.compiler import GrammarCompiler, library
from eyas.common.grammars.notations import Grammar
from eyas.common.tokenizers.vocabulary import pieces

END = 2
CALLS = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [
        {
            "type": "tag",
            "begin": "<f=a>",
            "content": {"type": "json_schema", "json_schema": {"properties": {"x": {"type": "integer"}}}},
            "end": "</f>",
        }
    ],
}
OLDER = {
    "structures": [{"begin": "<f=a>", "schema": {"properties": {"x": {"type": "integer"}}}, "end": "</f>"}],
    "triggers": ["<f="],
}


def tag(**form: Any) -> Grammar:
    return Grammar.structural_tag({"type": "structural_tag", **form})


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Path(NANO), 4096, (END,))


def follows(grammar: Grammar, text: str) -> bool:
    matcher = library().GrammarMatcher(compiler().compile(grammar))
    return bool(matcher.accept_string(text) and matcher.is_completed())


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar.json_object(), ['{"a":[1]}'], ["[]", "1"]),
        (Grammar.regex("[0-9]{2}"), ["12"], ["123", "1", "a12"]),
        (Grammar.ebnf('root ::= "a" | b\nb ::= "c"'), ["a", "c"], ["b", "ac"]),
        (Grammar.choice(["a b", 'é"😀', "a"]), ["a b", 'é"😀', "a"], ["b", "a b "]),
        (
            tag(format=CALLS),
            ['ok <f=a>{"x":1}</f>'],
            ["<f=b>"],
        ),
        (
            tag(**OLDER),
            ['<f=a>{"x":1}</f>'],
            ['<f=a>{"y":1}</f>'],
        ),
    ],
)
def test_every_notation_is_followed(grammar: Grammar, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not follows(grammar, text)] == []
    assert [text for text in bad if follows(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.regex("(a"), "a bracket is not closed"),
        (Grammar.regex(r"a\q"), r"the escape \\q is not supported"),
        (Grammar.regex("(?i)a"), r"\(\?i is not supported"),
        (Grammar.regex(r"(a)\1"), r"a reference to a group \\1 is not supported"),
        (Grammar.regex("a(?=b)"), "a look-ahead"),
        (Grammar.regex("a^b"), "no text fits"),
        (tag(format={"type": "regex", "pattern": r"\q"}), r"the escape \\q is not supported"),
        (tag(format={"type": "json_schema", "json_schema": {}, "any_order": True}), "any_order"),
        (tag(format={"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}), "qwen_xml"),
        (Grammar.ebnf("root ::= x"), '"x" is not defined'),
        (Grammar.choice([]), "1 to 1000 texts"),
        (Grammar.choice([""]), "not empty"),
        (Grammar.json_schema(False), "no value"),
        (tag(format={"type": "poem"}), "poem"),
        (
            tag(format={"type": "json_schema", "json_schema": {"minLength": "1"}}),
            "at #/format/json_schema/minL",
        ),
        (tag(structures=[{"begin": "x"}]), "structures must be"),
    ],
)
def test_a_refusal_says_why_and_no_more(grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        compiler().compile(grammar)
    assert ".cc" not in refused.value.message and len(refused.value.message) < 400


@pytest.mark.parametrize("make", [Grammar.json_schema, Grammar.structural_tag])
def test_half_a_character_is_no_json(make: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be JSON: .* surrogates not allowed"):
        make('{"title": "\\ud83d"}')


def test_a_refusal_does_not_repeat_a_long_grammar() -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiler().compile(Grammar.ebnf("root ::= " + "x" * 20_000))
    assert len(refused.value.message) < 400


def allowed(grammar: Grammar, text: str) -> set[int]:
    matcher = library().GrammarMatcher(compiler().compile(grammar))
    assert matcher.accept_string(text)
    mask = np.zeros((1, 4096 // 32), np.int32)
    matcher.fill_next_token_bitmask(mask, 0)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize(
    "schema",
    [{"maxLength": 3}, {"minLength": 1}, {"pattern": "[^a]{1,3}"}, {"pattern": r"\S"}, {"pattern": ".+"}],
)
def test_text_of_a_bounded_length_has_no_bytes_that_are_none(schema: dict[str, Any]) -> None:
    """Half a surrogate pair would be decoded as three characters."""
    grammar = Grammar.json_schema({"type": "string"} | schema)
    assert follows(grammar, '"é"') and follows(grammar, '"\ud7ff"') and follows(grammar, '"\U0001f642"')
    matcher = library().GrammarMatcher(compiler().compile(grammar))
    assert not matcher.accept_string(b'"\xed\xa0\x80"')


@pytest.mark.parametrize(
    "grammar",
    [
        *(Grammar.regex(pattern) for pattern in ("[^<]{1,3}", ".{1,3}", r"\S+", r"\W|\D", "[a-\U0010ffff]")),
        *(Grammar.ebnf(f"root ::= {part}") for part in ("[^<]", '[^"]*', r"[\x01-\U0010ffff]+")),
    ],
)
def test_classes_hold_characters_alone(grammar: Grammar) -> None:
    assert follows(grammar, "é") and follows(grammar, "\ud7ff") and follows(grammar, "\U0001f642")
    assert follows(grammar, "\ue000")
    matcher = library().GrammarMatcher(compiler().compile(grammar))
    assert not matcher.accept_string(b"\xed\xa0\x80")


@pytest.mark.parametrize("part", [r"[a-\uffff]", r"[\x01-\ud900é\U0001f600-\U0001f6ff\ue000-\uffff]"])
def test_ranges_leave_halves_out(part: str) -> None:
    grammar = Grammar.ebnf(f"root ::= {part}")
    assert all(follows(grammar, text) for text in ("a", "é", "\ud7ff", "\ue000"))
    matcher = library().GrammarMatcher(compiler().compile(grammar))
    assert not matcher.accept_string(b"\xed\xa0\x80")


@pytest.mark.parametrize("part", [r'"\ud800"', r'"a\ud83d\ude00"', r"[\udfff]", r"[\ud800-\udfff]"])
def test_halves_that_are_spelled_out_are_refused(part: str) -> None:
    rules = f"root ::= {part}"
    inside = {"type": "structural_tag", "format": {"type": "grammar", "grammar": rules}}
    for grammar in (Grammar.ebnf(rules), Grammar.structural_tag(inside)):
        with pytest.raises(InvalidRequest, match="holds half of a surrogate pair"):
            compiler().compile(grammar)
    assert follows(Grammar.ebnf(r'root ::= "\\ud800"'), r"\ud800"), "which is a backslash and letters"


def test_control_tokens_are_no_text() -> None:
    """In a text that allows anything their names could stand; their ids must not."""
    strings = Grammar.json_schema({"type": "string"})
    inside = allowed(strings, '"')
    assert inside and not inside & {0, 1, END}
    assert allowed(strings, '"a"') == {END}


def test_ids_write_what_the_tokenizer_reads() -> None:
    tokenizer = Tokenizer.from_file(f"{NANO}/tokenizer.json")
    known = pieces(Path(NANO))
    text = 'A "text" with é, 12 and\n{"a": [1]}'
    assert b"".join(known[id] for id in tokenizer.encode(text).ids) == text.encode()
    assert known[END].startswith(b"\xff")


def test_marks_of_older_folders_count(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(f"{NANO}/tokenizer.json")
    tokenizer.add_tokens([AddedToken("<call>", special=False), AddedToken("<end>", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    entries = {"4097": {"content": "<end>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}))
    known = pieces(tmp_path)
    assert known[tokenizer.token_to_id("<call>")] == b"<call>"
    assert known[tokenizer.token_to_id("<end>")] == b"\xff<end>"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        pieces(tmp_path)


@pytest.mark.parametrize(
    "more", ["", pytest.param("import torch; assert torch.zeros(1).sum() == 0", marks=pytest.mark.slow)]
)
def test_compiling_loads_neither_torch_nor_transformers(more: str) -> None:
    program = (
        "import sys; from pathlib import Path; from eyas.common.grammars.notations import Grammar;"
        "from eyas.common.grammars.compiler import GrammarCompiler;"
        f"GrammarCompiler(Path({str(NANO)!r})).compile(Grammar.json_object());"
        "assert 'xgrammar' in sys.modules; assert not {'torch', 'transformers'} & set(sys.modules);"
    )
    subprocess.run([sys.executable, "-c", program + more], check=True, timeout=60)
