"""A file that holds one JSON object, as a folder of a model has several: read, or refused in one sentence."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

from eyas.common.errors import ConfigError


def read_json_object(path: Path, param: str | None = None) -> dict[str, Any]:
    """The object. Raises ConfigError, which names the file, for one that cannot be read or holds no object,
    for half a surrogate pair, which is no text, and for a name that stands twice in an object with different
    values: readers disagree on which counts.

    `param`: of the error.
    """
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, object_pairs_hook=_once)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param=param) from None
    except RecursionError:
        raise ConfigError(f"{path} cannot be read: its JSON is nested too deeply", param=param) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}", param=param) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object", param=param)
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members and members[name] != value:
            raise ValueError(f"{reprlib.repr(name)} stands twice in one object, with different values")
        members[name] = value
    return members
