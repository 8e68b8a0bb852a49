"""Where results go: checked before anything is measured, and lines of JSON appended. It knows no figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eyas.common.errors import ConfigError


def check_writable(flag: str, path: Path | None) -> None:
    """Raises ConfigError, which names the flag, for a file whose folder does not exist, or for a folder."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"--{flag}: {path} cannot be written", param=flag)


def append_line(path: Path | None, line: dict[str, Any]) -> None:
    """Appends one object; None: nowhere."""
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
