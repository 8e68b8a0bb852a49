"""Questions that no training text contains, and how their answers are scored.

Phrasings and number pairs come from the generators' held-out split, from which training never draws. It
refuses to know servers and models.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from eyas.evals.questions import Question
from eyas.train.text import arithmetic, geography, lists, word_problems
from eyas.train.text.core import Context, Message, Split
from eyas.train.text.dialogues import chat_of
from eyas.train.text.numbers import held_pair
from eyas.train.text.world import COUNTRIES

LONGEST_PROMPT = 4  # messages of a held-out chat, so that most of its text is the reply
ATTEMPTS = 20  # draws per question wanted, because some come twice


Draw = Callable[[Context], Question]


@dataclass(frozen=True)
class QuestionSet:
    """A named set and the share of it that must be right."""

    name: str
    questions: tuple[Question, ...]
    bar: float


def contains(answer: str, expected: str) -> bool:
    """Whether the expected words occur, in upper or lower case."""
    return re.search(rf"(?<!\w){re.escape(expected.lower())}(?!\w)", answer.lower()) is not None


def concludes(answer: str, expected: str) -> bool:
    """Whether the last `#### N` line names the number."""
    found = re.findall(r"#### (-?\d+)", answer)
    return bool(found) and found[-1] == expected


def lists_in_order(answer: str, expected: str) -> bool:
    """Whether the items stand in the answer in the same order, and nothing else does."""
    return re.split(r",\s*", answer.strip().rstrip(".").lower()) == re.split(
        r",\s*", expected.rstrip(".").lower()
    )


def results_in(answer: str, expected: str) -> bool:
    """Whether the last number of the answer is the expected one."""
    found = re.findall(r"\d+", answer)
    return bool(found) and found[-1] == expected


def _capitals(context: Context) -> Question:
    country = context.pick(COUNTRIES)
    return Question(geography.CAPITAL_OF.pick(context).format(c=country.name), country.capital, contains)


def _countries(context: Context) -> Question:
    country = context.pick(COUNTRIES)
    asked = geography.COUNTRY_OF.pick(context).format(k=country.capital)
    return Question(asked, country.name.removeprefix("the "), contains)


def _lists(context: Context) -> Question:
    if context.chance(0.1):
        start, stop = context.pick(((1, 10), (1, 20), (5, 15), (1, 50), (10, 30)))
        counted = ", ".join(map(str, range(start, stop + 1)))
        return Question(lists.COUNT.pick(context).format(a=start, b=stop), counted, lists_in_order)
    name = context.pick(tuple(lists.NAMED))
    said = context.pick(lists.SAID.get(name, (name,)))
    return Question(lists.LIST_ALL.pick(context).format(k=said), lists.list_answer(name), lists_in_order)


def _problems(steps: int) -> Draw:
    def draw(context: Context) -> Question:
        """Familiar phrasings with numbers never trained: this tests the arithmetic."""
        told = Context(context.rng, Split.TRAIN)
        while True:
            found = word_problems.draw_problem(told, steps)
            if found and any(held_pair(*step) for step in found.steps):
                return Question(found.question, str(found.result), concludes)

    return draw


def _problems_retold(steps: int) -> Draw:
    def draw(context: Context) -> Question:
        """Phrasings never trained and numbers never trained."""
        found = word_problems.problem(context, steps)
        return Question(found.question, str(found.result), concludes)

    return draw


def _arithmetic(context: Context) -> Question:
    first = arithmetic.direct(context)[0]
    return Question(first.user, first.assistant.split("= ")[-1], results_in)


SETS: dict[str, tuple[Draw, float]] = {
    "capitals": (_capitals, 0.95),
    "countries": (_countries, 0.95),
    "lists": (_lists, 0.95),
    "one-step problems": (_problems(1), 0.80),
    "two-step problems": (_problems(2), 0.80),
    "one-step, new phrasing": (_problems_retold(1), 0.80),
    "two-step, new phrasing": (_problems_retold(2), 0.80),
    "plain arithmetic": (_arithmetic, 0.80),
}


def question_sets(size: int, seed: int) -> list[QuestionSet]:
    """All sets, each of `size` distinct questions, or fewer where a set has no more."""
    made = []
    for name, (draw, bar) in SETS.items():
        context = Context(random.Random(f"{name}/{seed}"), Split.HELD)
        found: dict[str, Question] = {}
        for _ in range(size * ATTEMPTS):
            question = draw(context)
            found.setdefault(question.prompt, question)
            if len(found) == size:
                break
        made.append(QuestionSet(name, tuple(found.values()), bar))
    return made


def held_out_prompts(count: int, seed: int) -> list[list[Message]]:
    """Distinct chats of all topics that end with a user turn and are not in the training text."""
    context = Context(random.Random(f"prompts/{seed}"), Split.HELD)
    found: dict[str, list[Message]] = {}
    while len(found) < count:
        chat = chat_of(context)[:-1]
        if len(chat) <= LONGEST_PROMPT:
            found.setdefault(repr(chat), chat)
    return list(found.values())
