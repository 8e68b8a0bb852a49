"""Parts that every topic shares: the split, phrasings, exchanges and the noise of casual typing."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Message = dict[str, str]


class TextSplit(enum.Enum):
    """Training text, or questions that no training text may contain."""

    TRAIN = "train"
    HELDOUT = "held"


@dataclass(frozen=True)
class DialogueContext:
    """The random stream of one dialogue and the split it belongs to."""

    rng: random.Random
    split: TextSplit

    def pick(self, items: Sequence[T]) -> T:
        """One item, uniformly."""
        return items[int(self.rng.random() * len(items))]

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def number(self, low: int, high: int) -> int:
        """A uniform integer, both ends included."""
        return low + int(self.rng.random() * (high - low + 1))


@dataclass(frozen=True)
class Phrasings:
    """Ways to say one thing; the held ones never occur in training text."""

    train: tuple[str, ...]
    heldout: tuple[str, ...]

    def pick(self, context: DialogueContext) -> str:
        """A phrasing of the context's split."""
        return context.pick(self.train if context.split is TextSplit.TRAIN else self.heldout)


@dataclass(frozen=True)
class ChatExchange:
    """One user turn and its answer."""

    user: str
    assistant: str


Topic = Callable[[DialogueContext], list[ChatExchange]]

OPENERS = (
    "Please tell me: ", "Hey, ", "Hi! ", "Hello, ", "Quick question: ", "I was wondering, ", "Okay, ", "So, ",
    "Can you help me? ", "Just curious: ", "One question: ", "Question: ", "Tell me, ", "Now, ", "Also, ",
    "I need to know this: ", "For my homework: ", "Sorry to bother you, ", "Let me ask you something. ", "Hmm, ",
    "Good morning! ", "Good evening. ", "My teacher asked: ", "I have a question. ", "Here is a question: ",
    "Help me out: ", "Eyas, ", "Hey Eyas, ", "Alright, ", "Next question: ", "Another one: ", "I forgot, ",
    "Thanks. ", "Great, thank you. ", "Well, ", "By the way, ", "Please answer: ", "Do me a favour. ", "Ok ",
)  # fmt: skip
CLOSERS = (
    " Thanks!", " Thank you.", " Please.", " Please answer.", " I forgot.", " Thanks in advance.", " I am not sure.",
    " It is for my homework.", " I would like to know.", " Just wondering.", " Can you help?", " Cheers!",
    " I need it for a quiz.", " Be quick, please.", " Any idea?", " Do you know?",
)  # fmt: skip


def lower_first(text: str) -> str:
    """The text with a small first letter, unless it starts with the word I."""
    return text if text.startswith(("I ", "I'")) else text[:1].lower() + text[1:]


def casual(context: DialogueContext, text: str) -> str:
    """The text as different people would type it: openers, closers, small letters, no final mark."""
    if context.chance(0.25):
        opener = context.pick(OPENERS)
        text = opener + (lower_first(text) if opener.endswith((", ", ": ", "Ok ")) else text)
    if context.chance(0.12) and text.endswith((".", "?", "!")):
        text += context.pick(CLOSERS)
    if context.chance(0.12):
        text = text.lower()
    if context.chance(0.1):
        text = text.rstrip(".?!")
    return text


def ask(context: DialogueContext, phrasings: Phrasings, **fields: object) -> str:
    """A question of the context's split, filled in and typed casually."""
    return casual(context, phrasings.pick(context).format(**fields))


def one(user: str, assistant: str) -> list[ChatExchange]:
    """A topic's result when it is a single exchange."""
    return [ChatExchange(user, assistant)]


def join_and(items: Sequence[str]) -> str:
    """Items as people list them: a, b and c."""
    if len(items) < 2:
        return "".join(items)
    return ", ".join(items[:-1]) + " and " + items[-1]
