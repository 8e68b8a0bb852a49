"""The directory of this user's caches."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """`eyas` in the user's cache directory: $XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eyas"
