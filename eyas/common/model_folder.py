"""A model's folder, without its weights: its name, its JSON files, and the source of its tokenizer.

A model is named after its folder, or as on the hub if the folder is in the hub's cache. Flags may name
another folder for the tokenizer, and a chat template.
"""

from __future__ import annotations

import json
import re
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eyas.common.errors import ConfigError

_ON_HUB = re.compile(r"(?P<name>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(@(?P<revision>[^@\s]+))?", re.ASCII)
_TEMPLATE_MARKS = ("{{", "{%")
"""Signs that only a chat template has, and no path."""


class HubName(NamedTuple):
    """A model's name on the hub, ORG/NAME, and the requested branch, tag or commit, if any."""

    name: str
    revision: str | None


def on_hub(text: str) -> HubName | None:
    """Parses `ORG/NAME` or `ORG/NAME@REVISION`; None for a folder that exists, and for other paths."""
    match = _ON_HUB.fullmatch(text)
    return None if match is None or Path(text).exists() else HubName(match["name"], match["revision"])


def model_name(model: str) -> str:
    """ORG/NAME for a name on the hub and for a snapshot in its cache; else the folder's name."""
    if named := on_hub(model):
        return named.name
    folder = Path(model).absolute()
    cached = folder.parent.parent.name.split("--")
    if folder.parent.name == "snapshots" and cached[0] == "models" and len(cached) == 3:
        return "/".join(cached[1:])
    return folder.resolve().name


def read_json_object(path: Path, param: str | None = None) -> dict[str, Any]:
    """Reads a file with one JSON object.

    Raises ConfigError with `param`, which names the file, if it cannot be read or has no object, for half a
    surrogate pair, which is invalid text, and for a name that occurs twice in an object with different
    values: JSON parsers disagree on which one counts.
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


@dataclass(frozen=True)
class TextSource:
    """The tokenizer of `folder`, with its chat templates, or with `template` instead (`given_template`)."""

    folder: Path
    template: str | None = None


def given_template(given: str) -> tuple[str, str]:
    """The chat template of a flag, which is a template or the path of one, and its name in errors.

    Raises ConfigError for a file that cannot be read.
    """
    flag = "chat-template"
    if any(mark in given for mark in _TEMPLATE_MARKS):
        return given, f"--{flag}: the template"
    try:
        return Path(given).read_text(encoding="utf-8"), f"--{flag}: {given}"
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        text = f"--{flag}: {given} is neither a template ({{{{ or {{%) nor a file that can be read: {reason}"
        raise ConfigError(text, param=flag) from error
