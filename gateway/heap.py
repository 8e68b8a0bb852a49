"""Freed memory goes back to the system.

The C library keeps what was freed for its threads' next use: after a burst of large texts or bodies that is
most of what the burst took. It knows the C library, and refuses to know when there was a burst.
"""

from __future__ import annotations

import contextlib
import ctypes


def give_back() -> None:
    """Gives back what is free. Takes some milliseconds per 100 MiB; other threads go on."""
    with contextlib.suppress(AttributeError):  # not every C library can
        ctypes.CDLL(None).malloc_trim(0)
