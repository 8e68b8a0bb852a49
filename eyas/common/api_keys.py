"""Where API keys come from, and how a process hands them to its child: never as an argument.

Every user of a machine can read a process's arguments, but not its environment and its files. This module
refuses to know what a key permits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from eyas.common.errors import ConfigError

VARIABLE = "EYAS_API_KEY"


def from_environment() -> tuple[str, ...]:
    """The keys in EYAS_API_KEY, one per line; () if it is not set or empty."""
    text = os.environ.get(VARIABLE, "")
    return parse(text, VARIABLE) if text.strip() else ()


def environment(keys: Sequence[str]) -> dict[str, str]:
    """This process's environment for a child that gets `keys` and no others."""
    left = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return left | ({VARIABLE: "\n".join(keys)} if keys else {})


def from_file(path: str) -> tuple[str, ...]:
    """The keys in a file, one per line. Raises ConfigError if it has none or cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: {path} cannot be read: {error}", param="api-key-file") from error
    return parse(text, "--api-key-file")


def parse(text: str, source: str) -> tuple[str, ...]:
    """The keys in `text`, one per line; empty lines and lines that begin with # are skipped.

    Raises ConfigError, naming `source`, if there is no key or one that an HTTP header cannot carry.
    """
    flag = source.removeprefix("--")
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    keys = {line: number for number, line in lines if line and not line.startswith("#")}
    if not keys:
        raise ConfigError(
            f"{source}: there is no key in it (lines that begin with # do not count)", param=flag
        )
    for key, number in keys.items():
        if not (key.isascii() and key.isprintable() and " " not in key):
            problem = f"line {number} is not a key: a key is printable ASCII without spaces"
            raise ConfigError(f"{source}: {problem}", param=flag)
    return tuple(keys)
