"""Files for results: checked before anything is measured, and lines of JSON appended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eyas.common.errors import ConfigError


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
