"""Short stories, poems and letters: the longer answers that make streaming worth watching.

A story is a chain of sentences chosen by its hero, place and find.
"""

from __future__ import annotations

from tools.nano.text.core import ChatExchange, DialogueContext, Phrasings, ask, one
from tools.nano.text.people import ANIMALS, PLACES, Person, person, two_people

STORY = Phrasings(
    train=(
        "Tell me a story about {w}.", "Write a short story about {w}.", "Can you tell me a story about {w}?",
        "I would like to hear a story about {w}.", "A story about {w}, please.", "Write a story about {w}.",
        "Make up a story about {w}.", "Please tell a bedtime story about {w}.", "Do you know a story about {w}?",
        "Invent a little story about {w}.",
    ),
    heldout=("Could you write me a little story about {w}?", "Please tell me a short tale about {w}."),
)  # fmt: skip
ANY_STORY = Phrasings(
    train=("Tell me a story.", "Write a short story.", "I want to hear a story.", "Can you tell me a story?", "A story, please.",
           "Please write a story for me.", "Tell me a bedtime story."),
    heldout=("Could you tell me a nice story?",),
)  # fmt: skip
MORE = Phrasings(
    train=("Tell me more.", "What happened next?", "Go on.", "Continue the story.", "And then?", "Please go on."),
    heldout=("Please continue.", "What came next?"),
)  # fmt: skip
MORAL = Phrasings(
    train=("What is the moral of the story?", "What can we learn from it?", "What does the story teach?"),
    heldout=("What is the lesson of this story?",),
)  # fmt: skip
WHO_WAS = Phrasings(
    train=("Who was the story about?", "What was the name of the hero?", "Who is the main character?"),
    heldout=("What was the main character called?",),
)  # fmt: skip
HOMES = (
    "in a green forest", "near a quiet lake", "on a small farm", "at the edge of a village", "in an old garden",
    "by the wide sea", "on a high hill", "in a little house", "behind an old mill", "under a big tree",
)  # fmt: skip
TRAITS = (
    "small",
    "brave",
    "curious",
    "clever",
    "kind",
    "shy",
    "young",
    "old",
    "happy",
    "quiet",
    "hungry",
    "lazy",
)
FINDS = (
    "a golden key", "a map", "a lost letter", "a silver bell", "a tiny door", "a blue stone", "an old book", "a red balloon",
    "a broken clock", "a basket of apples", "a lamp", "a little boat",
)  # fmt: skip
PROBLEMS = (
    ("it began to rain, and the way home was lost", "waited under a tree until the sun came back"),
    ("the river was too wide to cross", "built a bridge of branches"),
    ("a big stone blocked the road", "asked a friend for help, and together they moved it"),
    ("night fell, and it was very dark", "followed the stars until a light appeared"),
    ("a strong wind blew everything away", "looked everywhere and picked up piece after piece"),
    ("somebody was crying behind a bush", "sat down, listened, and shared some bread"),
    ("the path split in two", "chose the path with the flowers"),
    ("the old gate was locked", "searched the grass and found the way in"),
)
LESSONS = (
    "a friend is the best help", "small steps lead far", "it is good to share", "patience solves many problems",
    "kindness comes back", "everyone can be brave", "it is never too late to try", "asking for help is no shame",
)  # fmt: skip


def _opening(context: DialogueContext, hero: str, name: str) -> str:
    home = context.pick(HOMES)
    begin = context.pick(("Once upon a time there was", "Long ago there was", "There once was"))
    return f"{begin} a {hero} named {name}. {name} lived {home} and liked to walk to {context.pick(PLACES)} every morning."


def _middle(context: DialogueContext, who: Person, find: str) -> list[str]:
    trouble, answer = context.pick(PROBLEMS)
    friend = context.pick(ANIMALS)
    lines = [
        f"One day {who.name} found {find}.",
        f"{who.He} wondered who had left it there and decided to find out.",
        f"On the way {who.he} met a {friend}. \"Where are you going?\" asked the {friend}. "
        f"\"I found {find}, and I want to bring it back,\" said {who.name}.",
        f"But then {trouble}.",
        f"{who.name} did not give up. {who.He} {answer}.",
    ]  # fmt: skip
    if context.chance(0.5):
        lines.insert(
            3,
            f'The {friend} thought for a while and said, "Then I will come with you." So they walked on together.',
        )
    return lines


def story(context: DialogueContext) -> list[ChatExchange]:
    """A story of some ten sentences, and questions about it."""
    who, animal = person(context), context.pick(ANIMALS)
    hero = f"{context.pick(TRAITS)} {animal}"
    find, lesson = context.pick(FINDS), context.pick(LESSONS)
    request = context.pick(
        (f"a {animal}", f"a {hero}", f"a {hero} named {who.name}", f"a {animal} named {who.name}")
    )
    if context.chance(0.2):
        user = ask(context, ANY_STORY)
    else:
        user = ask(context, STORY, w=request)
    lines = [_opening(context, hero, who.name), *_middle(context, who, find)]
    lines.append(
        f"In the evening the owner of the {find.split(' ', 1)[1]} was found and thanked {who.name} with all {who.his} heart."
    )
    lines.append(f"From that day on {who.name} knew that {lesson}.")
    chat = one(user, " ".join(lines))
    if context.chance(0.2):
        chat.append(ChatExchange(ask(context, WHO_WAS), f"The story was about {who.name}, a {hero}."))
    if context.chance(0.2):
        chat.append(ChatExchange(ask(context, MORAL), f"The story teaches that {lesson}."))
    elif context.chance(0.15):
        more = f"The next morning {who.name} went out again. {' '.join(_middle(context, who, context.pick(FINDS)))} And so the day ended well."
        chat.append(ChatExchange(ask(context, MORE), more))
    return chat


LETTER = Phrasings(
    train=(
        "Write a letter from {a} to {b}.", "Write a short email from {a} to {b}.", "Can you write a letter from {a} to {b}?",
        "Help {a} write a letter to {b}.", "I need a letter from {a} to {b}.",
    ),
    heldout=("Please compose a letter from {a} to {b}.",),
)  # fmt: skip
POEM = Phrasings(
    train=("Write a poem about {w}.", "Can you write a short poem about {w}?", "A poem about {w}, please.", "Make a little poem about {w}."),
    heldout=("Please write me a poem about {w}.",),
)  # fmt: skip
RHYMES = (
    ("The morning is bright and the sky is so blue,", "the {w} wakes up and says hello to you."),
    ("The wind in the trees sings a song soft and low,", "the {w} listens and walks very slow."),
    ("The stars in the night are a wonderful sight,", "the {w} looks up and is glad of the light."),
    ("The rain on the roof makes a beautiful sound,", "the {w} is dry and goes dancing around."),
    ("The summer is warm and the fields are all green,", "the {w} is happier than I have seen."),
    ("The snow on the hill is as white as can be,", "the {w} comes home for a cup of hot tea."),
)


def letter(context: DialogueContext) -> list[ChatExchange]:
    """A friendly letter."""
    a, b = two_people(context)
    place, thing = context.pick(PLACES), context.pick(FINDS)
    text = (
        f"Dear {b.name},\n\nHow are you? I hope that you are well. Yesterday I went to {place} and found {thing}. "
        f"I thought of you at once. Would you like to visit me next {context.pick(('week', 'month', 'weekend', 'summer'))}? "
        f"We could go to {context.pick(PLACES)} together.\n\nBest wishes,\n{a.name}"
    )
    return one(ask(context, LETTER, a=a.name, b=b.name), text)


def poem(context: DialogueContext) -> list[ChatExchange]:
    """A few rhyming pairs about an animal."""
    animal = context.pick(ANIMALS)
    pairs = context.rng.sample(RHYMES, context.number(2, 4))
    text = "\n".join(f"{first}\n{second.format(w=animal)}" for first, second in pairs)
    return one(ask(context, POEM, w=f"{'an' if animal[0] in 'aeiou' else 'a'} {animal}"), text)
