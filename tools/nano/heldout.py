"""Questions that no training text contains: the file of `eyas.evals.heldout`.

    python -m tools.nano.heldout

Phrasings and number pairs come from the generators' held-out split, from which training never draws.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from eyas.evals.heldout import FILE, SETS, QuestionSet, question_set
from tools.nano.text import arithmetic, geography, lists, word_problems
from tools.nano.text.core import DialogueContext, Message, TextSplit
from tools.nano.text.dialogues import chat_of
from tools.nano.text.numbers import heldout_pair
from tools.nano.text.world import COUNTRIES

LONGEST_PROMPT = 4  # messages of a held-out chat, so that most of its text is the reply
ATTEMPTS = 20  # draws per question wanted, because some come twice
QUESTIONS, CHATS = 150, 256  # in the file: of each set, and in all

Pair = tuple[str, str]  # a question, and what its answer must contain or conclude
Draw = Callable[[DialogueContext], Pair]


def _capitals(context: DialogueContext) -> Pair:
    country = context.pick(COUNTRIES)
    return geography.CAPITAL_OF.pick(context).format(c=country.name), country.capital


def _countries(context: DialogueContext) -> Pair:
    country = context.pick(COUNTRIES)
    question = geography.COUNTRY_OF.pick(context).format(k=country.capital)
    return question, country.name.removeprefix("the ")


def _lists(context: DialogueContext) -> Pair:
    if context.chance(0.1):
        start, stop = context.pick(((1, 10), (1, 20), (5, 15), (1, 50), (10, 30)))
        counted = ", ".join(map(str, range(start, stop + 1)))
        return lists.COUNT.pick(context).format(a=start, b=stop), counted
    name = context.pick(tuple(lists.NAMED))
    said = context.pick(lists.SAID.get(name, (name,)))
    return lists.LIST_ALL.pick(context).format(k=said), lists.list_answer(name)


def _problems(steps: int) -> Draw:
    def draw(context: DialogueContext) -> Pair:
        """Familiar phrasings with numbers never trained: this tests the arithmetic."""
        training = DialogueContext(context.rng, TextSplit.TRAIN)
        while True:
            problem = word_problems.draw_problem(training, steps)
            if problem and any(heldout_pair(*step) for step in problem.steps):
                return problem.question, str(problem.result)

    return draw


def _problems_retold(steps: int) -> Draw:
    def draw(context: DialogueContext) -> Pair:
        """Phrasings never trained and numbers never trained."""
        problem = word_problems.problem(context, steps)
        return problem.question, str(problem.result)

    return draw


def _arithmetic(context: DialogueContext) -> Pair:
    first = arithmetic.direct(context)[0]
    return first.user, first.assistant.split("= ")[-1]


DRAWS: dict[str, Draw] = {
    "capitals": _capitals,
    "countries": _countries,
    "lists": _lists,
    "one-step problems": _problems(1),
    "two-step problems": _problems(2),
    "one-step, new phrasing": _problems_retold(1),
    "two-step, new phrasing": _problems_retold(2),
    "plain arithmetic": _arithmetic,
}


def pairs(name: str, size: int, seed: int) -> list[Pair]:
    """`size` distinct questions of a set, or fewer where it has no more."""
    context = DialogueContext(random.Random(f"{name}/{seed}"), TextSplit.HELDOUT)
    answers: dict[str, str] = {}
    for _ in range(size * ATTEMPTS):
        question, expected = DRAWS[name](context)
        answers.setdefault(question, expected)
        if len(answers) == size:
            break
    return list(answers.items())


def question_sets(size: int, seed: int) -> list[QuestionSet]:
    """All sets, each of `size` distinct questions, or fewer where a set has no more."""
    return [question_set(name, pairs(name, size, seed)) for name in SETS]


def heldout_prompts(count: int, seed: int) -> list[list[Message]]:
    """Distinct chats of all topics that end with a user turn and are not in the training text."""
    context = DialogueContext(random.Random(f"prompts/{seed}"), TextSplit.HELDOUT)
    chats: dict[str, list[Message]] = {}
    while len(chats) < count:
        chat = chat_of(context)[:-1]
        if len(chat) <= LONGEST_PROMPT:
            chats.setdefault(repr(chat), chat)
    return list(chats.values())


def content() -> str:
    """The file as it should be."""
    sets = {name: pairs(name, QUESTIONS, 1) for name in SETS}
    return json.dumps({"sets": sets, "chats": heldout_prompts(CHATS, 1)}, indent=0) + "\n"


if __name__ == "__main__":
    FILE.write_text(content())
