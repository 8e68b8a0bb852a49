"""Word problems of one and two steps, worked line by line and closed with `#### N`.

A problem tells the events of a collection (a start, one or two gains or losses, and a question), or it has
one of the ready-made shapes in `problem_shapes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.nano.text.core import ChatExchange, DialogueContext, Phrasings, TextSplit, casual, one
from tools.nano.text.numbers import LIMIT, allowed, apply, operand, worked
from tools.nano.text.people import BOXES, PLACES, THINGS, person, two_people
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


def _verbs(table: str) -> tuple[tuple[str, ...], ...]:
    """Verbs as (with I, with he, past)."""
    return tuple(tuple(verb.strip().split("|")) for verb in table.split(","))


HAVE = _verbs("have|has|had, have|has|had, have|has|had, own|owns|owned, keep|keeps|kept, collect|collects|collected, "
              "buy|buys|bought, find|finds|found, count|counts|counted, start with|starts with|started with, hold|holds|held")  # fmt: skip
GAIN = _verbs("buy|buys|bought, get|gets|got, find|finds|found, receive|receives|received, collect|collects|collected, "
              "win|wins|won, pick up|picks up|picked up, make|makes|made, earn|earns|earned, add|adds|added, "
              "gather|gathers|gathered, borrow|borrows|borrowed, order|orders|ordered, discover|discovers|discovered")  # fmt: skip
LOSE = _verbs("lose|loses|lost, sell|sells|sold, give away|gives away|gave away, eat|eats|ate, drop|drops|dropped, "
              "break|breaks|broke, use|uses|used, throw away|throws away|threw away, donate|donates|donated, hide|hides|hid, "
              "remove|removes|removed, return|returns|returned, forget|forgets|forgot, spend|spends|spent, leave|leaves|left")  # fmt: skip
HAND = _verbs(
    "give|gives|gave, hand|hands|handed, send|sends|sent, bring|brings|brought, lend|lends|lent, offer|offers|offered"
)
TAKE = _verbs(
    "take|takes|took, borrow|borrows|borrowed, steal|steals|stole, eat|eats|ate, get|gets|got, need|needs|needed"
)
RELATIVES = (
    "mother", "father", "sister", "brother", "aunt", "friend", "teacher", "neighbour", "cousin", "grandmother",
)  # fmt: skip
TIMES = (
    "", "", "", "", "Then ", "Later ", "After that ", "The next day ", "On Tuesday ", "In the afternoon ", "At {p} ",
    "Today ", "A little later ", "One hour later ", "In the morning ", "Next ",
)  # fmt: skip
MORE = (
    "{b} more", "{b} more", "{b} more {o}", "{b} more {o}", "another {b}", "another {b} {o}", "{b} additional {o}",
    "{b} extra {o}", "{b} new {o}", "{b} {o}",
)  # fmt: skip
SOME = ("{b}", "{b} of them", "{b} {o}", "{b} of the {o}", "{b} of {his} {o}")
TAILS = ("", "", "", " at {p}", " on the way home", " by accident")
QUESTIONS = Phrasings(
    train=(
        "How many {o} {does} {n} have now?", "How many {o} {does} {he} have now?", "How many {o} are there now?",
        "How many {o} {does} {n} have in the end?", "What number of {o} {does} {n} have now?", "How many {o} is that?",
        "How many {does} {he} have now?", "How many {o} {does} {n} have at the end?", "How many are there now?",
        "Find how many {o} {n} {has} now.", "How many {o} {does} {n} have altogether?", "How many {o} are left?",
        "How many {o} {does} {he} still have?", "With how many {o} {does} {n} end up?", "How many {o} remain?",
        "What is the total number of {o} now?", "So how many {o} {does} {he} have?", "How many {o} {does} that make?",
        "Tell me how many {o} {n} {has} at the end.", "How many {does} {n} have left?", "Now {n} {has} how many {o}?",
    ),
    heldout=("What is the number of {o} that {n} {has} now?", "So how many {o} {does} {n} end up with?"),
)  # fmt: skip
STARTS_HELDOUT = (
    "{n} {is} the owner of {a} {o}.",
    "{n} went to {p} with {a} {o}.",
    "{n} counted {a} {o} at home.",
)
GAINS_HELDOUT = ("{His} uncle hands {him} {b} more {o}.", "In the evening {n} {buys} {b} additional {o}.")
LOSSES_HELDOUT = ("In the evening {n} {sells} {b} {o}.", "In the evening {m} borrows {b} of {his} {o}.")
PRONOUNS = {"she": ("her", "her"), "he": ("his", "him")}


@dataclass(frozen=True)
class StoryScene:
    """A scene: who has what, told in which person and tense; `form` picks a verb's form for the hero."""

    fields: dict[str, str]
    form: int
    past: bool

    @property
    def other(self) -> int:
        """The verb form of anybody but the hero."""
        return 2 if self.past else 1

    def tell(self, text: str, **numbers: int) -> str:
        """A sentence of this scene, its first letter large."""
        said = text.format(**self.fields, **numbers)
        return said[:1].upper() + said[1:]


def scene(context: DialogueContext) -> StoryScene:
    """A hero (sometimes the user), another person, things and a place."""
    hero, other = two_people(context)
    past, mine = context.chance(0.4), context.chance(0.2)
    his, him = PRONOUNS[hero.he]
    fields = {
        "n": hero.name, "he": hero.he, "his": his, "him": him, "m": other.name, "o": context.pick(THINGS),
        "p": context.pick(PLACES), "is": "is", "has": "has", "does": "does", "buys": "buys", "sells": "sells",
    }  # fmt: skip
    if mine:
        fields |= {"n": "I", "he": "I", "his": "my", "him": "me", "is": "am", "has": "have", "does": "do",
                   "buys": "buy", "sells": "sell"}  # fmt: skip
    fields["His"] = fields["his"].capitalize()
    return StoryScene(fields, 2 if past else 0 if mine else 1, past)


def start(context: DialogueContext, view: StoryScene, amount: int) -> str:
    """The hero has something."""
    if context.split is TextSplit.HELDOUT:
        return view.tell(context.pick(STARTS_HELDOUT), a=amount)
    verb = context.pick(HAVE)[view.form]
    shape = context.pick((
        "{n} " + verb + " {a} {o}.", "{n} " + verb + " {a} {o}.", "At first {n} " + verb + " {a} {o}.",
        "{n} " + verb + " {a} {o} at {p}.", "There are {a} {o} in {his} bag, and {n} {has} no others.",
        "In the morning {n} " + verb + " {a} {o}.", "On Monday {n} " + verb + " {a} {o}.",
        "{n} {has} a collection of {a} {o}.", "{n} {has} a box with {a} {o}.",
    ))  # fmt: skip
    return view.tell(shape, a=amount)


def gain(context: DialogueContext, view: StoryScene, amount: int) -> str:
    """The hero gets more."""
    if context.split is TextSplit.HELDOUT:
        return view.tell(context.pick(GAINS_HELDOUT), b=amount)
    time, more = context.pick(TIMES), context.pick(MORE)
    if context.chance(0.6):
        verb = context.pick(GAIN)[view.form]
        source = context.pick(("", "", " from {m}", " at {p}", " as a present", " in a game"))
        return view.tell(f"{time}{context.pick(('{he}', '{he}', '{n}'))} {verb} {more}{source}.", b=amount)
    giver = context.pick(("{m}", "{his} " + context.pick(RELATIVES)))
    return view.tell(f"{time}{giver} {context.pick(HAND)[view.other]} {{him}} {more}.", b=amount)


def loss(context: DialogueContext, view: StoryScene, amount: int) -> str:
    """The hero has less."""
    if context.split is TextSplit.HELDOUT:
        return view.tell(context.pick(LOSSES_HELDOUT), b=amount)
    time, some, kind = context.pick(TIMES), context.pick(SOME), context.number(0, 9)
    hero = context.pick(("{he}", "{he}", "{n}"))
    if kind < 5:
        return view.tell(
            f"{time}{hero} {context.pick(LOSE)[view.form]} {some}{context.pick(TAILS)}.", b=amount
        )
    if kind < 7:
        taker = context.pick(("{m}", "{his} " + context.pick(RELATIVES)))
        return view.tell(f"{time}{hero} {context.pick(HAND)[view.form]} {some} to {taker}.", b=amount)
    if kind == 7:
        return view.tell(
            f"{time}{hero} {context.pick(HAND)[view.form]} {person(context).name} {some}.", b=amount
        )
    if kind == 8:
        taker = context.pick(("{m}", "{his} " + context.pick(RELATIVES)))
        return view.tell(f"{time}{taker} {context.pick(TAKE)[view.other]} {some}.", b=amount)
    fate = context.pick(
        ("break", "get lost", "fall down", "are stolen", "are eaten", "disappear", "are sold", "are bad")
    )
    return view.tell(f"{time}{some.replace('{his}', 'the')} {fate}.", b=amount)
