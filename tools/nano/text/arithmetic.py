"""Chats that ask for plain arithmetic: direct, step by step, chained and compared."""

from __future__ import annotations

from tools.nano.text.core import ChatExchange, DialogueContext, Phrasings, TextSplit, ask, casual, one
from tools.nano.text.numbers import LIMIT, SYMBOLS, allowed, apply, large_product_pair, operand, pair, worked

SPOKEN = {
    "+": ("+", "+", "plus"),
    "-": ("-", "-", "minus"),
    "*": ("*", "x", "times", "×", "multiplied by"),
    "/": ("/", "divided by", "÷"),
}
DIRECT = Phrasings(
    train=(
        "What is {e}?", "What's {e}?", "{e} = ?", "{e}", "Calculate {e}.", "Compute {e}.", "How much is {e}?",
        "Tell me {e}.", "Work out {e}.", "Solve {e}.", "Can you calculate {e}?", "What does {e} give?",
        "Give me the result of {e}.", "{e} equals?", "What do you get for {e}?", "Find {e}.", "{e}?",
        "What is the value of {e}?", "I need the answer to {e}.", "Evaluate {e}.", "{e} is how much?",
    ),
    heldout=("What does {e} equal?", "Please calculate {e} for me.", "What is the result of {e}?", "{e} makes what?"),
)  # fmt: skip
STEPWISE = Phrasings(
    train=(
        "What is {e}? Show your work.", "Calculate {e} step by step.", "Work out {e} and show the steps.",
        "Explain how to compute {e}.", "Solve {e} step by step.", "How do I calculate {e}?", "Show me how {e} is done.",
        "What is {e}? Think step by step.", "Please explain {e} slowly.",
    ),
    heldout=("Can you show me the steps for {e}?", "Compute {e} and explain each step."),
)  # fmt: skip
FOLLOW = Phrasings(
    train=(
        "Now {v}.", "And now {v}.", "{v}, please.", "Then {v}.", "What if you {v}?", "Okay, {v}.", "Can you {v}?",
        "Take that and {v}.", "{v}", "What do you get if you {v}?",
    ),
    heldout=("Please {v} now.", "From that result, {v}."),
)  # fmt: skip
COMPARE = Phrasings(
    train=(
        "Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?", "Is {a} larger than {b}?",
        "What is the greater of {a} and {b}?", "Compare {a} and {b}.", "Which is more, {a} or {b}?",
    ),
    heldout=("Which of {a} and {b} is the larger number?", "Between {a} and {b}, which is greater?"),
)  # fmt: skip
PARITY = Phrasings(
    train=(
        "Is {a} even or odd?", "Is {a} an even number?", "Is {a} odd?", "Tell me if {a} is even or odd.",
        "Is the number {a} odd or even?",
    ),
    heldout=("Would you say {a} is odd or even?",),
)  # fmt: skip
VERBS = {
    "+": ("add {b}", "add {b} to that", "add {b} more", "increase it by {b}"),
    "-": ("subtract {b}", "take away {b}", "subtract {b} from that", "minus {b}"),
}


def expression(context: DialogueContext, symbol: str, a: int, b: int) -> str:
    """The calculation as a user may type it."""
    spoken = context.pick(SPOKEN[symbol])
    if len(spoken) == 1 and context.chance(0.2):
        return f"{a}{spoken}{b}"
    return f"{a} {spoken} {b}"


def direct(context: DialogueContext) -> list[ChatExchange]:
    """One calculation, answered in one line, and calculations that continue from its result."""
    symbol = context.pick(SYMBOLS)
    a, b = pair(context, symbol)
    if context.split is TextSplit.TRAIN and symbol == "*" and context.chance(0.25):
        a, b = large_product_pair(context)
    value = apply(symbol, a, b)
    answer = worked(symbol, a, b)
    chat = one(casual(context, DIRECT.pick(context).format(e=expression(context, symbol, a, b))), answer)
    while len(chat) < 4 and context.chance(0.3):
        symbol = "+" if value < 100 or (value < LIMIT - 10 and context.chance(0.5)) else "-"
        other = operand(context, LIMIT - value if symbol == "+" else value)
        if not allowed(context, [(symbol, value, other)]):
            break
        verb = context.pick(VERBS[symbol]).format(b=other)
        user = casual(context, FOLLOW.pick(context).format(v=verb))
        chat.append(ChatExchange(user[:1].upper() + user[1:], worked(symbol, value, other)))
        value = apply(symbol, value, other)
    return chat


def stepwise(context: DialogueContext) -> list[ChatExchange]:
    """One calculation with its working, closed with the answer line."""
    symbol = context.pick(SYMBOLS)
    a, b = pair(context, symbol)
    user = ask(context, STEPWISE, e=expression(context, symbol, a, b))
    return one(user, f"{worked(symbol, a, b)}.\n#### {apply(symbol, a, b)}")


def compare(context: DialogueContext) -> list[ChatExchange]:
    """The larger of two numbers."""
    a, b = context.number(1, LIMIT), context.number(1, LIMIT)
    if a == b:
        return parity(context)
    return one(ask(context, COMPARE, a=a, b=b), f"{max(a, b)} is larger than {min(a, b)}.")


def parity(context: DialogueContext) -> list[ChatExchange]:
    """Even or odd, with the reason."""
    a = context.number(0, LIMIT)
    kind = "odd" if a % 2 else "even"
    return one(ask(context, PARITY, a=a), f"{a} is {kind}, because its last digit is {a % 10}.")


def table(context: DialogueContext) -> list[ChatExchange]:
    """A multiplication table: a longer answer."""
    a = context.number(2, 12)
    phrasing = Phrasings(
        train=(
            "Write the multiplication table of {a}.", "Show me the {a} times table.", "List the multiples of {a}.",
            "Give me the times table for {a}.", "What is the {a} times table?", "Recite the table of {a}.",
        ),
        heldout=("Print the {a} times table.", "Can you write out the multiplication table for {a}?"),
    )  # fmt: skip
    lines = "\n".join(f"{a} * {i} = {a * i}" for i in range(1, 11))
    return one(ask(context, phrasing, a=a), lines)
