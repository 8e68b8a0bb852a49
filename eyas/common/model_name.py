"""The name of a model: its folder's, or the hub's where the folder lies in the hub's cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_ON_HUB = re.compile(r"(?P<name>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(@(?P<revision>[^@\s]+))?", re.ASCII)


class HubName(NamedTuple):
    """A model's name on the hub, ORG/NAME, and the branch, tag or commit, if one is asked for."""

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
