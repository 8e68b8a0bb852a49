"""Conversations whose next turn waits for the answer before it: from ShareGPT's file, else invented.

An invented turn is a row of common words: it has at least as many tokens as words in any vocabulary.
"""

from __future__ import annotations

import random

from eyas.bench.datasets import sharegpt
from eyas.bench.datasets.draw import DatasetOptions
from eyas.bench.jobs import JobTurn, LoadJob, draw_lengths, generator

COUNT = 32
WORDS = (
    "the and for that with this from have they will would there their what about which when make like time "
    "just know take people into year your good some could them see other than then now look only come over "
    "think also back after use two how our work first well way even new want because any these give day most"
).split()


def jobs(draw: DatasetOptions) -> list[LoadJob]:
    """`draw.count` conversations of `draw.turns` turns. Raises ConfigError for a malformed file."""
    if draw.path is not None:
        return sharegpt.whole_conversations(draw)
    count = draw.count or COUNT
    inputs = draw_lengths(
        generator(draw.seed, "input lengths"), draw.input_len, draw.range_ratio, count * draw.turns
    )
    outputs = draw_lengths(
        generator(draw.seed, "output lengths"), draw.output_len, draw.range_ratio, count * draw.turns
    )
    words = generator(draw.seed, "words")
    turns = [JobTurn(_say(words, length), answer) for length, answer in zip(inputs, outputs, strict=True)]
    return [LoadJob(tuple(turns[i * draw.turns : (i + 1) * draw.turns])) for i in range(count)]


def _say(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))
