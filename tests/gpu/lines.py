"""Files of results, a line of JSON for each figure, which scripts print as soon as they know it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eyas.bench.output import append_line


def say(out: Path, line: dict[str, Any]) -> None:
    """Prints a line, and appends it to the file."""
    print(json.dumps(line), flush=True)
    append_line(out, line)


def say_all(out: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Each line, as soon as it comes."""
    for line in lines:
        say(out, line)


def lines_of(out: Path) -> list[dict[str, Any]]:
    """What a file has."""
    return [json.loads(line) for line in out.read_text().splitlines()]
