"""Lists that people know by heart: days, months, planets, colours, primes, counting, the alphabet."""

from __future__ import annotations

from tools.nano.text.core import ChatExchange, DialogueContext, Phrasings, ask, one

LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
NAMED = {
    "days of the week": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "months of the year": (
        "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
        "November", "December",
    ),
    "planets of the solar system": (
        "Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune",
    ),
    "colours of the rainbow": ("red", "orange", "yellow", "green", "blue", "indigo", "violet"),
    "four seasons": ("spring", "summer", "autumn", "winter"),
    "continents": ("Africa", "Antarctica", "Asia", "Europe", "North America", "Oceania", "South America"),
    "oceans": ("the Pacific", "the Atlantic", "the Indian Ocean", "the Southern Ocean", "the Arctic Ocean"),
    "letters of the alphabet": LETTERS,
    "vowels": ("A", "E", "I", "O", "U"),
    "five senses": ("sight", "hearing", "smell", "taste", "touch"),
    "four compass directions": ("north", "east", "south", "west"),
    "primary colours": ("red", "yellow", "blue"),
    "notes of the C major scale": ("C", "D", "E", "F", "G", "A", "B"),
    "first ten prime numbers": ("2", "3", "5", "7", "11", "13", "17", "19", "23", "29"),
    "first ten square numbers": ("1", "4", "9", "16", "25", "36", "49", "64", "81", "100"),
    "first ten powers of two": ("1", "2", "4", "8", "16", "32", "64", "128", "256", "512"),
    "first ten Fibonacci numbers": ("0", "1", "1", "2", "3", "5", "8", "13", "21", "34"),
    "first ten even numbers": ("2", "4", "6", "8", "10", "12", "14", "16", "18", "20"),
    "first ten odd numbers": ("1", "3", "5", "7", "9", "11", "13", "15", "17", "19"),
    "prime numbers below 50": ("2", "3", "5", "7", "11", "13", "17", "19", "23", "29", "31", "37", "41", "43", "47"),
}  # fmt: skip
SAID = {
    "days of the week": ("days of the week", "weekdays from Monday to Sunday", "seven days of the week", "days"),
    "months of the year": ("months of the year", "twelve months", "months", "months in order"),
    "planets of the solar system": ("planets of the solar system", "planets", "eight planets", "planets in our solar system"),
    "colours of the rainbow": ("colours of the rainbow", "colors of the rainbow", "rainbow colours", "rainbow colors"),
    "four seasons": ("four seasons", "seasons", "seasons of the year"),
    "continents": ("continents", "seven continents", "continents of the world"),
    "oceans": ("oceans", "five oceans", "oceans of the world"),
    "letters of the alphabet": ("letters of the alphabet", "letters from A to Z", "alphabet letters"),
    "five senses": ("five senses", "human senses", "senses"),
    "four compass directions": ("four compass directions", "compass directions", "cardinal directions"),
    "primary colours": ("primary colours", "primary colors", "three primary colors"),
    "first ten prime numbers": ("first ten prime numbers", "first 10 primes", "first ten primes", "first 10 prime numbers"),
    "first ten square numbers": ("first ten square numbers", "first 10 squares", "first ten squares"),
    "first ten powers of two": ("first ten powers of two", "first 10 powers of 2"),
    "first ten Fibonacci numbers": ("first ten Fibonacci numbers", "first 10 Fibonacci numbers"),
    "first ten even numbers": ("first ten even numbers", "first 10 even numbers"),
    "first ten odd numbers": ("first ten odd numbers", "first 10 odd numbers"),
    "prime numbers below 50": ("prime numbers below 50", "primes below 50", "primes under 50"),
}  # fmt: skip
LIST_ALL = Phrasings(
    train=(
        "What are the {k}?", "List the {k}.", "Name the {k}.", "Tell me the {k}.", "Can you list the {k}?",
        "Give me the {k}.", "Write the {k}.", "Which are the {k}?", "I need a list of the {k}.", "Say the {k}.",
        "Can you name the {k}?", "Write down the {k}.", "Please list all the {k}.", "Recite the {k}.", "the {k}",
        "Do you know the {k}?", "Show me the {k}.", "Could you tell me the {k}?", "Name all the {k}.",
        "Help me learn the {k}.", "Enumerate the {k}.", "I want to learn the {k}.", "What are all the {k} called?",
        "Make a list of the {k}.", "I forgot the {k}. What are they?", "Print the {k}.", "{k}?", "list {k}",
    ),
    heldout=(
        "Could you list the {k} for me?", "Please name all of the {k}.", "Can you tell me what the {k} are?",
        "Please write out the {k}.", "I would like a list of the {k}.",
    ),
)  # fmt: skip
BACKWARDS = Phrasings(
    train=("Now backwards.", "And in reverse order?", "Can you reverse the list?", "Now in reverse, please.", "Say it backwards."),
    heldout=("Please give it in reverse order.",),
)  # fmt: skip
HOW_MANY = Phrasings(
    train=("How many is that?", "How many are there?", "And how many are there?", "Count them.", "How many did you list?"),
    heldout=("What is their number?",),
)  # fmt: skip
NUMBERED = Phrasings(
    train=("As a numbered list, please.", "Number them.", "Can you number the list?", "Put numbers in front."),
    heldout=("Make that a numbered list.",),
)  # fmt: skip
AFTER = Phrasings(
    train=(
        "What comes after {i}?", "Which comes after {i}?", "What follows {i}?", "What is next after {i}?",
        "{i} is followed by what?", "What is the one after {i}?", "What comes directly after {i}?",
    ),
    heldout=("What comes right after {i}?", "Tell me what follows {i}."),
)  # fmt: skip
BEFORE = Phrasings(
    train=(
        "What comes before {i}?", "Which comes before {i}?", "What precedes {i}?", "What is just before {i}?",
        "What is the one before {i}?", "What comes directly before {i}?",
    ),
    heldout=("What comes right before {i}?", "Tell me what precedes {i}."),
)  # fmt: skip
COUNT = Phrasings(
    train=(
        "Count from {a} to {b}.", "Can you count from {a} to {b}?", "Count {a} to {b}.", "Write the numbers from {a} to {b}.",
        "List the numbers from {a} to {b}.", "Please count from {a} up to {b}.", "Say the numbers {a} to {b}.",
        "Give me all numbers from {a} to {b}.", "Start at {a} and count to {b}.", "Print the numbers {a} to {b}.",
    ),
    heldout=("Could you count up from {a} to {b}?", "Please list all the numbers from {a} to {b}."),
)  # fmt: skip
COUNT_DOWN = Phrasings(
    train=(
        "Count down from {b} to {a}.", "Count backwards from {b} to {a}.", "Count from {b} down to {a}.",
        "Give me a countdown from {b} to {a}.", "List the numbers from {b} down to {a}.",
    ),
    heldout=("Please count backwards from {b} down to {a}.",),
)  # fmt: skip
COUNT_BY = Phrasings(
    train=(
        "Count by {s}s from {a} to {b}.", "Count in steps of {s} from {a} to {b}.", "Count from {a} to {b} in {s}s.",
        "List the numbers from {a} to {b} in steps of {s}.", "Skip count by {s} from {a} to {b}.",
    ),
    heldout=("From {a} to {b}, count in {s}s.",),
)  # fmt: skip
ORDERED = (
    "days of the week", "months of the year", "planets of the solar system", "letters of the alphabet",
)  # fmt: skip


def list_answer(name: str) -> str:
    """All items in order, in one line."""
    return ", ".join(NAMED[name]) + "."


def known(context: DialogueContext) -> list[ChatExchange]:
    """A whole list, then perhaps reversed, numbered or counted."""
    name = context.pick(tuple(NAMED))
    said = context.pick(SAID.get(name, (name,)))
    items = NAMED[name]
    chat = one(ask(context, LIST_ALL, k=said), list_answer(name))
    if context.chance(0.15):
        chat.append(ChatExchange(ask(context, HOW_MANY), f"There are {len(items)}."))
    if context.chance(0.12):
        chat.append(ChatExchange(ask(context, BACKWARDS), ", ".join(reversed(items)) + "."))
    elif context.chance(0.15):
        lines = "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))
        chat.append(ChatExchange(ask(context, NUMBERED), lines))
    return chat


def neighbour(context: DialogueContext) -> list[ChatExchange]:
    """A question about the item before or after one item."""
    items = NAMED[context.pick(ORDERED)]
    index = context.number(0, len(items) - 2)
    if context.chance(0.5):
        user = ask(context, AFTER, i=items[index])
        return one(user, f"{items[index + 1]} comes after {items[index]}.")
    return one(ask(context, BEFORE, i=items[index + 1]), f"{items[index]} comes before {items[index + 1]}.")


def counting(context: DialogueContext) -> list[ChatExchange]:
    """Counting up, down or in steps: a longer answer."""
    kind = context.number(0, 3)
    if kind == 3:
        step = context.pick((2, 3, 4, 5, 10, 20, 25))
        start = context.pick((0, step, step * context.number(1, 8)))
        stop = start + step * context.number(5, 20)
        user = ask(context, COUNT_BY, s=step, a=start, b=stop)
        return one(user, ", ".join(map(str, range(start, stop + 1, step))) + ".")
    start = context.pick((1, 1, 1, 0, context.number(2, 150)))
    stop = start + context.pick((4, 9, 9, 14, 19, 24, 29, 39, 49, 49, 59, context.number(3, 60)))
    numbers = [str(value) for value in range(start, stop + 1)]
    if kind == 2:
        return one(ask(context, COUNT_DOWN, a=start, b=stop), ", ".join(reversed(numbers)) + ".")
    return one(ask(context, COUNT, a=start, b=stop), ", ".join(numbers) + ".")
