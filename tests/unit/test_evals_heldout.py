"""Held-out questions are disjoint from training text by construction, and are scored as meant."""

from __future__ import annotations

import random
import re

import pytest

from eyas.evals import heldout
from eyas.evals.heldout import concludes, contains, lists_in_order, results_in
from tools.nano.heldout import content, heldout_prompts, question_sets
from tools.nano.text import (
    arithmetic,
    code,
    dialogues,
    facts,
    geography,
    lists,
    smalltalk,
    units,
    word_problems,
)
from tools.nano.text.core import DialogueContext, Phrasings, TextSplit
from tools.nano.text.dialogues import dialogue
from tools.nano.text.numbers import apply, heldout_pair, steps_of, worked
from tools.nano.text.problem_shapes import SHAPES
from tools.nano.text.word_problems import problem
from tools.nano.text.world import COUNTRIES

MODULES = (arithmetic, code, dialogues, facts, geography, word_problems, lists, smalltalk, units)


def all_phrasings() -> list[Phrasings]:
    found = [value for module in MODULES for value in vars(module).values() if isinstance(value, Phrasings)]
    return found + [shape.text for shape in SHAPES] + [phrasings for phrasings, _ in smalltalk.TALK]


def test_no_phrasing_is_both_trained_and_held_out() -> None:
    for phrasings in all_phrasings():
        trained = {text.lower().rstrip(".?!") for text in phrasings.train}
        assert phrasings.heldout and not trained & {text.lower().rstrip(".?!") for text in phrasings.heldout}


def test_training_text_holds_no_held_out_question() -> None:
    questions = {question.prompt.lower() for found in question_sets(200, 1) for question in found.questions}
    questions |= {
        chat[-1]["content"].lower() for chat in heldout_prompts(200, 5) if len(chat[-1]["content"]) > 25
    }
    trained = [message for index in range(1500) for message in dialogue(0, index, TextSplit.TRAIN)]
    assert not questions & {message["content"].lower() for message in trained if message["role"] == "user"}


def test_training_answers_hold_no_held_out_calculation() -> None:
    for index in range(1500):
        for message in dialogue(1, index, TextSplit.TRAIN):
            if message["role"] == "assistant" and "####" in message["content"]:
                for line in message["content"].splitlines():
                    found = re.search(r"(?:: |^|so )(\d+) ([-+*/]) (\d+) = \d+\.$", line)
                    if found:
                        assert not heldout_pair(found[2], int(found[1]), int(found[3])), line


@pytest.mark.parametrize("steps", [1, 2])
def test_held_out_problems_hold_a_held_out_pair(steps: int) -> None:
    context = DialogueContext(random.Random(0), TextSplit.HELDOUT)
    for _ in range(200):
        found = problem(context, steps)
        assert len(found.steps) == steps and any(heldout_pair(*step) for step in found.steps)


def test_every_step_of_the_working_is_true() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        symbol = rng.choice("+-*/")
        a, b = rng.randint(2, 20), rng.randint(2, 12)
        if symbol in "+-":
            a, b = rng.randint(500, 999), rng.randint(1, 500)
        if symbol == "/":
            a *= b
        assert worked(symbol, a, b).endswith(f"{a} {symbol} {b} = {apply(symbol, a, b)}")
        for step in steps_of(symbol, a, b):
            left, operation, right, _, result = step.split()
            assert apply(operation, int(left), int(right)) == int(result)


def test_held_out_prompts_are_distinct_and_repeatable() -> None:
    prompts = heldout_prompts(300, 0)
    assert len({repr(chat) for chat in prompts}) == 300 and prompts == heldout_prompts(300, 0)
    assert all(chat[-1]["role"] == "user" for chat in prompts)
    assert len({chat[-1]["content"] for chat in prompts}) >= 200


def test_the_file_of_questions_is_fresh() -> None:
    """`python -m tools.nano.heldout` writes it."""
    assert heldout.FILE.read_text() == content()


def test_seeds_ask_questions_one_after_the_other() -> None:
    first, second, all_of_them = (
        [question.prompt for question in heldout.question_sets(size, seed)[0].questions]
        for size, seed in ((50, 1), (50, 2), (10_000, 1))
    )
    assert first == all_of_them[:50] and second == all_of_them[50:100]
    assert first == [question.prompt for question in question_sets(50, 1)[0].questions]
    assert len(heldout.question_sets(50, 77)[0].questions) == 50


def test_a_dialogue_is_named_by_its_seed_and_index() -> None:
    assert (
        dialogue(7, 11, TextSplit.TRAIN)
        == dialogue(7, 11, TextSplit.TRAIN)
        != dialogue(7, 12, TextSplit.TRAIN)
    )


def test_the_world_is_complete_and_unambiguous() -> None:
    assert len(COUNTRIES) >= 195
    assert (
        len({country.capital for country in COUNTRIES})
        == len({country.name for country in COUNTRIES})
        == len(COUNTRIES)
    )


def test_judges() -> None:
    assert contains("The capital of Peru is Lima.", "lima") and not contains("Limassol.", "Lima")
    assert concludes("2 + 2 = 4.\n#### 4", "4") and not concludes("#### 14", "4") and not concludes("4", "4")
    assert lists_in_order("1, 2, 3.", "1, 2, 3") and not lists_in_order("1, 3, 2.", "1, 2, 3")
    assert results_in("3 * 4 = 12", "12") and not results_in("12 = 3 * 4", "12")
