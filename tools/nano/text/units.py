"""Unit conversions of length, weight, volume, time and money, with one line of working."""

from __future__ import annotations

from tools.nano.text.core import ChatExchange, DialogueContext, Phrasings, ask, one

FACTORS = (
    ("meters", "centimeters", 100, 9), ("kilometers", "meters", 1000, 90), ("centimeters", "millimeters", 10, 99),
    ("kilograms", "grams", 1000, 90), ("tons", "kilograms", 1000, 90), ("liters", "milliliters", 1000, 90),
    ("hours", "minutes", 60, 12), ("minutes", "seconds", 60, 12), ("days", "hours", 24, 12), ("weeks", "days", 7, 20),
    ("years", "months", 12, 20), ("decades", "years", 10, 30), ("centuries", "years", 100, 20), ("feet", "inches", 12, 20),
    ("yards", "feet", 3, 30), ("dollars", "cents", 100, 50), ("euros", "cents", 100, 50), ("dozens", "pieces", 12, 20),
    ("kilobytes", "bytes", 1000, 90), ("gigabytes", "megabytes", 1000, 90), ("gallons", "quarts", 4, 30),
    ("pounds", "ounces", 16, 12), ("meters", "millimeters", 1000, 90), ("grams", "milligrams", 1000, 90),
)  # fmt: skip
IRREGULAR = {"feet": "foot", "inches": "inch", "centuries": "century"}
CONVERT = Phrasings(
    train=(
        "How many {s} are in {n} {l}?", "Convert {n} {l} to {s}.", "{n} {l} in {s}?", "What is {n} {l} in {s}?",
        "How many {s} is {n} {l}?", "{n} {l} is how many {s}?", "How many {s} make {n} {l}?", "Express {n} {l} in {s}.",
        "Change {n} {l} into {s}.", "How many {s} do {n} {l} have?", "Please convert {n} {l} into {s}.",
        "I have {n} {l}. How many {s} is that?", "What do {n} {l} come to in {s}?", "{n} {l} to {s}",
    ),
    heldout=("Turn {n} {l} into {s}.", "How many {s} are there in {n} {l}?", "What would {n} {l} be in {s}?"),
)  # fmt: skip


def singular(unit: str) -> str:
    """One of a unit."""
    return IRREGULAR.get(unit, unit.removesuffix("s"))


def counted(number: int, unit: str) -> str:
    """A number with its unit."""
    return f"{number} {singular(unit) if number == 1 else unit}"


def convert(context: DialogueContext) -> list[ChatExchange]:
    """Large unit to small, or back when it comes out whole."""
    large, small, factor, most = context.pick(FACTORS)
    number = context.number(1, most)
    rule = f"1 {singular(large)} is {factor} {small}"
    if context.chance(0.6):
        user = ask(context, CONVERT, n=number, l=large if number > 1 else singular(large), s=small)
        return one(
            user, f"{rule}, so {counted(number, large)} = {number} * {factor} = {number * factor} {small}."
        )
    total = number * factor
    user = ask(context, CONVERT, n=total, l=small, s=large)
    return one(user, f"{rule}, so {total} {small} = {total} / {factor} = {counted(number, large)}.")
