"""Memory of a process: freed memory goes back to the system, and what stays is not searched again.

The C library keeps what was freed for its threads' next use: after a burst of large texts or bodies that is
most of what the burst took. Python's collector looks through all objects at times, while the event loop
waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc


def give_back() -> None:
    """Gives back what is free. Takes some milliseconds per 100 MiB; other threads go on."""
    with contextlib.suppress(AttributeError):  # not every C library can
        ctypes.CDLL(None).malloc_trim(0)


def keep_all() -> None:
    """All objects that are there now stay to the end, so the collector need not look at them again: after a
    gateway's start they are 90,000, which stopped its loop for 65 ms at a time.
    """
    gc.collect()
    gc.freeze()
