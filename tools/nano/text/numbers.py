"""Arithmetic as it is worked on paper, and the pairs of numbers that training never sees."""

from __future__ import annotations

from tools.nano.text.core import DialogueContext, TextSplit

LIMIT = 999  # sums and differences stay below one thousand
SYMBOLS = ("+", "-", "*", "/")


def heldout_pair(symbol: str, a: int, b: int) -> bool:
    """True if this operand pair belongs to the held-out sets (one in ten of the pairs that need work).

    Pairs a person knows by heart (one digit, round numbers, the table up to twelve) are never held, and
    a division is held with the product that undoes it.
    """
    if symbol == "/":
        return heldout_pair("*", b, a // b)
    if symbol == "*":
        low, high = sorted((a, b))
        return low > 1 and 12 < high < 20 and low < 10 and (low * 31 + high * 17) % 10 == 3
    if min(a, b) < 11 or a % 10 == 0 or b % 10 == 0:
        return False
    if symbol == "+":
        low, high = sorted((a, b))
        return (low * 7919 + high * 104729) % 1009 % 10 == 3
    return (a * 7919 + b * 104729) % 1013 % 10 == 3


def apply(symbol: str, a: int, b: int) -> int:
    """The result of one step."""
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[symbol]


def allowed(context: DialogueContext, steps: list[tuple[str, int, int]]) -> bool:
    """True if a problem of these steps may appear in the context's split."""
    heldout = [heldout_pair(*step) for step in steps]
    return any(heldout) if context.split is TextSplit.HELDOUT else not any(heldout)


def operand(context: DialogueContext, high: int) -> int:
    """A number from 1 to high; small ones are more frequent, as in stories."""
    return context.number(1, min(high, context.pick((12, 30, 100, 100, 400, 999))))


def sum_pair(context: DialogueContext) -> tuple[int, int]:
    """Two numbers whose sum stays within the limit."""
    a = operand(context, LIMIT - 1)
    return a, operand(context, LIMIT - a)


def difference_pair(context: DialogueContext) -> tuple[int, int]:
    """Two numbers, the first at least as large as the second."""
    a = max(2, operand(context, LIMIT))
    return a, operand(context, a)


def product_pair(context: DialogueContext) -> tuple[int, int]:
    """Two factors, at most 12 by 20, in either order."""
    a, b = context.number(2, 12), context.number(2, 20)
    return (a, b) if context.chance(0.5) else (b, a)


def large_product_pair(context: DialogueContext) -> tuple[int, int]:
    """Two factors of two digits, as people try them on a calculator."""
    a = context.number(13, 31)
    return a, context.number(13, LIMIT // a)


def quotient_pair(context: DialogueContext) -> tuple[int, int]:
    """A dividend and a divisor that divides it."""
    divisor, quotient = context.number(2, 12), context.number(2, 20)
    return divisor * quotient, divisor


PAIRS = {"+": sum_pair, "-": difference_pair, "*": product_pair, "/": quotient_pair}


def pair(context: DialogueContext, symbol: str) -> tuple[int, int]:
    """Operands for one step that the context's split allows."""
    while True:
        a, b = PAIRS[symbol](context)
        if allowed(context, [(symbol, a, b)]):
            return a, b


def _places(value: int) -> list[int]:
    """The value by place, zeros left out: 347 -> 300, 40, 7."""
    parts = (value // 100 * 100, value // 10 % 10 * 10, value % 10)
    return [part for part in parts if part]


def _chain(symbol: str, a: int, b: int) -> list[str]:
    """Adding or taking away place by place."""
    steps = []
    for part in _places(b):
        steps.append(f"{a} {symbol} {part} = {apply(symbol, a, part)}")
        a = apply(symbol, a, part)
    return steps


def steps_of(symbol: str, a: int, b: int) -> list[str]:
    """The intermediate steps of one calculation; empty when the result is known by heart."""
    if symbol == "+":
        a, b = max(a, b), min(a, b)
        carries = any(a // place % 10 + b // place % 10 > 9 for place in (1, 10))
        return _chain("+", a, b) if carries and b > 9 else []
    if symbol == "-":
        borrows = any(a // place % 10 < b // place % 10 for place in (1, 10))
        return _chain("-", a, b) if borrows and b > 9 else []
    if symbol == "*":
        low, high = sorted((a, b))
        if high <= 10 or high == 20:
            return []
        tens, ones = (low // 10 * 10, low % 10) if low > 12 else (10, high - 10)
        other = high if low > 12 else low
        if ones == 0:
            return []
        return [f"{other} * {tens} = {other * tens}", f"{other} * {ones} = {other * ones}",
                f"{other * tens} + {other * ones} = {low * high}"]  # fmt: skip
    quotient = a // b
    if quotient <= 10:
        return []
    rest = a - b * 10
    return [f"{b} * 10 = {b * 10}", f"{a} - {b * 10} = {rest}", f"{rest} / {b} = {rest // b}",
            f"10 + {rest // b} = {quotient}"]  # fmt: skip


def worked(symbol: str, a: int, b: int) -> str:
    """One line: the intermediate steps, if any, and the result."""
    steps = steps_of(symbol, a, b)
    result = f"{a} {symbol} {b} = {apply(symbol, a, b)}"
    return f"{', '.join(steps)}, so {result}" if steps else result
