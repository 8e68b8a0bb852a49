"""The parts that every evaluation shares: a question with its judge, a task, and reading JSON lines."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eyas.common.errors import ConfigError

Judge = Callable[[str, str], bool]
"""True if an answer, the first argument, is right by what is expected, the second."""


@dataclass(frozen=True)
class EvalQuestion:
    """A prompt, and the words or the result that its answer must have. `group`: the score that counts it."""

    prompt: str
    expected: str
    judge: Judge
    group: str = ""


@dataclass(frozen=True)
class EvalTask:
    """Questions, and how they are asked: as the one message of a chat, or as text to be continued."""

    name: str
    questions: tuple[EvalQuestion, ...]
    max_tokens: int
    chat: bool = False
    stop: tuple[str, ...] = ()
    metric: str = "accuracy"
    """The name of what the questions' own judges find."""
    also: Mapping[str, Judge] = field(default_factory=dict)
    """Other judges of the same answers, by name. They are shown and decide nothing."""
    bars: Mapping[str, float] = field(default_factory=dict)
    """The share of a group's answers that must be right, where the task demands one."""


def read_json_lines(path: Path, fields: Sequence[str]) -> dict[int, dict[str, str]]:
    """The objects of a file with one per line (`.gz`: packed), by line; these fields of them, which are text.

    Raises ConfigError for a file that cannot be read or holds no object, and for a malformed line, by number.
    """
    objects = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            objects[number] = _object(f"{path}:{number}", line, fields)
    if not objects:
        raise ConfigError(f"{path} holds no question")
    return objects


def read_text(path: Path) -> str:
    """The text of a file. Raises ConfigError if it cannot be read."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error


def _object(place: str, line: str, fields: Sequence[str]) -> dict[str, str]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: not a JSON object")
    for name in fields:
        if not isinstance(value.get(name), str):
            raise ConfigError(f'{place}: the field "{name}" is missing or is not text')
        if any("\ud800" <= character <= "\udfff" for character in value[name]):
            raise ConfigError(f'{place}: the field "{name}" holds half of a surrogate pair')
    return {name: value[name] for name in fields}
