"""Word problems of one and two steps, worked line by line and closed with `#### N`.

A problem is a start, one or two events and a question, or one of the ready-made shapes in
`problem_shapes`. Knows how stories are told; the working lives in `numbers`.
"""

from __future__ import annotations

from dataclasses import dataclass

from eyas.train.text.core import Context, Exchange, Phrasings, casual, one
from eyas.train.text.numbers import LIMIT, allowed, apply, operand, worked
from eyas.train.text.people import BOXES, PLACES, THINGS, Person, two_people
from eyas.train.text.problem_shapes import SHAPES, Shape

STARTS = Phrasings(
    train=(
        "{n} has {a} {o}.", "{n} had {a} {o}.", "{n} owns {a} {o}.", "{n} starts with {a} {o}.",
        "There are {a} {o} in {n}'s bag.", "{n} keeps {a} {o} in a box.", "{n} collected {a} {o}.",
        "At first {n} has {a} {o}.", "In the morning {n} has {a} {o}.", "{n} found {a} {o} at {p}.",
        "{n} bought {a} {o} at {p}.", "{n} brings {a} {o} to {p}.", "{n} has a collection of {a} {o}.",
        "Yesterday {n} had {a} {o}.", "On Monday {n} had {a} {o}.",
    ),
    held=("{n} is the owner of {a} {o}.", "{n} went to {p} with {a} {o}.", "{n} counted {a} {o} at home."),
)  # fmt: skip
GAINS = Phrasings(
    train=(
        "{He} buys {b} more.", "{He} gets {b} more {o}.", "{m} gives {he2} {b} more {o}.", "Then {he} finds {b} more.",
        "Later {he} buys another {b} {o}.", "{He} receives {b} {o} from {m}.", "{m} brings {he2} {b} more.",
        "Then {he} collects {b} more {o}.", "{He} wins {b} {o} in a game.", "Then {m} gives {n} {b} {o}.",
        "{His} friend gives {he2} {b} more.", "{He} picks up {b} more {o} at {p}.", "{He} adds {b} {o}.",
        "{His} mother gives {he2} {b} {o}.", "After that {n} gets {b} {o} as a present.", "The next day {he} finds {b} {o}.",
    ),
    held=("{His} uncle hands {he2} {b} more {o}.", "In the evening {n} buys {b} additional {o}."),
)  # fmt: skip
LOSSES = Phrasings(
    train=(
        "{He} gives {b} to {m}.", "{He} loses {b} of them.", "{He} gives {m} {b} {o}.", "Then {he} sells {b} of the {o}.",
        "{He} gives away {b} {o}.", "Later {he} loses {b} {o} at {p}.", "{m} takes {b} of them.", "{b} of them break.",
        "Then {n} hands {b} {o} to {m}.", "{He} uses {b} of them.", "{He} throws away {b} {o}.", "{He} sells {b}.",
        "After that {b} {o} get lost.", "{He} leaves {b} {o} at {p}.", "The next day {he} gives {b} {o} to a friend.",
        "{He} donates {b} {o}.", "Then {b} of the {o} are stolen.",
    ),
    held=("{m} borrows {b} of the {o}.", "In the evening {n} sells {b} {o}."),
)  # fmt: skip
QUESTIONS = Phrasings(
    train=(
        "How many {o} does {n} have now?", "How many {o} does {he} have now?", "How many {o} are there now?",
        "How many {o} does {n} have in the end?", "What number of {o} does {n} have now?", "How many {o} is that?",
        "How many does {he} have now?", "How many {o} does {n} have at the end?", "How many {o} has {n} now?",
        "Count {n}'s {o} now.", "Find how many {o} {n} has now.", "How many {o} does {n} have altogether?",
    ),
    held=("What is the number of {o} that {n} has now?", "So how many {o} does {n} end up with?"),
)  # fmt: skip
HINTS = ("", "", "", "", " Think step by step.", " Show your work.", " Explain your answer.", " Solve it step by step.")


@dataclass(frozen=True)
class Problem:
    """A question, its calculation steps, and the lines of its answer."""

    question: str
    steps: tuple[tuple[str, int, int], ...]
    answer: str
    result: int


def _fields(context: Context) -> dict[str, object]:
    n, m = two_people(context)
    return _person_fields(n) | {"m": m.name, "o": context.pick(THINGS), "p": context.pick(PLACES), "x": context.pick(BOXES)}


def _person_fields(n: Person) -> dict[str, object]:
    he2 = "her" if n.he == "she" else "him"
    return {"n": n.name, "he": n.he, "He": n.He, "his": n.his, "His": n.his.capitalize(), "he2": he2}


def _event(context: Context, value: int, fields: dict[str, object]) -> tuple[str, tuple[str, int, int]] | None:
    gain = context.chance(0.5)
    room = LIMIT - value if gain else value - 1
    if room < 1:
        return None
    b = operand(context, room)
    text = (GAINS if gain else LOSSES).pick(context).format(b=b, **fields)
    return text[:1].upper() + text[1:], ("+" if gain else "-", value, b)


def _changes(context: Context, count: int) -> Problem | None:
    """Start, events, question: the classic story of having, getting and giving."""
    fields = _fields(context)
    value = start = max(2, operand(context, LIMIT))
    parts, steps = [STARTS.pick(context).format(a=start, **fields)], []
    for _ in range(count):
        event = _event(context, value, fields)
        if event is None:
            return None
        parts.append(event[0])
        steps.append(event[1])
        value = apply(*event[1])
    question = QUESTIONS.pick(context).format(**fields)
    lines = [f"{fields['n']} starts with {start} {fields['o']}."]
    for symbol, a, b in steps:
        lines.append(f"{'Add' if symbol == '+' else 'Take away'} {b}: {worked(symbol, a, b)}.")
    lines.append(f"{fields['n']} has {value} {fields['o']} now.")
    return Problem(" ".join([*parts, question]), tuple(steps), "\n".join(lines), value)


def _shaped(context: Context, shapes: tuple[Shape, ...]) -> Problem:
    """A ready-made shape, filled in."""
    shape = context.pick(shapes)
    fields = _fields(context)
    numbers, steps = shape.draw(context)
    fields |= numbers
    lines, result = [], 0
    for symbol, a, b in steps:
        result = apply(symbol, a, b)
        lines.append(f"{worked(symbol, a, b)}.")
    asked = shape.text.pick(context).format(**fields)
    lines.append(shape.closing.format(r=result, **fields))
    return Problem(asked[:1].upper() + asked[1:], tuple(steps), "\n".join(lines), result)


def draw_problem(context: Context, count: int) -> Problem | None:
    """A problem in the split's phrasings with any numbers; nothing when the numbers do not work out."""
    if context.chance(0.5):
        found = _changes(context, count)
    else:
        found = _shaped(context, tuple(shape for shape in SHAPES if shape.count == count))
    return found if found and 0 <= found.result <= LIMIT else None


def problem(context: Context, count: int) -> Problem:
    """A problem of one or two steps that the context's split allows."""
    while True:
        found = draw_problem(context, count)
        if found and allowed(context, list(found.steps)):
            return found


def _chat(context: Context, count: int) -> list[Exchange]:
    found = problem(context, count)
    user = found.question + context.pick(HINTS)
    if context.chance(0.15):
        user = casual(context, user)
    return one(user, f"{found.answer}\n#### {found.result}")


def one_step(context: Context) -> list[Exchange]:
    """A word problem of one calculation."""
    return _chat(context, 1)


def two_steps(context: Context) -> list[Exchange]:
    """A word problem of two calculations."""
    return _chat(context, 2)
