"""The embedded model's held-out questions, and how their answers are scored.

They are read from a file. What writes it, from phrasings and number pairs that no training text has, is not
installed (`tools.nano.heldout`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.evals.questions import EvalQuestion, Judge

FILE = Path(__file__).with_suffix(".json")

Message = dict[str, str]


@dataclass(frozen=True)
class QuestionSet:
    """A named set and the share of it that must be right."""

    name: str
    questions: tuple[EvalQuestion, ...]
    bar: float


def contains(answer: str, expected: str) -> bool:
    """True if the expected words occur, in upper or lower case."""
    return re.search(rf"(?<!\w){re.escape(expected.lower())}(?!\w)", answer.lower()) is not None


def concludes(answer: str, expected: str) -> bool:
    """True if the last `#### N` line names the number."""
    results = re.findall(r"#### (-?\d+)", answer)
    return bool(results) and results[-1] == expected


def lists_in_order(answer: str, expected: str) -> bool:
    """True if the items stand in the answer in the same order, and nothing else does."""
    return re.split(r",\s*", answer.strip().rstrip(".").lower()) == re.split(
        r",\s*", expected.rstrip(".").lower()
    )


def results_in(answer: str, expected: str) -> bool:
    """True if the last number of the answer is the expected one."""
    numbers = re.findall(r"\d+", answer)
    return bool(numbers) and numbers[-1] == expected


SETS: Mapping[str, tuple[Judge, float]] = {
    "capitals": (contains, 0.95),
    "countries": (contains, 0.95),
    "lists": (lists_in_order, 0.95),
    "one-step problems": (concludes, 0.80),
    "two-step problems": (concludes, 0.80),
    "one-step, new phrasing": (concludes, 0.80),
    "two-step, new phrasing": (concludes, 0.80),
    "plain arithmetic": (results_in, 0.80),
}
"""Who judges a set's answers, and the share of them that must be right."""


def question_set(name: str, pairs: Sequence[Sequence[str]]) -> QuestionSet:
    """A set of these questions and what is expected of their answers."""
    judge, bar = SETS[name]
    questions = tuple(EvalQuestion(question, expected, judge) for question, expected in pairs)
    return QuestionSet(name, questions, bar)


def question_sets(size: int, seed: int) -> list[QuestionSet]:
    """All sets, each of `size` questions, or of all that the file has: for seed 1 its first ones, for seed 2
    those behind them, and so on around.
    """
    pairs = json.loads(FILE.read_text())["sets"]
    return [question_set(name, _window(pairs[name], size, seed)) for name in SETS]


def heldout_prompts() -> list[list[Message]]:
    """Distinct chats of all topics that end with a user turn and are not in the training text."""
    chats: list[list[Message]] = json.loads(FILE.read_text())["chats"]
    return chats


def _window(pairs: Sequence[Sequence[str]], size: int, seed: int) -> list[Sequence[str]]:
    size = min(size, len(pairs))
    start = (seed - 1) * size
    return [pairs[(start + i) % len(pairs)] for i in range(size)]
