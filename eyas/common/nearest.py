"""Suggestions for a misspelled name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that names the nearest of `known`; "" if none is near."""
    matches = difflib.get_close_matches(name, list(known), 1)
    return f": did you mean {matches[0]}?" if matches else ""
