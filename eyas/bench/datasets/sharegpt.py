"""Conversations from a local file in ShareGPT's format.

As SGLang's `sharegpt`: conversations of fewer than two turns are left out, the first two turns are prompt and
answer, and the seed draws the order. A pair is left out if its prompt or answer has fewer than 2 tokens, or
if it is longer than the context length, where one is given.
"""

from __future__ import annotations

import json
from typing import Any

from eyas.bench.datasets.draw import DatasetOptions
from eyas.bench.jobs import JobTurn, LoadJob, generator
from eyas.common.errors import ConfigError

COUNT = 100
FEWEST_TOKENS = 2
PERSON, MODEL = ("human", "user"), ("gpt", "assistant")

Talk = list[tuple[str, str]]  # who says what


def jobs(draw: DatasetOptions) -> list[LoadJob]:
    """Draws at most `draw.count` requests, each with the first turn of a conversation. Raises ConfigError."""
    count = draw.token_counter()
    selected: list[LoadJob] = []
    for talk in conversations(draw):
        (_, prompt), (_, answer) = talk[:2]
        tokens, length = count(prompt), draw.fixed_output_len or count(answer)
        if min(tokens, length) < FEWEST_TOKENS or tokens + length > (draw.context_len or tokens + length):
            continue
        selected.append(LoadJob.single(prompt, length))
        if len(selected) == (draw.count or COUNT):
            break
    if not selected:
        refuse_empty(draw)
    return selected


def whole_conversations(draw: DatasetOptions) -> list[LoadJob]:
    """Draws at most `draw.count` conversations of at most `draw.turns` requests each. Raises ConfigError."""
    count = draw.token_counter()
    selected: list[LoadJob] = []
    for talk in conversations(draw):
        pairs = [
            (said, answer)
            for (who, said), (other, answer) in zip(talk, talk[1:], strict=False)
            if who in PERSON and other in MODEL and count(said) >= FEWEST_TOKENS
        ]
        lengths = [draw.fixed_output_len or max(1, count(answer)) for _, answer in pairs]
        turns = [JobTurn(said, length) for (said, _), length in zip(pairs, lengths, strict=True)]
        if turns:
            selected.append(LoadJob(tuple(turns[: draw.turns])))
        if len(selected) == (draw.count or COUNT):
            break
    if not selected:
        refuse_empty(draw)
    return selected


def refuse_empty(draw: DatasetOptions) -> None:
    """Raises the ConfigError of a file of which the filter leaves nothing."""
    raise ConfigError(f"--dataset-path: {draw.path} has no conversation that fits", param="dataset-path")


def conversations(draw: DatasetOptions) -> list[Talk]:
    """Conversations of at least two turns, in the order that the seed draws. Raises ConfigError."""
    try:
        entries = json.loads(draw.text())
    except json.JSONDecodeError as error:
        draw.refuse(error.lineno, f"no JSON: {error.msg}")
    if not isinstance(entries, list):
        raise ConfigError(f"--dataset-path: {draw.path} is no list of conversations", param="dataset-path")
    talks = [_talk(draw, number, entry) for number, entry in enumerate(entries, 1)]
    long = [talk for talk in talks if len(talk) >= 2]
    generator(draw.seed, "order").shuffle(long)
    return long


def _talk(draw: DatasetOptions, number: int, entry: Any) -> Talk:
    try:
        said = entry.get("conversations", entry.get("conversation", []))
        return [(str(turn.get("from", turn.get("role", ""))), str(turn["value"])) for turn in said]
    except (AttributeError, TypeError, KeyError) as error:
        problem = f"entry {number} is no conversation of turns with a value"
        raise ConfigError(f"--dataset-path: {draw.path}: {problem}", param="dataset-path") from error
