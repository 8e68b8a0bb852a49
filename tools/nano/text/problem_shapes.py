"""Ready-made shapes of word problems: groups, shares, prices, distances, comparisons.

A shape is its phrasings, its closing sentence and a function that draws its numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tools.nano.text.core import DialogueContext, Phrasings
from tools.nano.text.numbers import LIMIT, difference_pair, operand, product_pair, quotient_pair, sum_pair

Step = tuple[str, int, int]
Drawn = tuple[dict[str, object], list[Step]]


@dataclass(frozen=True)
class ProblemShape:
    """One kind of problem with `count` calculation steps."""

    count: int
    text: Phrasings
    closing: str
    draw: Callable[[DialogueContext], Drawn]


def _product(context: DialogueContext) -> Drawn:
    a, b = product_pair(context)
    return {"a": a, "b": b}, [("*", a, b)]


def _quotient(context: DialogueContext) -> Drawn:
    a, b = quotient_pair(context)
    return {"a": a, "b": b}, [("/", a, b)]


def _sum(context: DialogueContext) -> Drawn:
    a, b = sum_pair(context)
    return {"a": a, "b": b}, [("+", a, b)]


def _difference(context: DialogueContext) -> Drawn:
    a, b = difference_pair(context)
    return {"a": a, "b": b}, [("-", a, b)]


def _product_plus(context: DialogueContext) -> Drawn:
    a, b = product_pair(context)
    c = operand(context, LIMIT - a * b)
    return {"a": a, "b": b, "c": c}, [("*", a, b), ("+", a * b, c)]


def _product_minus(context: DialogueContext) -> Drawn:
    a, b = product_pair(context)
    c = operand(context, a * b - 1)
    return {"a": a, "b": b, "c": c}, [("*", a, b), ("-", a * b, c)]


def _sum_shared(context: DialogueContext) -> Drawn:
    total, c = quotient_pair(context)
    a = context.number(1, total - 1)
    return {"a": a, "b": total - a, "c": c}, [("+", a, total - a), ("/", total, c)]


def _left_shared(context: DialogueContext) -> Drawn:
    rest, c = quotient_pair(context)
    b = operand(context, LIMIT - rest)
    return {"a": rest + b, "b": b, "c": c}, [("-", rest + b, b), ("/", rest, c)]


def _change(context: DialogueContext) -> Drawn:
    a, b = product_pair(context)
    paid = context.pick([note for note in (20, 50, 100, 200, 500) if note >= a * b])
    return {"a": a, "b": b, "c": paid}, [("*", a, b), ("-", paid, a * b)]


def _more_than(context: DialogueContext) -> Drawn:
    a = operand(context, 450)
    b = operand(context, 90)
    return {"a": a, "b": b}, [("+", a, b), ("+", a + b, a)]


def _twice(context: DialogueContext) -> Drawn:
    a = context.number(2, 20)
    k, word = context.pick([(2, "twice"), (3, "three times"), (4, "four times"), (5, "five times")])
    return {"a": a, "k": word}, [("*", k, a), ("+", k * a, a)]


def _half(context: DialogueContext) -> Drawn:
    a = 2 * context.number(2, 100)
    return {"a": a}, [("/", a, 2), ("+", a, a // 2)]


SHAPES = (
    ProblemShape(1, Phrasings(
        train=(
            "{n} has {a} {x} with {b} {o} in each. How many {o} are there in total?",
            "There are {a} {x}. Each holds {b} {o}. How many {o} are there altogether?",
            "{n} buys {a} {x} of {o}. There are {b} {o} in each. How many {o} does {he} buy?",
            "{n} fills {a} {x} with {b} {o} each. How many {o} is that in all?",
            "If {a} {x} contain {b} {o} each, how many {o} are there?",
            "{a} friends bring {b} {o} each. How many {o} do they bring together?",
            "{n} packs {b} {o} into each of {a} {x}. How many {o} are packed?",
            "Every day {n} finds {b} {o}. How many {o} does {he} find in {a} days?",
            "In a hall there are {a} rows of {b} chairs with {o} on them, one on each. How many {o} are there?",
            "{n} plants {a} rows with {b} seeds in each row. How many seeds does {he} plant?",
            "I have {a} {x} with {b} {o} in each. How many {o} do I have?",
            "{a} children have {b} {o} each. How many {o} is that together?",
            "{n} carries {a} {x} of {b} {o}. How many {o} does {he} carry?",
            "In every one of {a} {x} there are {b} {o}. What is the total?",
            "One box holds {b} {o}. How many {o} fit into {a} boxes?",
            "Each of {a} friends gets {b} {o}. How many {o} are needed?",
            "A wall has {a} rows of {b} stones. How many stones are in the wall?",
            "{b} {o} are in each of the {a} {x}. How many are there in all?",
            "There are {a} teams with {b} players in each. How many players are there?",
            "Every one of {a} pupils brings {b} {o}. How many are brought?",
        ),
        heldout=(
            "{n} carries {a} {x}, and in every one of them are {b} {o}. How many {o} does {he} carry?",
            "Each of {a} children has {b} {o}. How many {o} do the children have?",
        ),
    ), "The total is {r}.", _product),
    ProblemShape(1, Phrasings(
        train=(
            "One ticket costs {b} dollars. How much do {a} tickets cost?",
            "{n} buys {a} {o} at {b} dollars each. How much does {he} pay?",
            "{n} earns {b} dollars an hour. How much does {he} earn in {a} hours?",
            "{o} cost {b} dollars each. What do {a} of them cost?",
            "{n} saves {b} dollars every week. How many dollars does {he} save in {a} weeks?",
            "A book costs {b} dollars and {n} buys {a} of them. What is the price of all the books?",
            "I buy {a} {o} for {b} dollars each. How much do I pay?",
            "What do {a} {o} cost if one costs {b} dollars?",
            "What must I pay for {a} {o} at {b} dollars each?",
            "{n} pays {b} dollars for each of {a} {o}. How much is that in all?",
            "If one of the {o} costs {b} dollars, what is the price of {a}?",
        ),
        heldout=("What must {n} pay for {a} {o} if each one costs {b} dollars?",),
    ), "The amount is {r} dollars.", _product),
    ProblemShape(1, Phrasings(
        train=(
            "{n} rides {b} km every hour. How far does {he} ride in {a} hours?",
            "A bus drives {b} km each day. How many km does it drive in {a} days?",
            "{n} walks {b} km a day. How many km does {he} walk in {a} days?",
            "{n} reads {b} pages a day. How many pages does {he} read in {a} days?",
            "A machine makes {b} {o} per minute. How many {o} does it make in {a} minutes?",
            "A train travels {b} km per hour for {a} hours. How far does it go?",
            "Each day {n} runs {b} km. How many km does {he} run in {a} days?",
            "I read {b} pages every day. How many pages do I read in {a} days?",
            "Each week {n} writes {b} letters. How many does {he} write in {a} weeks?",
        ),
        heldout=("Each hour {n} swims {b} laps. How many laps does {he} swim in {a} hours?",),
    ), "The result is {r}.", _product),
    ProblemShape(1, Phrasings(
        train=(
            "{n} shares {a} {o} equally among {b} friends. How many {o} does each friend get?",
            "{a} {o} are put into {b} {x} equally. How many {o} are in each?",
            "{n} divides {a} {o} between {b} children. How many does each child get?",
            "{n} packs {a} {o} into {x} of {b}. How many {x} does {he} need?",
            "There are {a} {o} for {b} people. How many {o} can each person have?",
            "{n} has {a} {o} and puts {b} in each bag. How many bags does {he} fill?",
            "A rope of {a} meters is cut into {b} equal pieces. How long is each piece?",
            "{a} pupils form {b} equal teams. How many pupils are in each team?",
            "I share {a} {o} with my friends, so that {b} of us have the same. How many does each get?",
            "{b} friends share {a} {o}. How many {o} does each friend receive?",
            "If {b} children divide {a} {o} equally, how many does each child have?",
            "{n} splits {a} {o} into {b} equal groups. How many are in a group?",
            "{a} {o} are shared fairly by {b} people. How many does each of them get?",
            "{n} puts {a} {o} evenly on {b} plates. How many {o} are on each plate?",
            "{a} {o} go into {b} {x}, the same number in each. How many is that?",
        ),
        heldout=(
            "{n} splits {a} {o} evenly over {b} {x}. How many {o} go in each?",
            "If {b} friends share {a} {o} fairly, how many does each of them receive?",
        ),
    ), "The answer is {r} each.", _quotient),
    ProblemShape(1, Phrasings(
        train=(
            "{n} has {a} {o} and {m} has {b} {o}. How many {o} do they have together?",
            "There are {a} red {o} and {b} blue {o}. How many {o} are there in total?",
            "{n} read {a} pages on Monday and {b} pages on Tuesday. How many pages did {he} read?",
            "A school has {a} girls and {b} boys. How many children are there?",
            "{n} pays {a} dollars for a coat and {b} dollars for shoes. How much does {he} pay in all?",
            "{n} drives {a} km and then {b} km. How far does {he} drive altogether?",
            "A farmer has {a} hens and {b} ducks. How many birds does the farmer have?",
            "{n} scored {a} points, and {m} scored {b} points. How many points is that together?",
            "I have {a} {o} and {b} pears. How many pieces do I have?",
            "If I have {a} dogs and {b} cats, how many pets do I have?",
            "One box holds {a} {o} and another one {b}. How many {o} are there in both?",
            "{n} found {a} {o} and {m} found {b}. How many did they find?",
            "{n} made {a} {o}, and {m} made {b}. What is the total number of {o}?",
            "In a garden are {a} roses and {b} tulips. How many flowers are there?",
            "{a} people are on a bus and {b} more get on. How many people are on the bus now?",
            "{n} is {a} years old. How old will {he} be in {b} years?",
        ),
        heldout=(
            "In one box are {a} {o}, in another {b}. How many {o} are in both boxes?",
            "{n} baked {a} {o}, and {m} baked {b}. What is the total number of {o}?",
        ),
    ), "The total is {r}.", _sum),
    ProblemShape(1, Phrasings(
        train=(
            "{n} has {a} {o} and {m} has {b}. How many more {o} does {n} have?",
            "There are {a} {o} on the table and {b} are removed. How many remain?",
            "A book has {a} pages. {n} has read {b}. How many pages are left?",
            "{n} has {a} dollars and spends {b} dollars. How many dollars are left?",
            "Of {a} children, {b} are boys. How many are girls?",
            "{n} needs {a} {o} and has {b}. How many more does {he} need?",
            "A train has {a} seats and {b} are taken. How many seats are free?",
            "{n} is saving for a bike that costs {a} dollars. {He} has {b} dollars. How much is missing?",
            "I have {a} {o} and eat {b}. How many are left?",
            "I have {a} dollars and spend {b}. How much do I have left?",
            "From {a} {o}, {b} are taken away. How many {o} are left?",
            "The road is {a} km long. {n} has driven {b} km. How many km are left?",
            "A walk is {a} km long and {n} has done {b} km. How far is it still?",
            "{n} eats {b} of {a} {o}. How many stay on the plate?",
            "{a} people are on a bus and {b} get off. How many people stay on the bus?",
            "Out of {a} {o}, {b} are broken. How many are whole?",
            "{n} had {a} {o}. Now {he} has only {b}. How many did {he} lose?",
            "What is the difference between {a} {o} and {b} {o}?",
        ),
        heldout=(
            "From {a} {o}, {n} eats {b}. How many {o} stay?",
            "The way is {a} km long and {n} has walked {b} km. How many km remain?",
        ),
    ), "The answer is {r}.", _difference),
    ProblemShape(2, Phrasings(
        train=(
            "{n} has {a} {x} with {b} {o} in each and {c} more {o}. How many {o} does {he} have?",
            "There are {a} {x} of {b} {o} each, and {c} loose {o}. How many {o} are there in total?",
            "{n} buys {a} {x} with {b} {o} each. {He} already had {c} {o}. How many does {he} have now?",
            "{n} earns {b} dollars an hour for {a} hours and gets a bonus of {c} dollars. How much is that?",
            "{n} buys {a} {o} for {b} dollars each and a bag for {c} dollars. How much does {he} pay?",
            "{n} filled {a} {x} with {b} {o} each and found {c} more. How many {o} are there?",
            "I have {a} packs of {b} {o} and {c} single ones. How many {o} do I have?",
            "{a} {x} hold {b} {o} each, and {m} brings {c} more. How many {o} are there now?",
            "{a} friends bring {b} {o} each, and {n} adds {c}. What is the total?",
        ),
        heldout=("{n} filled {a} {x} with {b} {o} each, and {m} gave {he2} {c} more. How many {o} are there?",),
    ), "The total is {r}.", _product_plus),
    ProblemShape(2, Phrasings(
        train=(
            "{n} has {a} {x} with {b} {o} in each. {He} gives away {c} {o}. How many are left?",
            "There are {a} {x} with {b} {o} each. {c} of the {o} are bad. How many are good?",
            "{n} earns {b} dollars a day for {a} days and spends {c} dollars. How much is left?",
            "A baker makes {a} trays of {b} {o} and sells {c} of them. How many remain?",
            "{n} buys {a} packs of {b} {o} and loses {c}. How many {o} does {he} still have?",
            "{n} fills {a} {x} with {b} {o} each. Then {m} takes {c}. How many remain?",
            "I have {a} {x} of {b} {o} and eat {c} of them. How many {o} are left?",
            "{n} plants {a} rows of {b} seeds, but {c} do not grow. How many plants grow?",
            "{a} friends bring {b} {o} each, but {c} get lost. How many remain?",
        ),
        heldout=("{n} fills {a} {x} with {b} {o} each, but {m} eats {c}. How many {o} remain?",),
    ), "There are {r} left.", _product_minus),
    ProblemShape(2, Phrasings(
        train=(
            "{n} has {a} {o} and {m} has {b}. They share them equally among {c} people. How many does each get?",
            "{n} picks {a} {o} and then {b} more. {He} puts them into {c} {x} equally. How many are in each?",
            "{a} girls and {b} boys form {c} equal teams. How many children are in each team?",
            "{n} found {a} {o} and {m} found {b}. They put them evenly into {c} {x}. How many go in each?",
            "I have {a} red and {b} blue {o} and share them among {c} friends. How many does each get?",
            "{a} {o} and {b} more are divided between {c} children. How many does each child get?",
        ),
        heldout=("{n} found {a} {o} and {m} found {b}. They fill {c} {x} evenly. How many go in each?",),
    ), "The answer is {r} each.", _sum_shared),
    ProblemShape(2, Phrasings(
        train=(
            "{n} has {a} {o}. {He} keeps {b} and shares the rest equally among {c} friends. How many does each get?",
            "A shop has {a} {o}. It sells {b} and packs the rest into {c} {x} equally. How many are in each?",
            "Of {a} {o}, {b} are lost. The others are put into {c} {x} evenly. How many go in each?",
            "{n} eats {b} of {a} {o} and shares the rest between {c} children. How many does each get?",
            "I have {a} {o}, give away {b} and put the rest into {c} {x} evenly. How many are in each?",
            "From {a} {o}, {b} are sold. What is left is divided equally into {c} {x}. How many does each hold?",
        ),
        heldout=("{n} eats {b} of {a} {o} and divides what is left between {c} children. How many does each receive?",),
    ), "The answer is {r} each.", _left_shared),
    ProblemShape(2, Phrasings(
        train=(
            "{n} buys {a} {o} at {b} dollars each and pays with {c} dollars. How much change does {he} get?",
            "{n} has {c} dollars and buys {a} tickets for {b} dollars each. How many dollars are left?",
            "{a} {o} cost {b} dollars each. {n} gives the seller {c} dollars. What is the change?",
            "I pay for {a} {o} at {b} dollars each with {c} dollars. What do I get back?",
            "With {c} dollars I buy {a} {o} that cost {b} dollars each. How much is left?",
        ),
        heldout=("With {c} dollars, {n} pays for {a} {o} that cost {b} dollars each. What does {he} get back?",),
    ), "That leaves {r} dollars.", _change),
    ProblemShape(2, Phrasings(
        train=(
            "{n} has {a} {o}. {m} has {b} more than {n}. How many {o} do they have together?",
            "{m} has {b} more {o} than {n}, who has {a}. How many {o} do both have?",
            "On Monday {n} read {a} pages and on Tuesday {b} pages more. How many pages did {he} read on both days?",
            "{n} owns {a} {o}. {m} owns {b} more. How many do they own in total?",
            "I have {a} {o} and my sister has {b} more than I have. How many do we have together?",
        ),
        heldout=("{n} owns {a} {o}, and {m} owns {b} more than that. How many do they own in total?",),
    ), "Together that is {r}.", _more_than),
    ProblemShape(2, Phrasings(
        train=(
            "{n} has {a} {o}. {m} has {k} as many. How many {o} do they have together?",
            "{m} has {k} as many {o} as {n}, who has {a}. How many is that in total?",
            "A cat weighs {a} kg and a dog weighs {k} as much. How much do both weigh together?",
            "I have {a} {o} and {m} has {k} as many. How many do we have together?",
            "{n} found {a} {o}, and {m} {k} as many. How many is that in all?",
        ),
        heldout=("{n} found {a} {o} and {m} found {k} as many. How many did they find in all?",),
    ), "Together that is {r}.", _twice),
    ProblemShape(2, Phrasings(
        train=(
            "{n} sold {a} {o} in April and half as many in May. How many {o} did {he} sell altogether?",
            "{n} has {a} {o}. {m} has half as many. How many {o} do they have together?",
            "On Monday {n} walked {a} km and on Tuesday half as far. How many km did {he} walk in all?",
            "I have {a} {o} and {m} has half as many. How many do we have in total?",
            "{n} sold {o} to {a} of {his} friends, and then {he} sold half as many to others. How many did {he} sell?",
        ),
        heldout=("{n} baked {a} {o} and {m} baked half as many. How many {o} did they bake in total?",),
    ), "Together that is {r}.", _half),
)  # fmt: skip
