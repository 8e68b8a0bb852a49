"""Chats about countries, capitals and continents, in both directions, with follow-ups."""

from __future__ import annotations

from tools.nano.text.core import ChatExchange, DialogueContext, Phrasings, ask, casual, join_and, one
from tools.nano.text.world import ALIASES, CONTINENTS, COUNTRIES, FAMILIAR, Country

CAPITAL_OF = Phrasings(
    train=(
        "What is the capital of {c}?", "What's the capital of {c}?", "Which city is the capital of {c}?",
        "Name the capital of {c}.", "Tell me the capital of {c}.", "Do you know the capital of {c}?",
        "Can you tell me the capital of {c}?", "What is the capital city of {c}?", "{c}: what is its capital?",
        "I need the capital of {c}.", "Which city is the seat of government of {c}?", "Capital of {c}?",
        "What city is {c}'s capital?", "What is {c}'s capital city?", "Give me the capital of {c}.",
        "The capital of {c} is which city?", "What is the name of the capital of {c}?", "The capital of {c}?",
        "Could you name the capital of {c}?", "I want to know the capital city of {c}.", "capital {c}",
        "Complete the sentence: the capital of {c} is", "If I visit the capital of {c}, which city am I in?",
        "Where is the government of {c} based?", "Which city serves as the capital of {c}?",
        "What do we call the capital of {c}?", "My quiz asks for the capital of {c}. What is it?",
        "Do you happen to know what the capital of {c} is?", "In {c}, which city is the capital?",
        "Would you tell me what the capital of {c} is?", "What is the main city of government in {c}?",
        "Say the name of the capital city of {c}.", "{c} has which capital?", "What capital does {c} have?",
        "Help me remember the capital of {c}.", "Write the capital of {c}.", "Answer with the capital of {c}.",
        "I am going to {c}. What is the capital?", "Is there a capital in {c}, and what is it?",
        "Please name {c}'s capital.", "Where is the capital of {c}?", "{c} capital city?",
    ),
    heldout=(
        "Which city is {c}'s capital?", "Could you tell me what city is the capital of {c}?",
        "What is the capital city of the country {c}?", "Please give the name of {c}'s capital city.",
        "I am trying to recall the capital of {c}, what is it?", "What would be the capital of {c}?",
        "Which city do people call the capital of {c}?", "Can you name the capital city of {c}?",
    ),
)  # fmt: skip
COUNTRY_OF = Phrasings(
    train=(
        "{k} is the capital of which country?", "Which country has {k} as its capital?",
        "What country is {k} the capital of?", "{k} is the capital of what country?",
        "Of which country is {k} the capital?", "Tell me which country has the capital {k}.",
        "Name the country whose capital is {k}.", "Which country's capital is {k}?",
        "What country has its capital in {k}?", "If the capital is {k}, what is the country?",
        "The capital city {k} belongs to which country?", "I know {k} is a capital, but of which country?",
        "In which country is the capital city {k}?", "{k}: which country is it the capital of?",
        "Do you know which country {k} is the capital of?", "Which nation is governed from {k}?",
        "Give me the country that has {k} as capital.", "What is the country with the capital {k}?",
        "Which country am I in if I visit its capital {k}?", "In which country is {k}?", "Where is {k}?",
        "Can you tell me the country whose capital city is {k}?", "What country is {k} in?",
    ),
    heldout=(
        "Which country is {k} the capital of?", "{k} is the capital city of which nation?",
        "Can you name the country whose capital is {k}?", "What nation has {k} as its capital city?",
        "For which country is {k} the capital?", "Please tell me what country has {k} as its capital.",
    ),
)  # fmt: skip
CONTINENT_OF = Phrasings(
    train=(
        "On which continent is {c}?", "Which continent is {c} in?", "What continent does {c} belong to?",
        "Where in the world is {c}?", "In which part of the world is {c}?", "Where is {c}?",
        "Tell me the continent of {c}.", "{c} is on which continent?", "Is {c} in Africa, Asia or elsewhere?",
        "Name the continent where {c} lies.", "What is the continent of {c}?", "Where can I find {c} on a map?",
    ),
    heldout=(
        "On what continent can I find {c}?", "Which continent does {c} lie in?", "What continent is {c} on?",
    ),
)  # fmt: skip
FOLLOW_CAPITAL = Phrasings(
    train=(
        "And of {c}?", "And {c}?", "What about {c}?", "And the capital of {c}?", "How about {c}?",
        "And for {c}?", "Now {c}.", "The same question for {c}.", "What of {c}?", "And what about {c}?",
        "Then {c}?", "Next one: {c}.", "Okay, and {c}?", "{c}?",
    ),
    heldout=("And how about {c}?", "Now what about {c}?", "And what is it for {c}?"),
)  # fmt: skip
FOLLOW_CONTINENT = Phrasings(
    train=(
        "Which continent is that on?", "And on which continent is it?", "What continent is it in?",
        "Where is that country?", "Which part of the world is that?", "On which continent is that country?",
    ),
    heldout=("And what continent is that country on?", "Which continent is the country on?"),
)  # fmt: skip
FOLLOW_COUNTRY = Phrasings(
    train=("Which country was that again?", "Which country did I ask about?", "What country was that?"),
    heldout=("Which country was my question about?",),
)
SOME_OF = Phrasings(
    train=(
        "Name {n} countries in {k}.", "List {n} countries in {k}.", "Give me {n} countries in {k}.",
        "Tell me {n} countries that are in {k}.", "Which {n} countries are in {k}? Any will do.",
        "Can you list {n} countries of {k}?", "I need {n} examples of countries in {k}.",
    ),
    heldout=("Write down {n} countries from {k}.", "Please name any {n} countries located in {k}."),
)  # fmt: skip
BRIEF_SYSTEMS = ("Answer with one word.", "Answer in one word only.", "Reply with the name only.")


def pick_country(context: DialogueContext) -> Country:
    """A country; the familiar ones more often."""
    return context.pick(FAMILIAR if context.chance(0.25) else COUNTRIES)


def spoken(context: DialogueContext, country: Country) -> str:
    """The name as a user may write it."""
    aliases = ALIASES.get(country.name)
    return context.pick(aliases) if aliases and context.chance(0.4) else country.name


def capital_answer(country: Country) -> str:
    """The full sentence."""
    return f"The capital of {country.name} is {country.capital}."


def capital(context: DialogueContext) -> list[ChatExchange]:
    """Country to capital, with follow-ups that lean on the first question."""
    country = pick_country(context)
    user = ask(context, CAPITAL_OF, c=spoken(context, country))
    chat = one(user[:1].upper() + user[1:] if context.chance(0.7) else user, capital_answer(country))
    if context.chance(0.15):
        chat.append(ChatExchange(ask(context, FOLLOW_CONTINENT), continent_answer(country)))
    while len(chat) < 5 and context.chance(0.35):
        country = pick_country(context)
        user = casual(context, FOLLOW_CAPITAL.pick(context).format(c=spoken(context, country)))
        chat.append(ChatExchange(user, capital_answer(country)))
    if len(chat) == 1 and context.chance(0.05):
        chat.append(ChatExchange(ask(context, FOLLOW_COUNTRY), f"You asked about {country.name}."))
    return chat


def country(context: DialogueContext) -> list[ChatExchange]:
    """Capital to country."""
    target = pick_country(context)
    chat = one(
        ask(context, COUNTRY_OF, k=target.capital), f"{target.capital} is the capital of {target.name}."
    )
    if context.chance(0.2):
        chat.append(ChatExchange(ask(context, FOLLOW_CONTINENT), continent_answer(target)))
    while len(chat) < 4 and context.chance(0.25):
        target = pick_country(context)
        user = casual(context, FOLLOW_CAPITAL.pick(context).format(c=target.capital))
        chat.append(ChatExchange(user, f"{target.capital} is the capital of {target.name}."))
    return chat


def continent_answer(country: Country) -> str:
    """The full sentence."""
    plural = country.name.startswith("the ") and country.name.endswith("s")
    return f"{country.title} {'are' if plural else 'is'} in {country.continent}."


def continent(context: DialogueContext) -> list[ChatExchange]:
    """Country to continent."""
    place = pick_country(context)
    return one(ask(context, CONTINENT_OF, c=spoken(context, place)), continent_answer(place))


def some_of(context: DialogueContext) -> list[ChatExchange]:
    """A few countries of a continent: the first of an alphabetical walk from a random start."""
    place = context.pick(CONTINENTS[:-1])
    names = [entry.name for entry in COUNTRIES if entry.continent == place]
    count = context.number(2, 6)
    start = context.number(0, len(names) - count)
    chosen = join_and(names[start : start + count])
    return one(ask(context, SOME_OF, n=count, k=place), chosen[:1].upper() + chosen[1:] + ".")


def lesson(context: DialogueContext) -> list[ChatExchange]:
    """A longer answer: several capitals at once."""
    chosen = [pick_country(context) for _ in range(context.number(3, 7))]
    names = join_and([entry.name for entry in chosen])
    phrasing = Phrasings(
        train=(
            "What are the capitals of {c}?", "Tell me the capitals of {c}.", "List the capitals of {c}.",
            "Give me the capitals of {c}, please.", "I need the capitals of {c}.",
        ),
        heldout=("Which cities are the capitals of {c}?", "Name the capitals of {c}."),
    )  # fmt: skip
    lines = "\n".join(f"- {entry.title}: {entry.capital}" for entry in chosen)
    return one(ask(context, phrasing, c=names), f"Here are the capitals:\n{lines}")


IS_CAPITAL = Phrasings(
    train=(
        "Is {k} the capital of {c}?", "{k} is the capital of {c}, right?", "Is the capital of {c} {k}?", "True or false: {k} is the capital of {c}.",
        "Is it true that {k} is the capital of {c}?", "Am I right that {k} is the capital of {c}?",
    ),
    heldout=("Would you say that {k} is the capital of {c}?",),
)  # fmt: skip
ABOUT = Phrasings(
    train=(
        "Tell me about {c}.", "What do you know about {c}?", "What is {c}?", "Tell me something about {c}.", "Describe {c}.",
        "I want to know more about {c}.", "Can you tell me about {c}?",
    ),
    heldout=("Please tell me what you know about {c}.",),
)  # fmt: skip


def is_capital(context: DialogueContext) -> list[ChatExchange]:
    """Yes, or no with the right capital."""
    target, other = pick_country(context), pick_country(context)
    said = target.capital if context.chance(0.5) else other.capital
    verdict = "Yes" if said == target.capital else "No"
    user = ask(context, IS_CAPITAL, k=said, c=spoken(context, target))
    return one(user, f"{verdict}, the capital of {target.name} is {target.capital}.")


def about(context: DialogueContext) -> list[ChatExchange]:
    """The few things known of a country or of its capital."""
    place = pick_country(context)
    if context.chance(0.4):
        return one(ask(context, ABOUT, c=place.capital), f"{place.capital} is the capital of {place.name}.")
    text = f"{continent_answer(place)} The capital is {place.capital}."
    return one(ask(context, ABOUT, c=spoken(context, place)), text)
