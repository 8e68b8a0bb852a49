"""Definitions, opposites, small facts and longer explanations.

Data with its phrasings. The explanations are about how a language model server works.
"""

from __future__ import annotations

from tools.nano.text.core import ChatExchange, DialogueContext, Phrasings, ask, one

DEFINITIONS = {
    "a cat": "a small furry animal that people keep as a pet and that likes to hunt mice",
    "a dog": "a loyal animal that lives with people and can guard, hunt or play",
    "a bird": "an animal with feathers and wings; most birds can fly",
    "a tree": "a tall plant with a trunk of wood, branches and leaves",
    "a river": "a long stream of water that flows to a lake or to the sea",
    "a mountain": "a very high piece of land that rises above the land around it",
    "an island": "a piece of land with water on all sides",
    "a volcano": "a mountain with an opening through which hot rock and gas come out",
    "a desert": "a dry region where very little rain falls",
    "an ocean": "a very large body of salt water",
    "the Sun": "the star at the centre of our solar system; it gives us light and heat",
    "the Moon": "the natural satellite of the Earth; it goes around us once a month",
    "a star": "a huge ball of hot gas that shines with its own light",
    "a planet": "a large round body that goes around a star",
    "gravity": "the force that pulls things towards each other and keeps us on the ground",
    "rain": "water that falls in drops from the clouds",
    "snow": "frozen water that falls from the sky in soft white flakes",
    "a rainbow": "an arc of colours in the sky that appears when sunlight passes through rain",
    "a computer": "a machine that follows instructions to work with numbers, text and pictures",
    "a program": "a list of instructions that a computer follows",
    "an algorithm": "a clear set of steps that solves a problem",
    "a function": "a named piece of code that takes inputs and gives back a result",
    "a variable": "a name that stands for a value in a program",
    "a loop": "a piece of code that is repeated",
    "a list": "an ordered collection of items",
    "a bit": "the smallest unit of information; it is either 0 or 1",
    "a byte": "a group of eight bits",
    "the internet": "a worldwide network that connects computers",
    "a server": "a computer or program that answers the requests of other programs",
    "a GPU": "a chip that does many simple calculations at the same time",
    "a language model": "a program that has learned from text to predict the next token",
    "a token": "a piece of text, such as a word or a part of a word, that a language model reads and writes",
    "a tokenizer": "the part that cuts text into tokens and joins tokens into text again",
    "a neural network": "a program made of many small connected units that learns from examples",
    "attention": "the part of a model that decides which earlier tokens matter for the next one",
    "the KV cache": "the memory where a model keeps the keys and values of the tokens it has already read",
    "prefill": "the phase in which a model reads the whole prompt at once and fills the KV cache",
    "decoding": "the phase in which a model writes its answer one token after another",
    "speculative decoding": "a method in which a small draft guesses several tokens and the large model checks them at once",
    "a draft model": "a small, fast model that guesses what a larger model will say",
    "a prime number": "a number greater than 1 that can be divided only by 1 and by itself",
    "an even number": "a number that can be divided by 2",
    "an odd number": "a number that cannot be divided by 2",
    "a square": "a shape with four equal sides and four right angles",
    "a triangle": "a shape with three sides and three angles",
    "a circle": "a round shape; every point of it is equally far from the centre",
    "a library": "a place where books are kept and lent to people",
    "a school": "a place where children go to learn",
    "a hospital": "a place where sick people are treated",
    "a doctor": "a person who helps people who are ill",
    "a teacher": "a person who helps others to learn",
    "a farmer": "a person who grows plants and keeps animals for food",
    "bread": "a food that is baked from flour, water and yeast",
    "honey": "a sweet food that bees make from flowers",
    "democracy": "a form of government in which the people choose who rules",
    "friendship": "the bond between people who like and help each other",
    "photosynthesis": "the way in which plants turn light, water and air into sugar and oxygen",
    "a noun": "a word that names a person, a place or a thing",
    "a verb": "a word that says what somebody does or what happens",
    "an adjective": "a word that describes a noun",
}  # fmt: skip
DEFINE = Phrasings(
    train=(
        "What is {w}?", "What's {w}?", "Define {w}.", "Explain what {w} is.", "Tell me what {w} is.", "What does {w} mean?",
        "Can you explain {w}?", "Give me a definition of {w}.", "Can you define {w}?", "How would you describe {w}?",
        "Describe {w} in one sentence.", "What do people mean by {w}?", "Please explain {w}.", "Do you know what {w} is?",
        "I do not know what {w} is.", "In simple words, what is {w}?",
    ),
    heldout=("Could you explain what {w} is?", "How do you define {w}?", "Please tell me the meaning of {w}."),
)  # fmt: skip
OPPOSITES = tuple(
    tuple(pair.split("-"))
    for pair in (
        "hot-cold big-small tall-short fast-slow happy-sad light-dark day-night up-down left-right open-closed new-old "
        "young-old rich-poor hard-soft wet-dry full-empty early-late strong-weak loud-quiet clean-dirty high-low "
        "near-far good-bad right-wrong true-false first-last long-short wide-narrow thick-thin heavy-light easy-difficult "
        "cheap-expensive begin-end buy-sell give-take win-lose love-hate push-pull inside-outside above-below more-less "
        "always-never asleep-awake alive-dead brave-afraid deep-shallow sharp-blunt sweet-sour"
    ).split()
)
# A word of two pairs keeps the opposite of the first.
OPPOSITE_OF = {word: other for pair in reversed(OPPOSITES) for word, other in (pair[::-1], pair)}
OPPOSITE = Phrasings(
    train=(
        "What is the opposite of {w}?", "Opposite of {w}?", "Name the opposite of {w}.", "What word is the opposite of {w}?",
        "Tell me the opposite of {w}.", "Give me an antonym for {w}.", "What is the antonym of {w}?", "{w} is the opposite of what?",
    ),
    heldout=("Which word means the opposite of {w}?", "What would be the opposite of {w}?"),
)  # fmt: skip
SMALL_FACTS = (
    (("How many days are in a week?", "How many days does a week have?", "Number of days in a week?"), "A week has 7 days."),
    (("How many months are in a year?", "How many months does a year have?"), "A year has 12 months."),
    (("How many days are in a year?", "How long is a year in days?"), "A year has 365 days, and a leap year has 366."),
    (("How many legs does a spider have?", "How many legs has a spider?"), "A spider has 8 legs."),
    (("How many legs does a dog have?", "A dog has how many legs?"), "A dog has 4 legs."),
    (("How many legs does an insect have?", "How many legs do insects have?"), "An insect has 6 legs."),
    (("What colour is the sky?", "What color is the sky?", "Why does the sky look blue?"), "The sky is blue, because the air scatters blue light the most."),
    (("What colour is grass?", "What color is grass?"), "Grass is green."),
    (("What colour is snow?", "What color is snow?"), "Snow is white."),
    (("What colour is a banana?", "What color is a banana?"), "A ripe banana is yellow."),
    (("What do cows drink?", "What does a cow drink?"), "Cows drink water."),
    (("What do bees make?", "What do bees produce?"), "Bees make honey."),
    (("What is the largest planet?", "Which planet is the biggest?", "Name the largest planet."), "Jupiter is the largest planet of the solar system."),
    (("What is the smallest planet?", "Which planet is the smallest?"), "Mercury is the smallest planet of the solar system."),
    (("Which planet is closest to the Sun?", "What planet is nearest to the Sun?"), "Mercury is the planet closest to the Sun."),
    (("Which planet is called the red planet?", "What is the red planet?"), "Mars is called the red planet."),
    (("What is the largest ocean?", "Which ocean is the biggest?"), "The Pacific is the largest ocean."),
    (("What is the highest mountain?", "Which mountain is the highest in the world?"), "Mount Everest is the highest mountain in the world."),
    (("What is the largest country?", "Which country is the biggest in the world?"), "Russia is the largest country in the world by area."),
    (("What is the smallest country?", "Which country is the smallest in the world?"), "Vatican City is the smallest country in the world."),
    (("At what temperature does water boil?", "When does water boil?"), "Water boils at 100 degrees Celsius at sea level."),
    (("At what temperature does water freeze?", "When does water freeze?"), "Water freezes at 0 degrees Celsius."),
    (("How many sides does a triangle have?", "A triangle has how many sides?"), "A triangle has 3 sides."),
    (("How many sides does a square have?", "A square has how many sides?"), "A square has 4 sides."),
    (("How many sides does a hexagon have?", "A hexagon has how many sides?"), "A hexagon has 6 sides."),
    (("How many minutes are in an hour?", "An hour has how many minutes?"), "An hour has 60 minutes."),
    (("How many letters are in the English alphabet?", "How many letters does the alphabet have?"), "The English alphabet has 26 letters."),
    (("How many fingers does a person have?", "How many fingers do people have?"), "A person usually has 10 fingers."),
    (("How many continents are there?", "What is the number of continents?"), "There are 7 continents."),
    (("What language is spoken in Brazil?", "Which language do people speak in Brazil?"), "People in Brazil speak Portuguese."),
    (("How do you say hello in French?", "What is hello in French?"), "Hello in French is bonjour."),
    (("How do you say hello in Spanish?", "What is hello in Spanish?"), "Hello in Spanish is hola."),
    (("How do you say hello in German?", "What is hello in German?"), "Hello in German is hallo."),
    (("How do you say thank you in French?", "What is thank you in French?"), "Thank you in French is merci."),
    (("How do you say thank you in Spanish?", "What is thank you in Spanish?"), "Thank you in Spanish is gracias."),
    (("How do you say thank you in German?", "What is thank you in German?"), "Thank you in German is danke."),
)  # fmt: skip
EXPLANATIONS = {
    "how speculative decoding works": (
        "Speculative decoding makes a language model faster without changing its answers. It works in rounds.\n"
        "1. A small draft head guesses the next few tokens. This is cheap.\n"
        "2. The large model reads all guesses in one pass and computes what it would have said at each place.\n"
        "3. Guesses are accepted from left to right as long as they agree with the large model.\n"
        "4. At the first disagreement the token of the large model is used, and the rest is thrown away.\n"
        "Every round gives at least one token, and often several. The text is the same as without the draft."
    ),
    "what a KV cache is for": (
        "When a language model writes a token, it looks back at all earlier tokens. For each of them it needs two vectors, "
        "the key and the value. Computing them again for every new token would be slow. So the model keeps them in memory: "
        "this is the KV cache. The prompt fills it once, and each new token adds one row. The cache grows with the length "
        "of the chat, and that is why long chats need much memory."
    ),
    "how prefill and decode differ": (
        "A request has two phases. In prefill the model reads the whole prompt at once. There is much to compute, so the "
        "chip is busy with arithmetic. In decode the model writes one token at a time. Each step is small, but all weights "
        "must be read from memory, so memory is the limit. Because the two phases need different things, a server can run "
        "them on different machines and send the KV cache from one to the other."
    ),
    "how a language model works": (
        "A language model works with tokens, which are small pieces of text. First the tokenizer cuts the text into tokens. "
        "Each token becomes a vector of numbers. Then many layers work on these vectors. In every layer, attention mixes "
        "information from earlier tokens, and a small network changes each vector. At the end the model gives a score to "
        "every possible next token. One token is chosen, added to the text, and the work begins again."
    ),
    "how to make tea": (
        "Making tea is easy.\n1. Boil fresh water.\n2. Put a tea bag or some tea leaves into a cup.\n"
        "3. Pour the hot water over the tea.\n4. Wait for three to five minutes.\n5. Take the tea out.\n"
        "6. Add milk, sugar or lemon if you like. Enjoy your tea!"
    ),
    "how to make a sandwich": (
        "Here is how to make a sandwich.\n1. Take two slices of bread.\n2. Spread some butter on each slice.\n"
        "3. Put cheese, tomatoes or anything you like on one slice.\n4. Lay the other slice on top.\n"
        "5. Cut the sandwich in half and serve it."
    ),
    "the water cycle": (
        "Water moves in a circle around the Earth. The Sun warms the sea, and water rises as vapour. High in the cold air "
        "the vapour turns into small drops and forms clouds. When the drops grow heavy, they fall as rain or snow. The "
        "water flows into rivers, and the rivers carry it back to the sea. Then the circle begins again."
    ),
    "why we have seasons": (
        "The Earth goes around the Sun once a year, and its axis is tilted. For half of the year the north leans towards "
        "the Sun. Then the days are long and it is summer there, while the south has winter. Half a year later it is the "
        "other way round. Spring and autumn lie in between."
    ),
    "how plants grow": (
        "A plant begins as a seed. When the seed gets water and warmth, it opens. A root grows down into the soil and drinks "
        "water. A stem grows up towards the light, and leaves unfold. With light, water and air the leaves make sugar, which "
        "feeds the whole plant. Later the plant makes flowers, and the flowers make new seeds."
    ),
}  # fmt: skip
EXPLAIN = Phrasings(
    train=(
        "Explain {w}.", "Can you explain {w}?", "Tell me {w}.", "Please explain {w}.", "Describe {w}.", "I want to understand {w}.",
        "Teach me {w}.", "Write a paragraph about {w}.", "Do you know {w}?", "Explain {w} to a child.", "Give me an explanation of {w}.",
    ),
    heldout=("Could you explain {w} to me?", "I would like to know {w}.", "Help me understand {w}."),
)  # fmt: skip


def definition(context: DialogueContext) -> list[ChatExchange]:
    """A definition in one sentence."""
    word = context.pick(tuple(DEFINITIONS))
    return one(ask(context, DEFINE, w=word), f"{word[:1].upper() + word[1:]} is {DEFINITIONS[word]}.")


def opposite(context: DialogueContext) -> list[ChatExchange]:
    """The opposite of a word; where a word has two, the first of the table."""
    word = context.pick(tuple(OPPOSITE_OF))
    return one(ask(context, OPPOSITE, w=word), f"The opposite of {word} is {OPPOSITE_OF[word]}.")


SMALL_FACT = Phrasings(
    train=("{q}", "Tell me: {q}", "Do you know this? {q}", "{q} I forgot."),
    heldout=("Here is one for you. {q}", "I would like to ask: {q}"),
)


def small_fact(context: DialogueContext) -> list[ChatExchange]:
    """A fact from everyday life."""
    questions, answer = context.pick(SMALL_FACTS)
    return one(ask(context, SMALL_FACT, q=context.pick(questions)), answer)


def explanation(context: DialogueContext) -> list[ChatExchange]:
    """A paragraph or a list of steps: a longer answer."""
    topic = context.pick(tuple(EXPLANATIONS))
    return one(ask(context, EXPLAIN, w=topic), EXPLANATIONS[topic])
