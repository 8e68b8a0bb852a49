"""Requests whose answers must follow a JSON schema: a small built-in set, or a file of them.

A line of the file is {"prompt": text, "schema": object}, and may have "max_tokens". A server that cannot hold
output to a schema refuses, and that is counted.
"""

from __future__ import annotations

import itertools
from typing import Any

from eyas.bench.datasets.draw import DatasetOptions
from eyas.bench.jobs import JobTurn, LoadJob
from eyas.common.errors import ConfigError

COUNT = 32


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


def jobs(draw: DatasetOptions) -> list[LoadJob]:
    """The set or the file, over and over up to `draw.count`. Raises ConfigError for a malformed file."""
    if draw.path is None:
        entries = [
            LoadJob((JobTurn(prompt, draw.output_len),), may_stop=True, schema=s) for prompt, s in BUILT_IN
        ]
        return list(itertools.islice(itertools.cycle(entries), draw.count or COUNT))
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
