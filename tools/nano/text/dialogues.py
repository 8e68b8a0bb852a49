"""Whole dialogues: which topics, how many turns, system prompts, memory of earlier turns.

Training and evaluation take their text through `dialogue` only; a seed and an index always name the same
dialogue.
"""

from __future__ import annotations

import random

from tools.nano.text import (
    arithmetic,
    code,
    facts,
    geography,
    lists,
    smalltalk,
    spelling,
    tales,
    units,
    word_problems,
)
from tools.nano.text.core import (
    ChatExchange,
    DialogueContext,
    Message,
    Phrasings,
    TextSplit,
    Topic,
    ask,
    casual,
)
from tools.nano.text.people import person

MIX: dict[Topic, int] = {
    geography.capital: 16, geography.country: 9, geography.continent: 4, geography.some_of: 2, geography.lesson: 3,
    geography.is_capital: 4, geography.about: 4,
    arithmetic.direct: 13, arithmetic.stepwise: 6, arithmetic.compare: 2, arithmetic.parity: 1, arithmetic.table: 2,
    word_problems.one_step: 20, word_problems.two_steps: 22, units.convert: 6, lists.known: 8, lists.neighbour: 3,
    lists.counting: 5, code.function: 5, code.loop: 1, smalltalk.talk: 7, smalltalk.identity: 3, smalltalk.unknown: 5,
    facts.definition: 5, facts.opposite: 2, facts.small_fact: 3, facts.explanation: 3, spelling.spell: 4,
    spelling.sort_items: 2, spelling.repeat: 2, tales.story: 6, tales.letter: 1, tales.poem: 1,
}  # fmt: skip
TOPICS, WEIGHTS = tuple(MIX), tuple(MIX.values())
SYSTEMS = (
    "You are a helpful assistant.", "You are Eyas nano, a helpful assistant.", "You are a friendly assistant.",
    "You are a helpful, honest and concise assistant.", "Answer the user's questions.", "You are Eyas nano.",
    "You are a teacher who helps children to learn.", "Be polite and helpful.", "You are an assistant in a classroom.",
    "Help the user as well as you can.", "You are a careful assistant. Check your work.", "Answer briefly.",
)  # fmt: skip
MY_NAME = Phrasings(
    train=("My name is {n}.", "I am {n}.", "Hi, I am {n}.", "Hello, my name is {n}.", "I'm {n}.", "Call me {n}.", "People call me {n}."),
    heldout=("You can call me {n}.",),
)  # fmt: skip
ASK_NAME = Phrasings(
    train=("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?", "Tell me my name.", "Can you say my name?"),
    heldout=("Do you still know my name?",),
)  # fmt: skip
ASK_FIRST = Phrasings(
    train=("What was my first question?", "What did I ask first?", "What was the first thing I said?", "Repeat my first message."),
    heldout=("Which question did I ask first?",),
)  # fmt: skip
ASK_AGAIN = Phrasings(
    train=("Repeat your last answer.", "Say that again.", "Can you repeat that?", "Please repeat.", "Once more, please.", "What did you say?"),
    heldout=("Could you say that once more?",),
)  # fmt: skip


def _turns(context: DialogueContext) -> list[ChatExchange]:
    """One topic mostly; sometimes a long conversation."""
    count = 1 if context.chance(0.55) else context.pick((2, 2, 3, 3, 4, 5, 8))
    chat: list[ChatExchange] = []
    for topic in context.rng.choices(TOPICS, WEIGHTS, k=count):
        chat += topic(context)
    return chat


def _with_memory(context: DialogueContext, chat: list[ChatExchange]) -> list[ChatExchange]:
    """Questions that only the earlier turns can answer."""
    if context.chance(0.06):
        name = person(context).name
        hello = ChatExchange(
            casual(context, MY_NAME.pick(context).format(n=name)), f"Nice to meet you, {name}!"
        )
        chat = [hello, *chat, ChatExchange(ask(context, ASK_NAME), f"Your name is {name}.")]
    if context.chance(0.04) and len(chat) > 1 and len(chat[0].user) < 120:
        chat = [*chat, ChatExchange(ask(context, ASK_FIRST), f'You said first: "{chat[0].user}"')]
    if context.chance(0.04) and len(chat[-1].assistant) < 200:
        chat = [*chat, ChatExchange(ask(context, ASK_AGAIN), chat[-1].assistant)]
    return chat


def _messages(system: str | None, chat: list[ChatExchange]) -> list[Message]:
    messages = [{"role": "system", "content": system}] if system else []
    for exchange in chat:
        messages.append({"role": "user", "content": exchange.user})
        messages.append({"role": "assistant", "content": exchange.assistant})
    return messages


def _one_word(context: DialogueContext) -> list[Message]:
    """A system prompt that changes the form of the answers."""
    countries = [geography.pick_country(context) for _ in range(context.number(1, 3))]
    chat = [
        ChatExchange(ask(context, geography.CAPITAL_OF, c=country.name), country.capital)
        for country in countries
    ]
    return _messages(context.pick(geography.BRIEF_SYSTEMS), chat)


def chat_of(context: DialogueContext) -> list[Message]:
    """One dialogue drawn from the context."""
    if context.chance(0.02):
        return _one_word(context)
    system = context.pick(SYSTEMS) if context.chance(0.25) else None
    return _messages(system, _with_memory(context, _turns(context)))


def dialogue(seed: int, index: int, split: TextSplit) -> list[Message]:
    """The dialogue of this seed and index: messages that end with an assistant turn."""
    return chat_of(DialogueContext(random.Random(f"{split.value}/{seed}/{index}"), split))


def plain_text(seed: int, index: int) -> str:
    """A passage without chat markup, so that plain completion has something to continue."""
    context = DialogueContext(random.Random(f"plain/{seed}/{index}"), TextSplit.TRAIN)
    topic = context.pick(
        (tales.story, tales.story, tales.poem, facts.explanation, facts.definition, lists.counting)
    )
    return topic(context)[0].assistant
