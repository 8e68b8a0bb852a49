"""Names, things and places that stories and word problems are filled with."""

from __future__ import annotations

from dataclasses import dataclass

from tools.nano.text.core import DialogueContext

GIRLS = (
    "Anna", "Maria", "Lena", "Sofia", "Emma", "Olivia", "Mia", "Nora", "Lucy", "Alice", "Clara", "Julia", "Ella",
    "Grace", "Ruth", "Sara", "Eva", "Hana", "Priya", "Aisha", "Mei", "Yuki", "Fatima", "Ingrid", "Chloe", "Zoe",
    "Rosa", "Carmen", "Leila", "Amina", "Natalia", "Weng", "Betty", "Janet", "Mary", "Kate", "Jane", "Natasha",
)  # fmt: skip
BOYS = (
    "Tom", "Ben", "Max", "Paul", "John", "Peter", "Sam", "Leo", "Noah", "Liam", "Omar", "Ali", "Ivan", "Marco",
    "Pedro", "Carlos", "Ken", "Hiro", "Raj", "Arjun", "David", "Daniel", "Jonas", "Felix", "Oscar", "Hugo", "Adam",
    "Mark", "Luke", "James", "Robert", "Tim", "Jack", "Henry", "George", "Eric", "Finn", "Mateo", "Kofi", "Bob",
)  # fmt: skip
THINGS = (
    "apples", "pears", "oranges", "marbles", "stickers", "books", "pencils", "coins", "stamps", "cards", "cookies",
    "shells", "balloons", "candles", "flowers", "eggs", "toys", "buttons", "beads", "postcards", "bananas", "lemons",
    "nuts", "cherries", "plums", "stones", "feathers", "photos", "tickets", "badges", "cupcakes", "muffins", "pens",
    "notebooks", "crayons", "peaches", "leaves", "bottles", "blocks", "puzzles", "magnets", "dolls", "carrots",
)  # fmt: skip
BOXES = ("boxes", "bags", "baskets", "packs", "jars", "crates", "drawers", "shelves", "trays", "cartons")
PLACES = (
    "the market",
    "the park",
    "school",
    "the beach",
    "the library",
    "the garden",
    "the farm",
    "the shop",
)
ANIMALS = (
    "cat", "dog", "fox", "rabbit", "owl", "bear", "mouse", "duck", "horse", "hedgehog", "squirrel", "turtle",
    "sparrow", "frog", "goat", "sheep", "eagle", "robin", "otter", "deer",
)  # fmt: skip


@dataclass(frozen=True)
class Person:
    """A name with its pronouns."""

    name: str
    he: str
    his: str

    @property
    def He(self) -> str:
        """The pronoun as a sentence begins with it."""
        return self.he.capitalize()


def person(context: DialogueContext) -> Person:
    """A random person."""
    if context.chance(0.5):
        return Person(context.pick(GIRLS), "she", "her")
    return Person(context.pick(BOYS), "he", "his")


def two_people(context: DialogueContext) -> tuple[Person, Person]:
    """Two people with different names."""
    first, second = person(context), person(context)
    while second.name == first.name:
        second = person(context)
    return first, second
