"""Results as they come: a line of a table for people, a JSON line for a file, which is checked before."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eyas.common.errors import ConfigError

WIDTH = 10  # of a column, unless its title or its first value is wider


def check_writable(flag: str, path: Path | None) -> None:
    """Raises ConfigError, which names the flag, for a file that cannot be written."""
    if path is None:
        return
    new = not path.exists()
    try:
        path.open("a").close()
        if new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--{flag}: {path} cannot be written: {error.strerror}", param=flag) from error


def append_line(path: Path | None, line: dict[str, Any]) -> None:
    """Appends one object; None: nowhere."""
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class TablePrinter:
    """Prints a table with `columns` (title -> field), as `show(field, value)` writes values.

    `first`: the least width of the first column.

    A line with an `error` is no figure: it is named on standard error, counted in `failed`, and kept out of
    `file`. Raises ConfigError if `file` cannot be written.
    """

    def __init__(
        self, columns: Mapping[str, str], file: Path | None, show: Callable[[str, Any], str], first: int = 0
    ) -> None:
        self.failed = 0
        self._columns = columns
        self._show = show
        self._first = first
        self._widths: list[int] = []
        self._file = file
        check_writable("output-file", file)

    def tell(self, line: dict[str, Any]) -> None:
        """Prints one line, and appends it to the file."""
        if "error" in line:
            self.failed += 1
            named = " ".join(
                str(line[name]) for name in ("mode", "family", "kernel", "batch") if name in line
            )
            print(f"eyas: {named}: {line['error']}", file=sys.stderr, flush=True)
            return
        cells = [self._show(field, line[field]) if field in line else "-" for field in self._columns.values()]
        if not self._widths:
            self._widths = [max(WIDTH, len(t), len(c)) for t, c in zip(self._columns, cells, strict=True)]
            self._widths[0] = max(self._widths[0], self._first)
            self._print(list(self._columns))
        self._print(cells)
        append_line(self._file, line)

    def _print(self, cells: list[str]) -> None:
        first, *others = (cell.rjust(width) for cell, width in zip(cells, self._widths, strict=True))
        print("  ".join([first.strip().ljust(len(first)), *others]), flush=True)
