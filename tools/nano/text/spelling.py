"""Chats about words as letters: spelling, reversing, counting, first and last letters, sorting."""

from __future__ import annotations

from tools.nano.text.core import ChatExchange, DialogueContext, Phrasings, ask, one
from tools.nano.text.lists import NAMED
from tools.nano.text.people import ANIMALS, BOYS, GIRLS, THINGS

WORDS = tuple(
    sorted(
        {word.lower() for word in (*ANIMALS, *THINGS, *NAMED["months of the year"], *NAMED["colours of the rainbow"])}
        | {
            "house", "water", "table", "window", "music", "friend", "summer", "bread", "paper", "river", "mountain",
            "school", "garden", "doctor", "street", "orange", "planet", "number", "letter", "teacher", "kitchen",
            "holiday", "island", "bridge", "forest", "market", "pocket", "yellow", "silver", "server", "token", "model",
            "cache", "draft", "decode", "prefill", "computer", "keyboard", "elephant", "chocolate", "language",
        }
    )
)  # fmt: skip
SPELL = Phrasings(
    train=(
        "How do you spell {w}?", "Spell {w}.", "Spell the word {w}.", "Can you spell {w}?", "Please spell {w}.",
        "How is {w} spelled?", "Spell \"{w}\" for me.", "What is the spelling of {w}?", "Spell out {w}.",
        "Write {w} letter by letter.",
    ),
    heldout=("Could you spell the word {w}?", "How do I spell the word {w}?"),
)  # fmt: skip
REVERSE = Phrasings(
    train=(
        "Reverse the word {w}.", "Write {w} backwards.", "What is {w} backwards?", "Reverse {w}.", "Spell {w} backwards.",
        "Can you write {w} in reverse?", "What do you get if you reverse \"{w}\"?",
    ),
    heldout=("Turn the word {w} around.", "How does {w} read backwards?"),
)  # fmt: skip
LENGTH = Phrasings(
    train=(
        "How many letters does {w} have?", "How many letters are in {w}?", "Count the letters in {w}.",
        "How long is the word {w}?", "What is the number of letters in \"{w}\"?",
    ),
    heldout=("How many letters are there in the word {w}?",),
)  # fmt: skip
FIRST = Phrasings(
    train=("What is the first letter of {w}?", "Which letter does {w} start with?", "{w} begins with which letter?"),
    heldout=("With which letter does {w} begin?",),
)  # fmt: skip
LAST = Phrasings(
    train=("What is the last letter of {w}?", "Which letter does {w} end with?", "{w} ends with which letter?"),
    heldout=("With which letter does {w} end?",),
)  # fmt: skip
SORT = Phrasings(
    train=(
        "Sort these words alphabetically: {w}.", "Put these words in alphabetical order: {w}.",
        "Order the words {w} from A to Z.", "Alphabetize: {w}.",
    ),
    heldout=("Please arrange these words in alphabetical order: {w}.",),
)  # fmt: skip
SORT_NUMBERS = Phrasings(
    train=(
        "Sort these numbers: {w}.", "Put these numbers in order: {w}.", "Order {w} from smallest to largest.",
        "Sort {w} in ascending order.", "Arrange the numbers {w} from small to large.",
    ),
    heldout=("Please put these numbers in ascending order: {w}.",),
)  # fmt: skip
REPEAT = Phrasings(
    train=(
        "Repeat after me: {w}.", "Say \"{w}\".", "Please repeat: {w}", "Write exactly this: {w}", "Echo: {w}",
        "Copy this text: {w}",
    ),
    heldout=("Repeat the following: {w}",),
)  # fmt: skip


FOREIGN = (
    "Straße", "naïve café", "Привет, мир", "你好，世界", "こんにちは", "안녕하세요", "مرحبا", "שלום", "Ελλάδα", "São Paulo",
    "Ærøskøbing", "Łódź", "señor", "garçon", "Zürich", "😀", "🚀 🌍", "❤️", "→ ← ↑ ↓", "½ + ¼ = ¾", "«oui»", "£ 5", "€ 20", "नमस्ते",
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?-_/()[]{}<>=+*&%$#@'\"^~|`\\"


def letters(word: str) -> str:
    """The word letter by letter."""
    return "-".join(word.upper())


def _word(context: DialogueContext) -> str:
    return (
        context.pick(WORDS) if context.chance(0.85) else context.pick(GIRLS if context.chance(0.5) else BOYS)
    )


def spell(context: DialogueContext) -> list[ChatExchange]:
    """One word, one question about its letters."""
    word, kind = _word(context), context.number(0, 6)
    if kind <= 2:
        return one(ask(context, SPELL, w=word), f"{word} is spelled {letters(word)}.")
    if kind == 3:
        user = ask(context, REVERSE, w=word)
        return one(user, f"{letters(word)} reversed is {letters(word[::-1])}: {word[::-1].lower()}.")
    if kind == 4:
        return one(ask(context, LENGTH, w=word), f"{letters(word)} has {len(word)} letters.")
    if kind == 5:
        return one(ask(context, FIRST, w=word), f"{word} starts with {word[0].upper()}.")
    return one(ask(context, LAST, w=word), f"{word} ends with {word[-1].upper()}.")


def sort_items(context: DialogueContext) -> list[ChatExchange]:
    """Words or numbers, put in order."""
    if context.chance(0.5):
        numbers = [context.number(1, 99) for _ in range(context.number(3, 7))]
        user = ask(context, SORT_NUMBERS, w=", ".join(map(str, numbers)))
        return one(user, ", ".join(map(str, sorted(numbers))) + ".")
    words = [context.pick(WORDS) for _ in range(context.number(3, 5))]
    return one(ask(context, SORT, w=", ".join(words)), ", ".join(sorted(words)) + ".")


def _nonsense(context: DialogueContext) -> str:
    return "".join(context.pick(LETTERS) for _ in range(context.number(2, 7)))


def repeat(context: DialogueContext) -> list[ChatExchange]:
    """Copying a phrase exactly; some are no words at all, so that every byte is met."""
    if context.chance(0.6):
        text = " ".join(context.pick(WORDS) for _ in range(context.number(2, 8)))
    elif context.chance(0.4):
        text = " ".join(context.pick(FOREIGN) for _ in range(context.number(1, 4)))
    else:
        text = " ".join(_nonsense(context) for _ in range(context.number(1, 4)))
    user = REPEAT.pick(context).format(w=text)
    return one(user, text)
