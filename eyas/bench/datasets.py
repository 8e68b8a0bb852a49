"""Sources of jobs: a function per dataset, and a table of their names.

* `random`: prompts of random token ids, with lengths as SGLang's `random` draws them.
* `sharegpt`: conversations from a local file in ShareGPT's format. As SGLang's: conversations of fewer than
  two turns are left out, the first two turns are prompt and answer, and the seed draws the order. A pair is
  left out if its prompt or answer has fewer than 2 tokens, or if it is longer than the context length,
  where one is given.
* `multi-turn`: conversations whose next turn waits for the answer before it: from ShareGPT's file, else
  invented. An invented turn is a row of common words: it has at least as many tokens as words in any
  vocabulary.
* `trace`: arrivals in Mooncake's format: lines of timestamp (ms), input_length, output_length, hash_ids.
  The same hash id is the same block of 512 tokens, so that prompts share prefixes as the traced ones did.
  The last block of a prompt may be cut.
* `agents`: sessions of agents, invented (`eyas.bench.agents`) or recorded (`eyas.bench.agent_traces`).
* `schema`: answers that must follow a JSON schema: a small built-in set, or a file of them. A line of the
  file is {"prompt": text, "schema": object}, and may have "max_tokens". A server that cannot hold output to
  a schema refuses, and that is counted.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from eyas.bench.agent_traces import RecordedSessions
from eyas.bench.agents import SESSIONS, WORDS, agent_sessions
from eyas.bench.jobs import JobTurn, LoadJob, draw_ids, draw_lengths, generator
from eyas.common.errors import ConfigError
from eyas.simulator.workload import BLOCK_TOKENS

CHARACTERS_PER_TOKEN = 4  # of English text, where no tokenizer counts
RANDOM_COUNT = 100
SHAREGPT_COUNT = 100
FEWEST_TOKENS = 2
PERSON, MODEL = ("human", "user"), ("gpt", "assistant")
Talk = list[tuple[str, str]]  # who says what
MULTI_TURN_COUNT, MULTI_TURN_TURNS = 32, 4
SCHEMA_COUNT = 32


@dataclass(frozen=True)
class DatasetOptions:
    """The flags of a dataset. `count` None: as many as the file has, else the dataset's own default."""

    count: int | None = None
    seed: int = 1
    path: Path | None = None
    input_len: int = 256
    output_len: int = 128
    range_ratio: float = 0.0
    turns: int | None = None
    agent_context: int = 100_000
    fixed_output_len: int | None = None
    context_len: int | None = None
    tokenizer: Path | None = None
    slowdown: float = 1.0

    def text(self) -> str:
        """The file's text. Raises ConfigError."""
        if self.path is None:
            raise ConfigError("--dataset-path: this dataset needs a file", param="dataset-path")
        try:
            return self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--dataset-path: {self.path}: {reason}", param="dataset-path") from error

    def refuse(self, line: int, problem: str) -> NoReturn:
        """Raises the ConfigError of a malformed line, counted from 1."""
        raise ConfigError(f"--dataset-path: {self.path}, line {line}: {problem}", param="dataset-path")

    def json_lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Number and object of every line that is not empty. Raises ConfigError."""
        for number, line in enumerate(self.text().split("\n"), 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                self.refuse(number, f"no JSON: {error}")
            if not isinstance(value, dict):
                self.refuse(number, "not a JSON object")
            yield number, value

    def token_counter(self) -> Callable[[str], int]:
        """Counts the tokens of a text: by the tokenizer, else by its characters. Raises ConfigError."""
        if self.tokenizer is None:
            return lambda text: -(-len(text) // CHARACTERS_PER_TOKEN)
        from eyas.common.tokenizers.source import read_tokenizer

        folder = self.tokenizer if self.tokenizer.is_dir() else self.tokenizer.parent
        try:
            tokenizer = read_tokenizer(folder)
        except ConfigError as error:
            raise ConfigError(f"--tokenizer: {error.message}", param="tokenizer") from error
        return lambda text: len(tokenizer.encode(text).ids)


def random_jobs(draw: DatasetOptions) -> list[LoadJob]:
    """`draw.count` jobs; lengths are uniform from max(1, length * ratio) to length. Raises ConfigError."""
    if draw.path is not None:
        raise ConfigError("--dataset-path: random has no file: see --dataset-name", param="dataset-path")
    count = draw.count or RANDOM_COUNT
    inputs = draw_lengths(generator(draw.seed, "input lengths"), draw.input_len, draw.range_ratio, count)
    outputs = draw_lengths(generator(draw.seed, "output lengths"), draw.output_len, draw.range_ratio, count)
    ids = generator(draw.seed, "token ids")
    return [
        LoadJob.single(draw_ids(ids, length), answer) for length, answer in zip(inputs, outputs, strict=True)
    ]


def sharegpt_jobs(draw: DatasetOptions) -> list[LoadJob]:
    """Draws at most `draw.count` requests, each with the first turn of a conversation. Raises ConfigError."""
    count = draw.token_counter()
    selected: list[LoadJob] = []
    for talk in conversations(draw):
        (_, prompt), (_, answer) = talk[:2]
        tokens, length = count(prompt), draw.fixed_output_len or count(answer)
        if min(tokens, length) < FEWEST_TOKENS or tokens + length > (draw.context_len or tokens + length):
            continue
        selected.append(LoadJob.single(prompt, length))
        if len(selected) == (draw.count or SHAREGPT_COUNT):
            break
    if not selected:
        refuse_empty(draw)
    return selected


def whole_conversations(draw: DatasetOptions) -> list[LoadJob]:
    """Draws at most `draw.count` conversations of `draw.turns` requests at most. Raises ConfigError."""
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
            selected.append(LoadJob(tuple(turns[: draw.turns or MULTI_TURN_TURNS])))
        if len(selected) == (draw.count or SHAREGPT_COUNT):
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


def multi_turn_jobs(draw: DatasetOptions) -> list[LoadJob]:
    """`draw.count` conversations of `draw.turns` turns. Raises ConfigError for a malformed file."""
    if draw.path is not None:
        return whole_conversations(draw)
    count, each = draw.count or MULTI_TURN_COUNT, draw.turns or MULTI_TURN_TURNS
    inputs = draw_lengths(
        generator(draw.seed, "input lengths"), draw.input_len, draw.range_ratio, count * each
    )
    outputs = draw_lengths(
        generator(draw.seed, "output lengths"), draw.output_len, draw.range_ratio, count * each
    )
    words = generator(draw.seed, "words")
    turns = [JobTurn(_say(words, length), answer) for length, answer in zip(inputs, outputs, strict=True)]
    return [LoadJob(tuple(turns[i * each : (i + 1) * each])) for i in range(count)]


def _say(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def agent_jobs(draw: DatasetOptions) -> list[LoadJob]:
    """`draw.count` invented sessions, or the file's first ones. Raises ConfigError for a malformed file."""
    if draw.path is None:
        count = draw.count or SESSIONS
        return agent_sessions(count, draw.agent_context, draw.turns, draw.slowdown, draw.seed)
    sessions = RecordedSessions(draw.seed, draw.slowdown, draw.refuse)
    for number, line in draw.json_lines():
        sessions.add(number, line)
    if not (jobs := sessions.jobs()):
        raise ConfigError(f"--dataset-path: {draw.path} has no request", param="dataset-path")
    return jobs[: draw.count]


def trace_jobs(draw: DatasetOptions) -> list[LoadJob]:
    """The file's first `draw.count` requests, due by their timestamps. Raises ConfigError."""
    lines = list(draw.json_lines())[: draw.count]
    if not lines:
        raise ConfigError(f"--dataset-path: {draw.path} has no request", param="dataset-path")
    blocks: dict[int, tuple[int, ...]] = {}
    entries = [_TraceEntry(draw, number, line) for number, line in lines]
    first_ms = min(entry.timestamp for entry in entries)
    requests = []
    for entry in entries:
        for id in entry.hash_ids:
            if id not in blocks:
                blocks[id] = draw_ids(generator(draw.seed, f"block {id}"), BLOCK_TOKENS)
        ids = tuple(token for id in entry.hash_ids for token in blocks[id])[: entry.input_length]
        due_s = 1e-3 * (entry.timestamp - first_ms) * draw.slowdown
        requests.append(LoadJob.single(ids, entry.output_length, due_s))
    return requests


class _TraceEntry:
    """One line, whose fields have been checked."""

    def __init__(self, draw: DatasetOptions, number: int, line: dict[str, Any]) -> None:
        timestamp = line.get("timestamp")
        if (
            isinstance(timestamp, bool)
            or not isinstance(timestamp, int | float)
            or not math.isfinite(timestamp)
        ):
            draw.refuse(number, "timestamp is not a number")
        self.timestamp: float = timestamp
        self.input_length = self._positive(draw, number, line, "input_length")
        self.output_length = self._positive(draw, number, line, "output_length")
        hash_ids = line.get("hash_ids")
        if not isinstance(hash_ids, list) or not all(type(id) is int for id in hash_ids):
            draw.refuse(number, "hash_ids is not a list of whole numbers")
        needed = -(-self.input_length // BLOCK_TOKENS)
        if len(hash_ids) != needed:
            problem = f"input_length {self.input_length} needs {needed} hash_ids, not {len(hash_ids)}"
            draw.refuse(number, problem)
        self.hash_ids: list[int] = hash_ids

    @staticmethod
    def _positive(draw: DatasetOptions, number: int, line: dict[str, Any], name: str) -> int:
        value = line.get(name)
        if type(value) is not int or value < 1:
            draw.refuse(number, f"{name} is not a positive whole number")
        return value


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


TEXT, NUMBER, YES_NO = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
MOOD = {"enum": ["good", "bad", "neither"]}
BUILT_IN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Describe the capital of France.", _object(name=TEXT, country=TEXT, population=NUMBER)),
    ("List three fruits with their colours.", _list(_object(fruit=TEXT, colour=TEXT))),
    ("Is 91 a prime number? Give its factors.", _object(prime=YES_NO, factors=_list(NUMBER))),
    ("Rate the sentence 'I love this book'.", _object(mood=MOOD, score=NUMBER)),
    ("Write a shopping list for pancakes.", _object(items=_list(TEXT), servings=NUMBER)),
    ("Name a person and where they live.", _object(name=TEXT, home=_object(street=TEXT, city=TEXT))),
)


def schema_jobs(draw: DatasetOptions) -> list[LoadJob]:
    """The set or the file, over and over up to `draw.count`. Raises ConfigError for a malformed file."""
    if draw.path is None:
        entries = [
            LoadJob((JobTurn(prompt, draw.output_len),), may_stop=True, schema=s) for prompt, s in BUILT_IN
        ]
        return list(itertools.islice(itertools.cycle(entries), draw.count or SCHEMA_COUNT))
    entries = [_entry(draw, number, line) for number, line in draw.json_lines()]
    if not entries:
        raise ConfigError(f"--dataset-path: {draw.path} has no request", param="dataset-path")
    return list(itertools.islice(itertools.cycle(entries), draw.count or len(entries)))


def _entry(draw: DatasetOptions, number: int, line: dict[str, Any]) -> LoadJob:
    prompt, schema = line.get("prompt"), line.get("schema")
    max_tokens = line.get("max_tokens", draw.output_len)
    if not isinstance(prompt, str) or not prompt:
        draw.refuse(number, "prompt is not a text")
    if not isinstance(schema, dict):
        draw.refuse(number, "schema is not a JSON object")
    if type(max_tokens) is not int or max_tokens < 1:
        draw.refuse(number, "max_tokens is not a positive whole number")
    return LoadJob((JobTurn(prompt, max_tokens),), may_stop=True, schema=schema)


@dataclass(frozen=True)
class Dataset:
    """A dataset: a few words about it, and the function that gives its jobs."""

    text: str
    jobs: Callable[[DatasetOptions], list[LoadJob]]


DATASETS = {
    "random": Dataset("token ids, lengths drawn", random_jobs),
    "sharegpt": Dataset("first turns of a ShareGPT file", sharegpt_jobs),
    "multi-turn": Dataset("conversations: invented, or of a ShareGPT file", multi_turn_jobs),
    "trace": Dataset("a file in Mooncake's format, at its own times", trace_jobs),
    "agents": Dataset("sessions of agents: invented, or recorded", agent_jobs),
    "schema": Dataset("JSON schemas: built-in, or of a file", schema_jobs),
}
