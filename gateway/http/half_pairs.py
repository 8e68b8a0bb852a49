"""Where a JSON body holds half of a surrogate pair, which is no text: an escape like \\ud800 alone, or three
bytes.

It is asked about bodies that could not be read.
"""

from __future__ import annotations

import json
import re
from typing import Any

_HALF = re.compile(r"[\ud800-\udfff]")


def half_pair(body: bytes) -> str | None:
    """The first field with one, as messages[0].content; None where there is none, or the body is no JSON."""
    if b"\\u" not in body and b"\xed" not in body:
        return None
    try:
        return _place(json.loads(body), "")
    except (ValueError, RecursionError):
        return None


def _place(value: Any, path: str) -> str | None:
    if isinstance(value, str):
        return path if _HALF.search(value) else None
    if isinstance(value, list):
        parts = ((item, f"{path}[{i}]") for i, item in enumerate(value))
    elif isinstance(value, dict):
        if any(map(_HALF.search, value)):
            return path
        parts = ((item, f"{path}.{name}" if path else name) for name, item in value.items())
    else:
        return None
    return next((place for item, at in parts if (place := _place(item, at)) is not None), None)
