"""Reads plain API keys, and hands them to child processes: never as an argument.

Every user of a machine can read a process's arguments, but not its environment. A file has no plain keys
(`eyas.common.security.key_file`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from eyas.common.errors import ConfigError
from eyas.common.security.key_file import is_key

VARIABLE = "EYAS_API_KEY"


def from_environment() -> tuple[str, ...]:
    """The keys in EYAS_API_KEY, one per line; () if it is not set or empty."""
    text = os.environ.get(VARIABLE, "")
    return parse(text, VARIABLE) if text.strip() else ()


def environment(keys: Sequence[str]) -> dict[str, str]:
    """Returns this process's environment for a child that gets `keys` and no others."""
    left = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return left | ({VARIABLE: "\n".join(keys)} if keys else {})


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
        if not is_key(key):
            problem = f"line {number} is not a key: a key is printable ASCII without spaces"
            raise ConfigError(f"{source}: {problem}", param=flag)
    return tuple(keys)
