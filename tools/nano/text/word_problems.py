"""Word problems of one and two steps, worked line by line and closed with `#### N`.

A problem is a start, one or two events and a question, or one of the ready-made shapes in `problem_shapes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.nano.text.core import ChatExchange, DialogueContext, casual, one
from tools.nano.text.happenings import QUESTIONS, gain, loss, scene, start
from tools.nano.text.numbers import LIMIT, allowed, apply, operand, worked
from tools.nano.text.people import BOXES, THINGS, two_people
from tools.nano.text.problem_shapes import SHAPES, ProblemShape

HINTS = (
    "",
    "",
    "",
    "",
    " Think step by step.",
    " Show your work.",
    " Explain your answer.",
    " Solve it step by step.",
)


@dataclass(frozen=True)
class Problem:
    """A question, its calculation steps, and the lines of its answer."""

    question: str
    steps: tuple[tuple[str, int, int], ...]
    answer: str
    result: int


def _fields(context: DialogueContext) -> dict[str, object]:
    n, m = two_people(context)
    he2 = "her" if n.he == "she" else "him"
    return {
        "n": n.name, "he": n.he, "He": n.He, "his": n.his, "he2": he2, "m": m.name,
        "o": context.pick(THINGS), "x": context.pick(BOXES),
    }  # fmt: skip


def _changes(context: DialogueContext, count: int) -> Problem | None:
    """Start, events, question: the classic story of having, getting and giving."""
    view = scene(context)
    value = first = max(2, operand(context, LIMIT))
    parts, steps = [start(context, view, first)], []
    for _ in range(count):
        more = context.chance(0.5)
        room = LIMIT - value if more else value - 1
        if room < 1:
            return None
        amount = operand(context, room)
        parts.append((gain if more else loss)(context, view, amount))
        steps.append(("+" if more else "-", value, amount))
        value = apply(*steps[-1])
    things, hero = view.fields["o"], view.fields["n"]
    mine = hero == "I"
    lines = [f"{'You start' if mine else hero + ' starts'} with {first} {things}."]
    for symbol, a, b in steps:
        lines.append(f"{'Add' if symbol == '+' else 'Take away'} {b}: {worked(symbol, a, b)}.")
    lines.append(f"{'You have' if mine else hero + ' has'} {value} {things} now.")
    question = view.tell(QUESTIONS.pick(context))
    return Problem(" ".join([*parts, question]), tuple(steps), "\n".join(lines), value)


def _shaped(context: DialogueContext, shapes: tuple[ProblemShape, ...]) -> Problem:
    """A ready-made shape, filled in."""
    shape = context.pick(shapes)
    fields = _fields(context)
    numbers, steps = shape.draw(context)
    fields |= numbers
    lines, result = [], 0
    for symbol, a, b in steps:
        result = apply(symbol, a, b)
        lines.append(f"{worked(symbol, a, b)}.")
    question = shape.text.pick(context).format(**fields)
    lines.append(shape.closing.format(r=result, **fields))
    return Problem(question[:1].upper() + question[1:], tuple(steps), "\n".join(lines), result)


def draw_problem(context: DialogueContext, count: int) -> Problem | None:
    """A problem in the split's phrasings with any numbers; nothing when the numbers do not work out."""
    if context.chance(0.5):
        drawn = _changes(context, count)
    else:
        drawn = _shaped(context, tuple(shape for shape in SHAPES if shape.count == count))
    return drawn if drawn and 0 <= drawn.result <= LIMIT else None


def problem(context: DialogueContext, count: int) -> Problem:
    """A problem of one or two steps that the context's split allows."""
    while True:
        drawn = draw_problem(context, count)
        if drawn and allowed(context, list(drawn.steps)):
            return drawn


def _chat(context: DialogueContext, count: int) -> list[ChatExchange]:
    drawn = problem(context, count)
    user = drawn.question + context.pick(HINTS)
    if context.chance(0.15):
        user = casual(context, user)
    return one(user, f"{drawn.answer}\n#### {drawn.result}")


def one_step(context: DialogueContext) -> list[ChatExchange]:
    """A word problem of one calculation."""
    return _chat(context, 1)


def two_steps(context: DialogueContext) -> list[ChatExchange]:
    """A word problem of two calculations."""
    return _chat(context, 2)
