"""Grammars that force text without end, or too much of it, are refused: an engine would look for it."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.common.config import NANO
from eyas.common.errors import InvalidRequest
from eyas.common.grammars import forced_text, json_rules
from eyas.common.grammars.compiler import GrammarCompiler, library
from eyas.common.grammars.notations import Grammar

LITTLE = 12  # characters


def tag(form: dict[str, Any]) -> Grammar:
    return Grammar.structural_tag({"type": "structural_tag", "format": form})


ENDLESS = {"begin": "<f>", "content": {"type": "grammar", "grammar": 'root ::= "x" root'}, "end": "</f>"}
DOUBLED = [f"r{i} ::= r{i + 1} r{i + 1}" for i in range(1200)]  # a number that no float can hold
TWICE = {"type": "repeat", "min": 999, "max": 2000, "content": {"type": "const_string", "value": "ab"}}


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Path(NANO), 4096, (2,))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.ebnf("root ::= root"),
        Grammar.ebnf('root ::= "a" root'),
        Grammar.ebnf('root ::= "b" | "a" x\nx ::= [a-z] y\ny ::= x | x "c"'),
        tag({"type": "triggered_tags", "triggers": ["<f"], "tags": [ENDLESS]}),
    ],
)
def test_a_rule_whose_texts_never_end_is_refused(grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest, match="its rule [a-z_0-9]+ has no text that ends"):
        compiler().compile(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("((a{1000}){1000}){1000}"),
        Grammar.ebnf('root ::= x{300}\nx ::= "ab"{300}'),
        Grammar.ebnf("\n".join(["root ::= r0", *DOUBLED, 'r1200 ::= "ab"'])),
        tag({"type": "repeat", "min": 999, "max": 2000, "content": TWICE}),
    ],
)
def test_a_rule_that_forces_too_much_is_refused(grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest, match="forces more than 65536 characters in a row"):
        compiler().compile(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.ebnf('root ::= root "a" | "b"'),
        Grammar.ebnf('root ::= "(" root ")" | "x"'),
        Grammar.ebnf('root ::= "a"{60000}'),
        Grammar.ebnf('root ::= "b"\nunused ::= unused'),
        Grammar.regex("([ab]{1000}){1000}"),  # no character of it is forced
        Grammar.json_schema({"const": "ä" * 30_000}),
        Grammar.json_schema({"type": "object", "properties": {"next": {"$ref": "#"}}}),
    ],
)
def test_others_are_compiled(grammar: Grammar) -> None:
    compiler().compile(grammar)


def test_an_accepted_grammar_forces_no_more_wherever_its_text_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the library's own answer, along random texts of random grammars; refused ones do force more."""
    rng = random.Random(7)
    monkeypatch.setattr(forced_text, "MOST_FORCED", LITTLE)
    accepted = most_refused = 0
    for _ in range(400):
        rules = _random_rules(rng)
        grammar = library().Grammar.from_ebnf(rules)
        try:
            forced_text.check_forced(rules if rng.random() < 0.5 else str(grammar))
        except InvalidRequest as error:
            if "forces" in error.message:
                most_refused = max(most_refused, _longest_forced(grammar, rng))
        else:
            accepted += 1
            assert _longest_forced(grammar, rng) <= LITTLE, rules
    assert accepted > 50 and most_refused > LITTLE


def test_each_form_is_looked_at_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optional properties make a rule of many forms, each of which is known at another time."""
    looks = []
    shortest = forced_text._Form.shortest

    def count(form: Any, known: Any) -> float:
        looks.append(form)
        return shortest(form, known)

    monkeypatch.setattr(forced_text._Form, "shortest", count)
    rules = [f'r{i} ::= "" | "a" r{i + 1}' for i in range(300)]
    root = " | ".join(f'"b" r{i}' for i in range(300))
    forced_text.check_forced("\n".join([f"root ::= {root}", *rules, 'r300 ::= ""']))
    assert len(looks) <= 2 * 901


def test_the_parts_that_may_be_nothing_are_looked_for_once_per_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many optional properties are a chain of rules, each of which may be nothing if the next one may."""
    looks = []

    def count(*args: Any) -> bool:
        looks.append(None)
        return may_be_nothing(*args)

    may_be_nothing = json_rules._may_be_nothing
    monkeypatch.setattr(json_rules, "_may_be_nothing", count)
    chain = [f'r{i} ::= "" | "a" r{i + 1} | r{i + 1}' for i in range(500)]
    json_rules.json_rules("\n".join(["root ::= r0", *chain, 'r500 ::= ""']))
    assert len(looks) <= 3 * 502


def _random_rules(rng: random.Random) -> str:
    """Rules of which each needs only later ones, so that all texts end."""

    def element(below: int) -> str:
        text = f'"{"".join(rng.choices("abc", k=rng.randint(1, 4)))}"'
        kinds = [text, "[a-c]", f"({text} | [b])?"]
        if below < 4:
            kinds.append(f"r{rng.randint(below + 1, 4)}{{{rng.randint(0, 3)},3}}")
        return rng.choice(kinds)

    def side(rule: int) -> str:
        return " | ".join(
            " ".join(element(rule) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 2))
        )

    return "\n".join([f"root ::= {side(0)}", *(f"r{rule} ::= {side(rule)}" for rule in range(1, 5))])


def _longest_forced(grammar: Any, rng: random.Random) -> int:
    compiled, longest = compiler()._compiler.compile_grammar(grammar), 0
    for _ in range(3):
        matcher, mask = library().GrammarMatcher(compiled), np.zeros((1, 128), np.int32)
        while not matcher.is_terminated():
            longest = max(longest, len(matcher.find_jump_forward_string()))
            matcher.fill_next_token_bitmask(mask, 0)
            ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            matcher.accept_token(int(rng.choice(ids)))
    return longest
