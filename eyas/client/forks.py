"""Forked processes: gRPC does not survive a fork: a process that used it before has it dead in its child.

Its threads are gone there, so a call would wait for ever, whatever its timeout, on new channels too.
"""

from __future__ import annotations

import functools
import os

from eyas.common.errors import InvalidRequest


def is_forked() -> bool:
    """Whether this process was forked from one that has made a client."""
    return _home() != os.getpid()


def refuse_forked() -> None:
    """Raises InvalidRequest in such a process."""
    if is_forked():
        raise InvalidRequest(
            "this process was forked from one that has made a client, and gRPC does not survive that: "
            "make the first client in the child, or start processes by multiprocessing's 'spawn'"
        )


@functools.cache
def _home() -> int:
    """The process that made the first client; a forked child remembers its parent's."""
    return os.getpid()
