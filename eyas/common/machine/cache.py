"""Where this user's caches lie. It knows the directory alone, not what is in it."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """`eyas` in the user's cache directory: $XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eyas"
